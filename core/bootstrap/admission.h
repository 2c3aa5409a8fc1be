#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/process_watch.h"
#include "bootstrap/rendezvous.h"

/// Decides which processes may join a job as its ranks, and watches whether they are still alive.
namespace hvd::rendezvous {

/// The reason why ranks may not begin, in a form that can be sent.
struct Refusal {
  bool usage = false;  ///< the ranks contradict each other: UsageError; else PeerLostError
  int rank = -1;       ///< the lost rank; -1: several ranks or no rank
  std::string text = {};

  [[noreturn]] void raise() const;
};

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Encodes texts one after the other, each preceded by its length.
Bytes join_fields(const std::vector<std::string>& fields);
/// Empty if the bytes are not exactly `count` fields.
std::optional<std::vector<std::string>> split_fields(std::span<const std::byte>, std::size_t count);

Bytes encode(const Refusal&);
std::optional<Refusal> decode_refusal(std::span<const std::byte>);

/// Sent by a rank to join a job: describes the job that it expects, and identifies the process.
struct JoinRequest {
  RankInfo info = {};
  std::string identity = {};  ///< identifies one process: "host 1234 5f0c..."
  std::string boot = {};      ///< boot id of its host; empty: unknown
  std::int64_t pid_namespace = 0;
  std::int64_t pid = 0;
  /// Time from the request until the rank gives up; zero: not stated.
  std::chrono::milliseconds left{0};
  /// Text for users: "host node7, process 1234".
  std::string process() const;
};
Bytes encode(const JoinRequest&);
/// Encodes a request of a rank that gives up at the deadline.
Bytes encode(JoinRequest, Deadline);
std::optional<JoinRequest> decode_join_request(std::span<const std::byte>);
/// A request of this process. Each call makes a new identity.
JoinRequest join_request_of(const RankInfo&);
/// Watches the process of a rank if it is on this host and in this pid namespace. The end of any
/// other process is not detected.
ProcessWatch watch(const JoinRequest&);

Bytes encode(const Failure&);
/// Throws a Failure that another rank has encoded.
[[noreturn]] void raise_failure(std::span<const std::byte>);
/// Reads a value that another rank stores, without waiting. Empty if it is not there yet.
/// @throws hvd::Error when the job has failed and the value is not there
std::optional<Bytes> find_value(const std::function<std::optional<Bytes>()>& value,
                                const std::function<std::optional<Bytes>()>& failure);

/// Compares a rank's request to join with another rank. Empty if the rank may join.
/// @param reference the other rank, usually rank 0
std::optional<Refusal> find_objection(const JoinRequest&, const RankInfo& reference,
                                      const std::string& place);
/// The time at which the serving rank refuses the other ranks. It is before the deadline, because
/// the others probably have the same deadline and must receive the reason before it.
Deadline refusal_time(Deadline deadline, Deadline now = std::chrono::steady_clock::now());
/// The refusal time after another rank has joined, early enough for the deadline of that rank, too.
Deadline earlier_refusal_time(Deadline refusal_time, const JoinRequest&);
/// The time until which rank 0 keeps serving after it has refused all ranks, so that late ranks
/// receive the reason, too.
Deadline late_joiner_deadline(Deadline deadline);
/// A refusal because a rank's process ended before the job began.
/// @param absent the ranks that had not joined by then
Refusal ended(const JoinRequest&, const std::string& place, const std::vector<int>& absent);
/// Advice for ranks that were started one by one.
inline constexpr const char* kStartAsManyRanks =
    "start as many ranks as the world size, with the same place, and see whether one has ended "
    "early";
/// "within 10.0 s (HVD_START_TIMEOUT)"
std::string within(Deadline::duration limit);
/// A refusal because ranks have not joined in time.
/// @param limit how much time they had
/// @param refused text about processes that were refused: ForeignProcesses::text()
Refusal missing(const std::vector<int>& ranks, const std::string& place, Deadline::duration limit,
                const std::string& advice = kStartAsManyRanks, const std::string& refused = {});

/// Whether both have the same job name and token.
bool same_job(const RankInfo&, const RankInfo& own);

/// Processes that were refused because they have another job's name or token. The error for a rank
/// that is missing at the deadline reports such a process.
class ForeignProcesses {
 public:
  void add(const JoinRequest&, const RankInfo& own);
  /// Describes the processes that claimed one of these ranks; empty if no process did.
  std::string text(const std::vector<int>& absent) const;

 private:
  std::map<int, std::string> by_rank_;
};

/// The processes of ranks that have joined. Detects the end of those on this host and in this pid
/// namespace, and never reports a live rank as lost.
///
/// Not thread-safe.
class RankProcesses {
 public:
  /// @param place for error texts
  explicit RankProcesses(std::string place) : place_(std::move(place)) {}

  /// Only the first process of a rank counts.
  void add(const JoinRequest&);
  bool has_ended(int rank);
  /// A rank whose process has ended, or null.
  const JoinRequest* any_ended();

  using Read = std::function<std::optional<Bytes>()>;
  /// The reads that a wait repeats. Each returns an empty value if its value has not been stored
  /// yet.
  struct WaitSources {
    Read value;
    Read failure;       ///< why the job does not begin
    Read join_request;  ///< of the rank that stores the value
  };
  /// Waits for a value that `rank` stores; empty if it was not stored in time.
  /// @param repeat calls its argument until that returns true or the time is over
  /// @throws PeerLostError when the process of the rank ended without storing it; hvd::Error when
  /// the job has failed
  std::optional<Bytes> wait(int rank, const WaitSources&,
                            const std::function<void(const std::function<bool()>&)>& repeat);

 private:
  struct Process {
    JoinRequest request;
    ProcessWatch watch;
  };
  std::optional<Bytes> check(int rank, const WaitSources&);

  const std::string place_;
  std::map<int, Process> processes_;
};

}  // namespace hvd::rendezvous
