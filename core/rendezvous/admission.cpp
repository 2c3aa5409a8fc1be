#include "rendezvous/admission.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>

#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

/// Of what ranks say when they come. A rank of another hvd is told so, not misunderstood.
constexpr const char* kFormat = "hvd rendezvous 1";

std::optional<int> number_in(const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace

void Refusal::raise() const {
  if (usage) throw UsageError(text);
  throw PeerLostError(text, rank);
}

Bytes join_fields(const std::vector<std::string>& fields) {
  Bytes bytes;
  for (const std::string& field : fields) {
    const auto size = static_cast<std::uint32_t>(field.size());
    const auto* const head = reinterpret_cast<const std::byte*>(&size);
    const auto* const body = reinterpret_cast<const std::byte*>(field.data());
    bytes.insert(bytes.end(), head, head + sizeof size);
    bytes.insert(bytes.end(), body, body + field.size());
  }
  return bytes;
}

std::optional<std::vector<std::string>> split_fields(std::span<const std::byte> bytes,
                                                     std::size_t count) {
  std::vector<std::string> fields;
  while (!bytes.empty()) {
    std::uint32_t size = 0;
    if (bytes.size() < sizeof size) return std::nullopt;
    std::memcpy(&size, bytes.data(), sizeof size);
    bytes = bytes.subspan(sizeof size);
    if (bytes.size() < size) return std::nullopt;
    fields.emplace_back(reinterpret_cast<const char*>(bytes.data()), size);
    bytes = bytes.subspan(size);
  }
  if (fields.size() != count) return std::nullopt;
  return fields;
}

Bytes encode(const Failure& failure) {
  if (failure.lost)
    return encode(Refusal{.usage = false, .rank = *failure.lost, .text = failure.reason});
  const auto bytes = bytes_of(failure.reason);
  return {bytes.begin(), bytes.end()};
}

void raise_failure(std::span<const std::byte> bytes) {
  if (const auto lost = decode_refusal(bytes)) lost->raise();
  throw Error(text_of(bytes));
}

std::optional<Bytes> look_for(const std::function<std::optional<Bytes>()>& value,
                              const std::function<std::optional<Bytes>()>& failure) {
  if (auto found = value()) return found;
  const auto reason = failure();
  if (!reason) return std::nullopt;
  auto found = value();  // as it may have come before the failure
  if (!found) raise_failure(*reason);
  return found;
}

Bytes encode(const Refusal& refusal) {
  return join_fields(
      {refusal.usage ? "usage" : "lost", std::to_string(refusal.rank), refusal.text});
}

std::optional<Refusal> decode_refusal(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, 3);
  if (!fields) return std::nullopt;
  const auto rank = number_in((*fields)[1]);
  if (!rank) return std::nullopt;
  return Refusal{.usage = (*fields)[0] == "usage", .rank = *rank, .text = (*fields)[2]};
}

std::string Arrival::who() const {
  const auto space = identity.find(' ');
  const auto end = identity.find(' ', space + 1);
  if (space == std::string::npos || end == std::string::npos) return "an unknown process";
  return "host " + identity.substr(0, space) + ", process " +
         identity.substr(space + 1, end - space - 1);
}

Bytes encode(const Arrival& arrival) {
  const Introduction& own = arrival.introduction;
  return join_fields({kFormat, own.job, own.token, own.build, std::to_string(own.rank),
                      std::to_string(own.size), arrival.identity});
}

std::optional<Arrival> decode_arrival(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, 7);
  if (!fields || (*fields)[0] != kFormat) return std::nullopt;
  const auto rank = number_in((*fields)[4]);
  const auto size = number_in((*fields)[5]);
  if (!rank || !size) return std::nullopt;
  return Arrival{.introduction = {.job = (*fields)[1],
                                  .token = (*fields)[2],
                                  .build = (*fields)[3],
                                  .rank = *rank,
                                  .size = *size},
                 .identity = (*fields)[6]};
}

std::string make_identity() {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  std::random_device random;
  const std::uint64_t own = std::uint64_t{random()} << 32 | random();
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, own, 16).ptr;
  return std::string(host) + " " + std::to_string(::getpid()) + " " + std::string(text, end);
}

std::optional<Refusal> object_to(const Arrival& arrival, const Introduction& own,
                                 const std::string& place) {
  const Introduction& other = arrival.introduction;
  const std::string rank = "rank " + std::to_string(other.rank) + " (" + arrival.who() + ")";
  const auto usage = [](std::string text) {
    return Refusal{.usage = true, .rank = -1, .text = "hvd::init: " + std::move(text)};
  };
  if (other.job != own.job || other.token != own.token) {
    return usage(rank + " has come to " + place + " for " +
                 (other.job != own.job
                      ? "job '" + other.job + "', where rank 0 begins job '" + own.job + "'"
                      : "job '" + own.job + "' with another token than rank 0's") +
                 "; give each job a place of its own");
  }
  if (other.build != own.build) {
    return usage(rank + " has hvd " + other.build + ", rank 0 has " + own.build +
                 "; start the same program everywhere");
  }
  if (other.size != own.size) {
    return usage(rank + " expects " + std::to_string(other.size) + " ranks, rank 0 " +
                 std::to_string(own.size) + "; give all ranks the same world size");
  }
  return std::nullopt;
}

Deadline time_to_refuse(Deadline deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  return deadline - std::min<Deadline::duration>(left / 10, std::chrono::seconds(1));
}

Refusal missing(const std::vector<int>& ranks, const std::string& place) {
  std::string list;
  for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return {.usage = false,
          .rank = ranks.size() == 1 ? ranks.front() : -1,
          .text = "hvd::init: rank" + std::string(ranks.size() == 1 ? " " : "s ") + list +
                  (ranks.size() == 1 ? " has" : " have") + " not come to " + place +
                  " in time; start as many ranks as the world size says, with the same place, and "
                  "see whether one has ended early"};
}

}  // namespace hvd::rendezvous
