#include "bootstrap/served_rendezvous.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

/// The answer to a wait may come so much after the wait's end.
constexpr auto kTimeToAnswer = std::chrono::seconds(5);

Deadline in_time() { return std::chrono::steady_clock::now() + kTimeToAnswer; }

std::chrono::milliseconds left_until(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, std::chrono::milliseconds(0));
}

Deadline answered_by(Deadline deadline) {
  return std::max(deadline, std::chrono::steady_clock::now()) + kTimeToAnswer;
}

Bytes copy_of_text(const std::string& text) {
  const auto bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

void ServedRendezvous::check_size(const Bytes& frame) {
  if (frame.size() > kMostFrameBytes) throw Error("hvd::init: a value is larger than 64 MiB");
}

Answer ServedRendezvous::ask_to_come(Deadline deadline) {
  return ask({.verb = "come", .value = text_of(encode(own_)), .left = left_until(deadline)},
             deadline);
}

bool ServedRendezvous::is_welcome(const Answer& answer) {
  if (answer.verdict == "welcome") return true;
  if (const auto refusal = decode_refusal(bytes_of(answer.value))) refusal->raise();
  return false;
}

std::optional<Bytes> ServedRendezvous::value_of(const Answer& answer) const {
  if (answer.verdict == "failed") raise_failure(bytes_of(answer.value));
  if (answer.verdict != "value") return std::nullopt;
  return copy_of_text(answer.value);
}

void ServedRendezvous::put(std::string_view key, std::span<const std::byte> value) {
  const Answer answer =
      ask({.verb = "put", .key = std::string(key), .value = text_of(value)}, in_time());
  if (answer.verdict != "done")
    throw Error("hvd::init: '" + std::string(key) + "' was put into " + place_ + " twice");
}

std::optional<Bytes> ServedRendezvous::get(std::string_view key) {
  return value_of(ask({.verb = "get", .key = std::string(key)}, in_time()));
}

std::optional<Bytes> ServedRendezvous::wait(std::string_view key, int /*from*/, Deadline deadline) {
  return value_of(ask({.verb = "wait", .key = std::string(key), .left = left_until(deadline)},
                      answered_by(deadline)));
}

std::vector<Bytes> ServedRendezvous::exchange(std::string_view what,
                                              std::span<const std::byte> mine, Deadline deadline) {
  const Answer answer = ask({.verb = "exchange",
                             .key = std::string(what),
                             .value = text_of(mine),
                             .left = left_until(deadline)},
                            answered_by(deadline));
  if (answer.verdict == "failed") raise_failure(bytes_of(answer.value));
  if (answer.verdict == "absent") throw_absent(what, std::atoi(answer.value.c_str()));
  const auto parts = split_fields(bytes_of(answer.value), static_cast<std::size_t>(size()));
  if (answer.verdict != "all" || !parts) {
    throw Error("hvd::init: '" + std::string(what) + "' was exchanged at " + place_ +
                " twice, or what serves there is no rendezvous of hvd's");
  }
  std::vector<Bytes> all;
  for (const std::string& part : *parts) all.push_back(copy_of_text(part));
  return all;
}

void ServedRendezvous::fail(const Failure& failure) noexcept {
  try {
    ask({.verb = "fail", .value = text_of(encode(failure))}, in_time());
  } catch (const std::exception&) {
    // The others notice that this rank has ended.
  }
}

void ServedRendezvous::leave(Deadline) noexcept {
  try {
    ask({.verb = "leave"}, in_time());
  } catch (const std::exception&) {
    // There is nobody left to tell.
  }
}

}  // namespace hvd::rendezvous
