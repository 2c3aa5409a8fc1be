#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/process_watch.h"
#include "bootstrap/messages.h"

/// Decides which processes join a run as its ranks. It uses no store.
namespace hvd::rendezvous {

/// Published by rank 0: the run that begins at this URL, and the process of rank 0.
struct RunNotice {
  std::string run = {};
  ProcessInfo process = {};
};
Bytes encode(const RunNotice&);
std::optional<RunNotice> decode_notice(std::span<const std::byte>);

/// Sent by a process to join a run as a rank.
struct Arrival {
  int rank = 0;
  int size = 1;
  std::string build = {};
  ProcessInfo process = {};
  std::string nonce = {};  ///< random, from the process; rank 0's proof of the token contains it
  std::chrono::milliseconds left{0};  ///< from the arrival until the rank gives up; 0: not stated
  std::string payload = {};           ///< the rank's part in the first exchange
  std::string proof = {};             ///< of the token
};
/// Encodes the arrival with its proof.
Bytes encode(Arrival, const std::string& run, const std::string& token);
std::optional<Arrival> decode_arrival(std::span<const std::byte>);
/// Whether the proof shows that the process has the token.
bool proven(const Arrival&, const std::string& run, const std::string& token);

/// Rank 0's answer to an arrival.
struct Answer {
  int rank = -1;  ///< of the arrival; -1: it is invalid
  bool accepted = false;
  Refusal refusal = {};    ///< if not accepted
  std::string proof = {};  ///< if accepted: of the token, with the nonce of the arrival
};
std::string proof_of_acceptance(const std::string& run, const std::string& nonce,
                                const std::string& token);

/// Precedes the parts of the first exchange, and proves that rank 0 has collected them.
std::string proof_of_parts(const std::string& run, std::span<const std::byte> parts,
                           const std::string& token);
inline constexpr std::size_t kProofBytes = 64;

/// A refusal because a rank's process ended before the job began.
/// @param absent the ranks that had not joined by then
Refusal ended_early(int rank, const ProcessInfo&, const std::string& url,
                    const std::vector<int>& absent = {});

/// The arrivals at rank 0 so far.
///
/// The refusal of a process without the token, with a rank outside the job, or with a rank that has
/// already arrived does not affect the job. A process of another build or size is refused too, but
/// once every rank has either arrived or been refused for this reason, the job cannot begin
/// (objection()).
class Arrivals {
 public:
  /// @param own describes rank 0
  /// @param watches whether to watch the processes of this host for their end
  Arrivals(const RankInfo& own, std::string run, std::string url, std::string payload,
           bool watches);

  /// Decides about an arrival.
  Answer decide(std::span<const std::byte> arrival);

  bool complete() const noexcept { return arrived_.size() == static_cast<std::size_t>(own_.size); }
  /// The reason why the job cannot begin, once that is certain.
  std::optional<Refusal> objection() const;
  bool has_arrived(int rank) const { return arrived_.contains(rank); }
  /// Whether a process of the job was refused because it contradicts rank 0.
  bool was_refused(int rank) const { return contradictions_.contains(rank); }
  /// Ranks that have not arrived.
  std::vector<int> absent() const;
  /// Describes processes that were refused and claimed one of these ranks, or no rank of the job.
  std::string refused(const std::vector<int>& absent) const;
  /// The shortest time until an accepted rank gives up; empty: not stated.
  std::optional<std::chrono::milliseconds> shortest_time() const noexcept { return shortest_; }
  /// An accepted rank for which `counts` returns true and whose process is known to have ended;
  /// otherwise null.
  const Arrival* find_ended(const std::function<bool(int rank)>& counts);
  /// Whether the process of a rank has ended.
  bool has_ended(int rank);
  /// The payloads of all ranks. @pre complete()
  std::vector<std::string> take_payloads();

 private:
  struct Present {
    Arrival arrival;
    ProcessWatch watch;
  };
  std::optional<Refusal> find_refusal(const std::optional<Arrival>&);

  const RankInfo own_;
  const std::string run_;
  const std::string url_;
  std::map<int, Present> arrived_;         ///< by rank
  std::map<int, Refusal> contradictions_;  ///< by rank: processes of this job that contradict it
  std::map<int, std::string> refused_processes_;  ///< by claimed rank: others that were refused
  std::optional<std::chrono::milliseconds> shortest_;
  const bool watches_;
};

/// The time at which rank 0 refuses the other ranks. It is before the deadline, because the others
/// probably have the same deadline and must receive the reason before it.
Deadline refusal_time(Deadline deadline, Deadline now = std::chrono::steady_clock::now());
/// The time until which rank 0 stays after it has refused all ranks, so that late ranks also
/// receive the reason.
Deadline late_joiner_deadline(Deadline deadline);
/// "within 10.0 s (HVD_START_TIMEOUT)"
std::string within(Deadline::duration limit);
/// A refusal because ranks have not joined in time.
/// @param limit the time that the ranks had
/// @param refused describes processes that were refused
Refusal missing(const std::vector<int>& ranks, const std::string& url, Deadline::duration limit,
                const std::string& refused);

}  // namespace hvd::rendezvous
