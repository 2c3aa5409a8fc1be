#include "bootstrap/admission.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

/// Version of the join request, so that a rank with another version of hvd gets a fitting error.
constexpr const char* kFormat = "hvd rendezvous 5";

/// Delay before a wait checks for the first time whether the other process has ended.
constexpr auto kFirstLivenessCheck = std::chrono::milliseconds(50);

/// Returns a new identity of this process at each call.
std::string make_identity() {
  char host[256] = "unknown";
  ::gethostname(host, sizeof host - 1);
  std::random_device random;
  const std::uint64_t own = std::uint64_t{random()} << 32 | random();
  char hex[32];
  const auto end = std::to_chars(hex, hex + sizeof hex, own, 16).ptr;
  return text(host, " ", ::getpid(), " ", std::string_view(hex, end));
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

std::optional<Bytes> find_value(const std::function<std::optional<Bytes>()>& value,
                                const std::function<std::optional<Bytes>()>& failure) {
  if (auto found = value()) return found;
  const auto reason = failure();
  if (!reason) return std::nullopt;
  auto found = value();  // it may have been stored before the failure
  if (!found) raise_failure(*reason);
  return found;
}

Bytes encode(const Refusal& refusal) {
  return join_fields({refusal.usage ? "usage" : "lost", hvd::text(refusal.rank), refusal.text});
}

std::optional<Refusal> decode_refusal(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, 3);
  if (!fields) return std::nullopt;
  const auto rank = parse_number<int>((*fields)[1]);
  if (!rank) return std::nullopt;
  return Refusal{.usage = (*fields)[0] == "usage", .rank = *rank, .text = (*fields)[2]};
}

std::string JoinRequest::process() const {
  const auto space = identity.find(' ');
  const auto end = identity.find(' ', space + 1);
  if (space == std::string::npos || end == std::string::npos) return "an unknown process";
  return text("host ", identity.substr(0, space), ", process ",
              identity.substr(space + 1, end - space - 1));
}

Bytes encode(const JoinRequest& request) {
  const RankInfo& own = request.info;
  return join_fields({kFormat, own.job, own.token, own.build, text(own.rank), text(own.size),
                      request.identity, request.boot, text(request.pid_namespace),
                      text(request.pid), text(request.left.count())});
}

