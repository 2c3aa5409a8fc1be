#include "bootstrap/rendezvous_client.h"

#include <algorithm>
#include <chrono>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

/// The reply to a wait may arrive this long after the end of the wait.
constexpr auto kTimeToReply = std::chrono::seconds(5);

Deadline short_deadline() { return std::chrono::steady_clock::now() + kTimeToReply; }

std::chrono::milliseconds left_until(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, std::chrono::milliseconds(0));
}

Deadline reply_deadline(Deadline deadline) {
  return std::max(deadline, std::chrono::steady_clock::now()) + kTimeToReply;
}

Bytes copy_of_text(const std::string& text) {
  const auto bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

void RendezvousClient::check_size(const Bytes& frame) {
  if (frame.size() > kMostFrameBytes) throw Error("hvd::init: a value is larger than 64 MiB");
}

ServerReply RendezvousClient::request_to_join(Deadline deadline) {
  return request({.verb = "join", .value = text_of(encode(own_)), .left = left_until(deadline)},
                 deadline);
}

bool RendezvousClient::is_accepted(const ServerReply& reply) {
  if (reply.verdict == "accepted") return true;
  if (const auto refusal = decode_refusal(bytes_of(reply.value))) refusal->raise();
  return false;
}

std::optional<Bytes> RendezvousClient::value_of(const ServerReply& reply) const {
  if (reply.verdict == "failed") raise_failure(bytes_of(reply.value));
  if (reply.verdict != "value") return std::nullopt;
  return copy_of_text(reply.value);
}

void RendezvousClient::put(std::string_view key, std::span<const std::byte> value) {
  const ServerReply reply =
      request({.verb = "put", .key = std::string(key), .value = text_of(value)}, short_deadline());
  if (reply.verdict != "done")
    throw Error(text("hvd::init: '", key, "' was put into ", place_, " twice"));
}

std::optional<Bytes> RendezvousClient::get(std::string_view key) {
  return value_of(request({.verb = "get", .key = std::string(key)}, short_deadline()));
}

std::optional<Bytes> RendezvousClient::wait(std::string_view key, int /*from*/, Deadline deadline) {
  return value_of(request({.verb = "wait", .key = std::string(key), .left = left_until(deadline)},
                          reply_deadline(deadline)));
}

std::vector<Bytes> RendezvousClient::exchange(std::string_view what,
                                              std::span<const std::byte> mine, Deadline deadline) {
  const ServerReply reply = request({.verb = "exchange",
                                     .key = std::string(what),
                                     .value = text_of(mine),
                                     .left = left_until(deadline)},
                                    reply_deadline(deadline));
  if (reply.verdict == "failed") raise_failure(bytes_of(reply.value));
  if (reply.verdict == "absent") throw_absent(what, parse_number<int>(reply.value).value_or(-1));
  const auto parts = split_fields(bytes_of(reply.value), static_cast<std::size_t>(size()));
  if (reply.verdict != "all" || !parts) {
    throw Error(text("hvd::init: '", what, "' was exchanged at ", place_,
                     " twice, or the server there is not hvd's"));
  }
  std::vector<Bytes> all;
  for (const std::string& part : *parts) all.push_back(copy_of_text(part));
  return all;
}

void RendezvousClient::fail(const Failure& failure) noexcept {
  try {
    request({.verb = "fail", .value = text_of(encode(failure))}, short_deadline());
  } catch (const std::exception&) {
    // The server detects the end of this rank.
  }
}

void RendezvousClient::leave(Deadline) noexcept {
  try {
    request({.verb = "leave"}, short_deadline());
  } catch (const std::exception&) {
    // The server has ended.
  }
}

}  // namespace hvd::rendezvous
