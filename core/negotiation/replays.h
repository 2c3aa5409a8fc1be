#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/rank_set.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"
#include "negotiation/response_cache.h"
#include "negotiation/schedule_replay.h"
#include "negotiation/sequence_learner.h"

namespace hvd::control {

/// The coordinator's view of replays: detects the repeated steps of each process set, and records
/// which reports are older than the replays that their ranks have entered. Pure; not thread-safe.
class Replays {
 public:
  /// @param each_set whether each process set is replayed by itself; otherwise only the set of all
  /// ranks is, and an operation of another set ends its replay
  explicit Replays(bool each_set) noexcept : each_set_(each_set) {}

  /// Call this with each plan, after the cache and the sets have been updated by it.
  /// @return the sets that have completed a step after which to start a replay, ascending
  std::vector<int> observe(const wire::Plan&, const ResponseCache&, const ProcessSetTable&);
  /// The schedule to repeat, by cache slot, of a set that observe() has returned.
  const std::vector<wire::SlotBundle>& schedule(int process_set) const {
    const Learner& learner = learners_.at(process_set);
    return learner.in_sequence ? learner.sequence.schedule() : learner.steps.schedule();
  }
  /// Whether an operation outside the schedule may be pending when a replay of the set begins.
  /// False if it would end the replay at once.
  bool may_stay_pending(const wire::Request&, int replayed_set) const noexcept;
  /// Records that a replay of the set begins with this plan.
  void begin(int process_set, std::uint64_t plan);
  /// Records that the members of the set have left its last replay.
  void end(int process_set, std::uint64_t batches_run);
  void drop_set(int process_set);

  /// The last plan that began a replay of all ranks, and of any set; 0 if there was none.
  std::uint64_t last_of_all_ranks() const noexcept { return last_of_all_ranks_; }
  std::uint64_t last() const noexcept { return last_; }
  /// Whether a request that ranks made after they had applied this plan has been withdrawn since,
  /// because the ranks have entered a replay of a process set other than that of all ranks.
  bool withdrawn(const wire::Request&, RankSpan ranks, std::uint64_t as_of,
                 const ProcessSetTable&) const;
  /// The ranks that leave according to the report, except ranks that have entered a replay since:
  /// these report it again.
  RankSet leaving(const wire::Report&, const ProcessSetTable&) const;

 private:
  /// Learns the schedule of one set. If all operations of a schedule are in sequence, the schedule
  /// has their order and is learnt from it; any other schedule is an unordered set of operations.
  struct Learner {
    explicit Learner(int process_set) noexcept : steps(process_set), sequence(process_set) {}
    StepLearner steps;
    SequenceLearner sequence;
    bool in_sequence = false;  ///< the last schedule that was due comes from `sequence`
    bool observe(const wire::Plan&, const ResponseCache&);
  };
  void forget_steps(const wire::Plan&, const ResponseCache&);

  const bool each_set_;
  std::map<int, Learner> learners_;
  std::map<int, std::uint64_t> plans_;  // by set, without that of all ranks
  std::uint64_t last_of_all_ranks_ = 0;
  std::uint64_t last_ = 0;
};

}  // namespace hvd::control
