#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "support/control_world.h"

namespace hvd::testing {

/// A world whose ranks all do the same, in rounds: every rank reports the same tensors and receives
/// the plan. This allows very many ranks.
class UniformWorld {
 public:
  struct Round {
    std::size_t root_received = 0;  ///< messages, this rank's own report included
    std::size_t max_received = 0;   ///< by any rank
    std::size_t max_sent_down = 0;  ///< by any rank: a plan to each child
    std::size_t report_bytes = 0;   ///< of the last message to the root
    std::size_t plan_bytes = 0;
    /// By the coordinator, over a tree: slots and requests.
    std::size_t items_accepted = 0;
    std::size_t ranges_accepted = 0;  ///< of ranks
    int depth = 0;                    ///< levels of the tree below rank 0
    wire::Plan plan = {};
  };
  /// Called around the work of rank 0 in a round.
  struct Watch {
    std::function<void()> begin = [] {};
    std::function<void()> accepted = [] {};
    std::function<void()> decided = [] {};
  };

  /// @param radix of the tree; 0: no tree
  UniformWorld(int ranks, int ranks_per_host, int radix, int tensors);

  /// Every rank submits every tensor, reports it, and receives the plan.
  /// @throws std::runtime_error when the plan is wrong
  Round round(const Watch&);
  Round round() { return round(Watch{}); }

 private:
  using Inbox = std::vector<wire::Bytes>;

  void accept_reports(int rank, const wire::Report&);
  void decide(const wire::Report&, Round&, const Watch&);
  void apply(const wire::Plan&);

  const int tensors_;
  const TimePoint now_{};
  std::vector<Inbox> inboxes_;
  std::vector<wire::Report> accepted_;  ///< by the coordinator in this round, over a tree
  ControlWorld world_;
  std::vector<int> order_;  ///< ranks, children before their parents
  int depth_ = 0;
};

}  // namespace hvd::testing
