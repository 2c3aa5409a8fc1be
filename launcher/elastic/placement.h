#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace hvd::launcher {

/// How many workers an elastic job has.
struct WorkerCounts {
  int start = 1;                         ///< -np
  int min_np = 1;                        ///< --min-np
  int max_np = 1;                        ///< --max-np
  int spares = 0;                        ///< --spares
  std::optional<int> replacements = {};  ///< --max-restarts
};

/// For how long a host whose workers fail is left out: --blacklist-cooldown-range.
struct Cooldown {
  Duration first = std::chrono::seconds(10);
  Duration longest = std::chrono::hours(1);
};

/// Decides in which slots workers are started, and when.
///
/// A worker that fails is replaced at once. After it, each replacement that fails before it has
/// become a rank doubles the pause: 1, 2, 4 ... 60 s. A host is left out for a cooldown, which
/// doubles too, after three failures in a minute, unless the others have too few slots for the
/// least number of ranks. Hosts may be added, and their numbers of usable slots may change. Pure,
/// not thread-safe.
class Placement {
 public:
  /// @param number of slots of each host; slots are numbered consecutively across hosts
  /// @param discovered the hosts come from a script, and their order does not matter
  Placement(const std::vector<int>& slots, WorkerCounts counts, TimePoint now,
            Cooldown cooldown = {}, bool discovered = false);

  // Hosts. Their slots have the next numbers.

  /// Returns the index of the new host.
  /// @param joins its agent is not started from here
  std::size_t add_host(int slots, TimePoint now, bool joins = false);
  /// Sets the number of the host's slots in which workers are started; workers in other slots do
  /// not count. Returns the number of new slots.
  int resize_host(std::size_t host, int slots);
  /// Makes the host usable again, regardless of earlier failures.
  void forget_failures(std::size_t host, TimePoint now);
  /// Whether workers are started in the slot.
  bool has_place(int slot) const;
  /// Whether workers are started in some slot of the host.
  bool has_place_on(std::size_t host) const { return hosts_[host].usable > 0; }

  // Events. A host is given by its index, a slot by its number.

  void host_connected(std::size_t host);
  /// Records that the host's agent could not be started, or that its connection has ended. Frees
  /// all slots of the host.
  void host_lost(std::size_t host, TimePoint now);
  /// Excludes the host: no more workers are started there.
  void refuse_host(std::size_t host);
  /// Records that the slot's worker has become a rank of a running generation.
  void runs(int slot);
  /// Records that the slot's worker was lost. @param id of the worker
  void lost(int slot, std::uint64_t id, TimePoint now);
  /// Records that the slot's worker has left the job in order, or is about to do so.
  void left(int slot);
  /// Records that the slot can be used for another worker.
  void freed(int slot);

  /// Hosts whose agents are to be started now. They count as starting from then on.
  std::vector<std::size_t> agents_due(TimePoint now);
  struct Start {
    int slot = 0;
    std::uint64_t replaces = 0;  ///< id of a lost worker; 0: none
  };
  /// Workers to be started now. Their slots count as used from then on.
  std::vector<Start> workers_due(TimePoint now);
  std::optional<TimePoint> next_due(TimePoint now) const;

  /// How many workers were replaced.
  int replaced() const noexcept { return replaced_; }
  /// Whether there are too few workers for the job, and no more replacements are permitted.
  bool exhausted() const;
  /// The largest number of consecutive failures of workers that were not ranks, while the job had
  /// no generation.
  int failed_starts() const noexcept { return failed_starts_; }
  /// The slots of hosts that are connected or starting.
  int reachable_slots() const;
  struct LeftOut {
    std::size_t host = 0;
    Duration cooldown = {};
  };
  /// The hosts that have been left out since the last call.
  std::vector<LeftOut> take_left_out();

 private:
  struct Host {
    std::vector<int> slots = {};
    std::size_t usable = 0;  ///< the number of slots in which workers are started
    enum class Agent : std::uint8_t { kAbsent, kStarting, kConnected } agent = Agent::kAbsent;
    bool joins = false;
    bool refused = false;
    int agent_failures = 0;
    TimePoint agent_due = {};
    std::deque<TimePoint> failures = {};  ///< of its workers, within a minute
    Duration cooldown = {};               ///< of the next time that it is left out
    TimePoint out_until = {};
  };
  struct Slot {
    std::size_t host = 0;
    std::size_t position = 0;  ///< among those of its host
    bool used = false;         ///< from the start of a worker until freed()
    bool alive = false;        ///< until lost()
    int failures = 0;          ///< before this worker, in a row
    bool ran = false;
  };
  /// A worker that is missing.
  struct Vacancy {
    TimePoint due = {};
    int failures = 0;
    std::uint64_t replaces = 0;
    std::optional<std::size_t> host = {};
  };

  int usable_slots() const;
  bool settled() const;
  int wanted() const;
  int living() const;
  bool usable(const Host& host, TimePoint now) const;
  std::optional<int> free_slot(const Vacancy& vacancy, TimePoint now) const;
  std::optional<int> free_slot(std::size_t host) const;
  void record_failure(std::size_t host, TimePoint now);

  const WorkerCounts counts_;
  const Cooldown cooldown_;
  const bool discovered_;
  std::vector<Host> hosts_;
  std::vector<Slot> slots_;
  std::deque<Vacancy> vacancies_;
  std::vector<LeftOut> left_out_;
  bool ran_ = false;
  int replaced_ = 0;
  int failed_starts_ = 0;
};

}  // namespace hvd::launcher