std::optional<JoinRequest> decode_join_request(std::span<const std::byte> bytes) {
  const auto fields = split_fields(bytes, 11);
  if (!fields || (*fields)[0] != kFormat) return std::nullopt;
  const auto rank = parse_number<int>((*fields)[4]);
  const auto size = parse_number<int>((*fields)[5]);
  const auto pid_namespace = parse_number<std::int64_t>((*fields)[8]);
  const auto pid = parse_number<std::int64_t>((*fields)[9]);
  const auto left = parse_number<std::int64_t>((*fields)[10]);
  if (!rank || !size || !pid_namespace || !pid || !left) return std::nullopt;
  return JoinRequest{.info = {.job = (*fields)[1],
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

Bytes encode(JoinRequest request, Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  request.left = std::max(left, std::chrono::milliseconds(1));
  return encode(request);
}

JoinRequest join_request_of(const RankInfo& own) {
  const ProcessIdentity process = current_process();
  return {.info = own,
          .identity = make_identity(),
          .boot = boot_id(),
          .pid_namespace = static_cast<std::int64_t>(process.pid_namespace),
          .pid = process.pid};
}

// The start time of a process is left out, because /proc may belong to another pid namespace and
// show other processes. Without it the end of a process is not detected if its pid has been reused.
// A live process is never reported as ended.
ProcessWatch watch(const JoinRequest& request) {
  if (request.boot.empty() || request.boot != boot_id()) return {};
  return ProcessWatch({.pid = request.pid,
                       .start_time = 0,
                       .pid_namespace = static_cast<std::uint64_t>(request.pid_namespace)});
}

std::optional<Refusal> find_objection(const JoinRequest& request, const RankInfo& own,
                                      const std::string& place) {
  const RankInfo& other = request.info;
  const std::string rank = text("rank ", other.rank, " (", request.process(), ")");
  const auto usage = [](const auto&... reason) {
    return Refusal{.usage = true, .rank = -1, .text = text("hvd::init: ", reason...)};
  };
  if (other.job != own.job) {
    return usage(rank, " has joined at ", place, " for job '", other.job, "', where rank ",
                 own.rank, " begins job '", own.job, "'; give each job a place of its own");
  }
  if (other.token != own.token) {
    return usage(rank, " has joined at ", place, " for job '", own.job,
                 "' with another token than rank ", own.rank,
                 "'s; give each job a place of its own");
  }
  if (other.build != own.build) {
    return usage(rank, " has hvd ", other.build, ", rank ", own.rank, " has ", own.build,
                 "; start the same program everywhere");
  }
  if (other.size != own.size) {
    return usage(rank, " expects ", other.size, " ranks, rank ", own.rank, " ", own.size,
                 "; give all ranks the same world size");
  }
  return std::nullopt;
}

Deadline refusal_time(Deadline deadline, Deadline now) {
  const auto left = deadline - now;
  return deadline - std::min<Deadline::duration>(left / 10, std::chrono::seconds(1));
}

Deadline earlier_refusal_time(Deadline time, const JoinRequest& request) {
  if (request.left <= request.left.zero()) return time;
  const auto now = std::chrono::steady_clock::now();
  return std::min(time, refusal_time(now + request.left, now));
}

Deadline late_joiner_deadline(Deadline deadline) {
  return std::min<Deadline>(deadline, std::chrono::steady_clock::now() + std::chrono::seconds(2));
}

Refusal ended(const JoinRequest& request, const std::string& place,
              const std::vector<int>& absent) {
  const int rank = request.info.rank;
  const std::string others =
      absent.empty() ? "" : text(", while ", rank_list(absent), " had not joined");
  return {.usage = false,
          .rank = rank,
          .text = text("hvd::init: rank ", rank, " (", request.process(), ") joined at ", place,
                       " and ended before the job began", others, "; see what it last wrote")};
}

std::string within(Deadline::duration limit) {
  char limit_text[64];
  std::snprintf(limit_text, sizeof limit_text, "within %.1f s (HVD_START_TIMEOUT)",
                std::chrono::duration<double>(limit).count());
  return limit_text;
}

Refusal missing(const std::vector<int>& ranks, const std::string& place, Deadline::duration limit,
                const std::string& advice, const std::string& refused) {
  return {.usage = false,
          .rank = ranks.size() == 1 ? ranks.front() : -1,
          .text = text("hvd::init: ", rank_list(ranks), ranks.size() == 1 ? " has" : " have",
                       " not joined at ", place, " ", within(limit), refused, "; ", advice)};
}

bool same_job(const RankInfo& other, const RankInfo& own) {
  return other.job == own.job && other.token == own.token;
}

void ForeignProcesses::add(const JoinRequest& request, const RankInfo& own) {
  const RankInfo& other = request.info;
  if (other.rank < 0 || other.rank >= own.size) return;
  by_rank_[other.rank] = hvd::text(
      "a process (", request.process(), ") that joined as rank ", other.rank,
      " was refused: it has ",
      other.job != own.job ? "another job name (HVD_JOB_NAME)" : "another token (HVD_JOB_TOKEN)");
}

std::string ForeignProcesses::text(const std::vector<int>& absent) const {
  constexpr int kMost = 3;
  std::string listed;
  int count = 0;
  for (const int rank : absent) {
    const auto found = by_rank_.find(rank);
    if (found != by_rank_.end() && count++ < kMost) listed += "; " + found->second;
  }
  return listed;
}

void RankProcesses::add(const JoinRequest& request) {
  const int rank = request.info.rank;
  if (!processes_.contains(rank)) processes_.emplace(rank, Process{request, watch(request)});
}

bool RankProcesses::has_ended(int rank) {
  const auto found = processes_.find(rank);
  return found != processes_.end() && found->second.watch.ended();
}

const JoinRequest* RankProcesses::any_ended() {
  for (auto& [rank, process] : processes_)
    if (process.watch.ended()) return &process.request;
  return nullptr;
}

/// Reads the value, and checks whether the rank that stores it is still alive.
std::optional<Bytes> RankProcesses::check(int rank, const WaitSources& sources) {
  if (auto found = find_value(sources.value, sources.failure)) return found;
  if (!processes_.contains(rank)) {
    const auto request = decode_join_request(sources.join_request().value_or(Bytes()));
    if (request && request->info.rank == rank) add(*request);
  }
  if (!has_ended(rank)) return std::nullopt;
  auto found =
      find_value(sources.value, sources.failure);  // it may have been stored before the end
  if (!found) ended(processes_.at(rank).request, place_, {}).raise();
  return found;
}

std::optional<Bytes> RankProcesses::wait(
    int rank, const WaitSources& sources,
    const std::function<void(const std::function<bool()>&)>& repeat) {
  std::optional<Bytes> value;
  const auto first_check = std::chrono::steady_clock::now() + kFirstLivenessCheck;
  repeat([&] {
    value = std::chrono::steady_clock::now() < first_check
                ? find_value(sources.value, sources.failure)
                : check(rank, sources);
    return value.has_value();
  });
  return value;
}

}  // namespace hvd::rendezvous
