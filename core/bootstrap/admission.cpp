#include "bootstrap/admission.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

/// Of what ranks say when they come. A rank of another hvd is told so, not misunderstood.
constexpr const char* kFormat = "hvd rendezvous 4";

template <typename Number = int>
std::optional<Number> number_in(const std::string& text) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// "rank 3", "ranks 1, 3", "ranks 0, 1, 2, 3 and 96 more ranks".
std::string list_of(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 32;
  std::string list;
  const std::size_t shown = std::min(ranks.size(), kMost);
  for (std::size_t i = 0; i < shown; ++i) list += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (shown < ranks.size()) list += " and " + std::to_string(ranks.size() - shown) + " more ranks";
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

/// Of one process, and new with each call.
std::string make_identity() {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  std::random_device random;
  const std::uint64_t own = std::uint64_t{random()} << 32 | random();
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, own, 16).ptr;
  return std::string(host) + " " + std::to_string(::getpid()) + " " + std::string(text, end);
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
                      std::to_string(own.size), arrival.identity, arrival.boot,
                      std::to_string(arrival.pid_namespace), std::to_string(arrival.pid),
                      std::to_string(arrival.left.count())});
}

std::optional<Arrival> decode_arrival(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, 11);
  if (!fields || (*fields)[0] != kFormat) return std::nullopt;
  const auto rank = number_in((*fields)[4]);
  const auto size = number_in((*fields)[5]);
  const auto pid_namespace = number_in<std::int64_t>((*fields)[8]);
  const auto pid = number_in<std::int64_t>((*fields)[9]);
  const auto left = number_in<std::int64_t>((*fields)[10]);
  if (!rank || !size || !pid_namespace || !pid || !left) return std::nullopt;
  return Arrival{.introduction = {.job = (*fields)[1],
                                  .token = (*fields)[2],
                                  .build = (*fields)[3],
                                  .rank = *rank,
                                  .size = *size},
                 .identity = (*fields)[6],
                 .boot = (*fields)[7],
                 .pid_namespace = *pid_namespace,
                 .pid = *pid,
                 .left = std::chrono::milliseconds(*left)};
}

Bytes encode(Arrival arrival, Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  arrival.left = std::max(left, std::chrono::milliseconds(1));
  return encode(arrival);
}

Arrival arrival_of(const Introduction& own) {
  const ProcessIdentity process = current_process();
  return {.introduction = own,
          .identity = make_identity(),
          .boot = boot_id(),
          .pid_namespace = static_cast<std::int64_t>(process.pid_namespace),
          .pid = process.pid};
}

// The start time of a process is left out: /proc may be that of another pid namespace, and shows
// other processes then. Without it a number that has been given to another process hides an end;
// nothing makes one up.
ProcessWatch watch(const Arrival& arrival) {
  if (arrival.boot.empty() || arrival.boot != boot_id()) return {};
  return ProcessWatch({.pid = arrival.pid,
                       .start_time = 0,
                       .pid_namespace = static_cast<std::uint64_t>(arrival.pid_namespace)});
}

std::optional<Refusal> object_to(const Arrival& arrival, const Introduction& own,
                                 const std::string& place) {
  const Introduction& other = arrival.introduction;
  const std::string rank = "rank " + std::to_string(other.rank) + " (" + arrival.who() + ")";
  const std::string first = "rank " + std::to_string(own.rank);
  const auto usage = [](std::string text) {
    return Refusal{.usage = true, .rank = -1, .text = "hvd::init: " + std::move(text)};
  };
  if (!is_of_job(other, own)) {
    return usage(rank + " has come to " + place + " for " +
                 (other.job != own.job
                      ? "job '" + other.job + "', where " + first + " begins job '" + own.job + "'"
                      : "job '" + own.job + "' with another token than " + first + "'s") +
                 "; give each job a place of its own");
  }
  if (other.build != own.build) {
    return usage(rank + " has hvd " + other.build + ", " + first + " has " + own.build +
                 "; start the same program everywhere");
  }
  if (other.size != own.size) {
    return usage(rank + " expects " + std::to_string(other.size) + " ranks, " + first + " " +
                 std::to_string(own.size) + "; give all ranks the same world size");
  }
  return std::nullopt;
}

Deadline time_to_refuse(Deadline deadline, Deadline now) {
  const auto left = deadline - now;
  return deadline - std::min<Deadline::duration>(left / 10, std::chrono::seconds(1));
}

Deadline sooner(Deadline time, const Arrival& arrival) {
  if (arrival.left <= arrival.left.zero()) return time;
  const auto now = std::chrono::steady_clock::now();
  return std::min(time, time_to_refuse(now + arrival.left, now));
}

Deadline time_to_tell_late_comers(Deadline deadline) {
  return std::min<Deadline>(deadline, std::chrono::steady_clock::now() + std::chrono::seconds(2));
}

Refusal ended(const Arrival& arrival, const std::string& place, const std::vector<int>& absent) {
  const int rank = arrival.introduction.rank;
  return {.usage = false,
          .rank = rank,
          .text = "hvd::init: rank " + std::to_string(rank) + " (" + arrival.who() + ") came to " +
                  place + " and has ended before the job has begun" +
                  (absent.empty() ? "" : ", while " + list_of(absent) + " had not come") +
                  "; see what it last wrote"};
}

std::string within(Deadline::duration limit) {
  char text[64];
  std::snprintf(text, sizeof text, "within %.1f s (HVD_START_TIMEOUT)",
                std::chrono::duration<double>(limit).count());
  return text;
}

bool is_of_job(const Introduction& other, const Introduction& own) {
  return other.job == own.job && other.token == own.token;
}

void Strangers::note(const Arrival& arrival, const Introduction& own) {
  const Introduction& other = arrival.introduction;
  if (other.rank < 0 || other.rank >= own.size) return;
  by_rank_[other.rank] =
      "a process (" + arrival.who() + ") that came as rank " + std::to_string(other.rank) +
      " was refused: it has " +
      (other.job != own.job ? "another job name (HVD_JOB_NAME)" : "another token (HVD_JOB_TOKEN)");
}

std::string Strangers::text(const std::vector<int>& absent) const {
  constexpr int kMost = 3;
  std::string text;
  int told = 0;
  for (const int rank : absent) {
    const auto found = by_rank_.find(rank);
    if (found != by_rank_.end() && told++ < kMost) text += "; " + found->second;
  }
  return text;
}

Refusal missing(const std::vector<int>& ranks, const std::string& place, Deadline::duration limit,
                const std::string& advice, const std::string& refused) {
  return {.usage = false,
          .rank = ranks.size() == 1 ? ranks.front() : -1,
          .text = "hvd::init: " + list_of(ranks) + (ranks.size() == 1 ? " has" : " have") +
                  " not come to " + place + " " + within(limit) + refused + "; " + advice};
}

}  // namespace hvd::rendezvous
