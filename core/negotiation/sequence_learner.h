#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "negotiation/messages.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

/// Decides for the coordinator when to replay the unnamed operations that a process set runs in one
/// sequence. A schedule is the shortest period of that sequence. An operation may occur several
/// times in it, and the ranks follow its order.
///
/// A replay starts after two equal periods. A sequence that repeats one operation many times before
/// the next operation looks periodic too early. Therefore, after a replay that has ended early, the
/// sequence must be periodic for twice as long as that replay lasted before the next one starts.
///
/// Pure; not thread-safe.
class SequenceLearner {
 public:
  explicit SequenceLearner(int process_set) noexcept : set_(process_set) {}
  /// @param plan only operations of the set @return whether to start a replay after it
  bool observe(const wire::Plan& plan, const ResponseCache&);
  /// The schedule to repeat, by cache slot, in the order of the sequence.
  const std::vector<wire::SlotBundle>& schedule() const noexcept { return schedule_; }
  /// Call this when the replay has been left after this many batches.
  void end_replay(std::uint64_t batches_run);

 private:
  struct Entry {
    std::uint32_t slot = 0;
    std::uint64_t batch = 0;       ///< number of the batch in which it ran
    bool continues_group = false;  ///< belongs to the group of the entry before it
  };
  bool add_operations(const wire::Plan&, const ResponseCache&);
  void append(const Entry&);
  std::optional<std::size_t> period() const;
  void choose(std::size_t period);
  std::vector<wire::SlotBundle> bundles(std::size_t first, std::size_t count) const;
  void forget();

  int set_;
  std::vector<Entry> history_;  // in the order of the sequence, the newest last
  std::vector<std::size_t>
      repeats_;  // by period p: how many of the last entries equal the entry p places before
  std::map<std::uint64_t, Entry> early_;  // by ordinal: planned before an earlier operation
  std::optional<std::uint64_t> next_;     // the ordinal that follows the history
  std::uint64_t batches_seen_ = 0;
  std::vector<wire::SlotBundle> schedule_;
  std::size_t schedule_period_ = 0;
  std::size_t schedule_batches_ = 0;
  std::size_t learnt_from_ = 0;  // operations that were periodic when the replay started
  std::size_t wanted_ = 0;       // operations that have to be periodic
  std::size_t since_end_ = 0;    // operations since the last replay
};

}  // namespace hvd::control
