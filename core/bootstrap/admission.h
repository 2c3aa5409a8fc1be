#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/process_watch.h"
#include "bootstrap/rendezvous.h"

namespace hvd::rendezvous {

/// Why ranks may not begin, in a form that travels.
struct Refusal {
  bool usage = false;  ///< the ranks contradict each other: UsageError; else PeerLostError
  int rank = -1;       ///< the lost one
  std::string text = {};

  [[noreturn]] void raise() const;
};

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Texts, one after the other, as bytes.
Bytes join_fields(const std::vector<std::string>& fields);
/// Nothing when the bytes are not `count` fields.
std::optional<std::vector<std::string>> split_fields(std::span<const std::byte>, std::size_t count);

Bytes encode(const Refusal&);
std::optional<Refusal> decode_refusal(std::span<const std::byte>);

/// A rank that has come: what it says of itself, and who it is.
struct Arrival {
  Introduction introduction = {};
  std::string identity = {};  ///< one process, and no other: "host 1234 5f0c..."
  std::string boot = {};      ///< of its host; empty: unknown
  std::int64_t pid_namespace = 0;
  std::int64_t pid = 0;
  /// From when it came: then it gives up. Zero: it has not said so.
  std::chrono::milliseconds left{0};
  /// "host host, process 1234"
  std::string who() const;
};
Bytes encode(const Arrival&);
/// Of one that gives up then.
Bytes encode(Arrival, Deadline);
std::optional<Arrival> decode_arrival(std::span<const std::byte>);
/// Of this process, with an identity that is new with each call.
Arrival arrival_of(const Introduction&);
/// Sees the end of that process, if it is one of this host and this pid namespace; else nothing.
ProcessWatch watch(const Arrival&);

/// As it travels, and as whoever waits gets it.
Bytes encode(const Failure&);
[[noreturn]] void raise_failure(std::span<const std::byte>);
/// One look of whoever waits: the value, or nothing yet; else raises the failure that has come.
std::optional<Bytes> look_for(const std::function<std::optional<Bytes>()>& value,
                              const std::function<std::optional<Bytes>()>& failure);

/// What is against one that has come; nothing: it is welcome.
/// @param reference a rank whom it may not contradict, as a rule rank 0
std::optional<Refusal> object_to(const Arrival&, const Introduction& reference,
                                 const std::string& place);
/// When who serves has to give up, so that the others hear why before their own deadline, which is
/// likely to be the same.
Deadline time_to_refuse(Deadline deadline, Deadline now = std::chrono::steady_clock::now());
/// As it is after a rank has come: before that rank gives up, too.
Deadline sooner(Deadline time_to_refuse, const Arrival&);
/// Until when rank 0 stays for those that have not come when it has refused all: they hear why too,
/// and do not wait for nobody.
Deadline time_to_tell_late_comers(Deadline deadline);
/// Of one whose process has ended before the job has begun.
/// @param absent the ranks that had not come by then
Refusal ended(const Arrival&, const std::string& place, const std::vector<int>& absent);
/// What to do where ranks were started one by one.
inline constexpr const char* kStartAsManyRanks =
    "start as many ranks as the world size says, with the same place, and see whether one has "
    "ended "
    "early";
/// "within 10.0 s (HVD_START_TIMEOUT)", of a rank that had so much time.
std::string within(Deadline::duration limit);
/// Of ranks that have not come in time.
/// @param limit how much time they had
/// @param advice what to do
/// @param refused what is known of them: Strangers::text()
Refusal missing(const std::vector<int>& ranks, const std::string& place, Deadline::duration limit,
                const std::string& advice = kStartAsManyRanks, const std::string& refused = {});

/// It has the job's name and token.
bool is_of_job(const Introduction&, const Introduction& own);

/// Processes that were refused because they have another job's name or token. The error for a rank
/// that is missing at the deadline reports such a process.
class Strangers {
 public:
  void note(const Arrival&, const Introduction& own);
  /// Describes the processes that claimed one of these ranks; empty if there are none.
  std::string text(const std::vector<int>& absent) const;

 private:
  std::map<int, std::string> by_rank_;
};

}  // namespace hvd::rendezvous
