#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "control/aggregator.h"
#include "control/coordinator.h"
#include "control/negotiator.h"
#include "control/tree.h"

namespace hvd::sim {

/// Many ranks that all do the same, over an aggregation tree: the real coordinator and the real
/// aggregator of every inner rank. One negotiator speaks for all ranks; every message is encoded
/// and decoded.
class TreeWorld {
 public:
  struct Round {
    std::size_t root_received = 0;   ///< messages, this rank's own report included
    std::size_t most_received = 0;   ///< by any rank
    std::size_t most_sent_down = 0;  ///< by any rank: a plan to each child
    std::size_t merged_bytes = 0;    ///< of the last message to the root
    std::size_t plan_bytes = 0;
    std::size_t things_accepted =
        0;  ///< by the coordinator: what was asked for, a slot or request each
    std::size_t ranges_accepted = 0;  ///< of ranks
    int depth = 0;
    wire::Plan plan = {};
  };
  /// Called around what rank 0 does in a round.
  struct Watch {
    std::function<void()> begin = [] {};
    std::function<void()> accepted = [] {};
    std::function<void()> decided = [] {};
  };

  TreeWorld(int ranks, int ranks_per_host, int radix, int tensors);

  /// Every rank submits every tensor, reports it, and hears the plan.
  Round round(const Watch&);
  Round round() { return round(Watch{}); }

 private:
  struct Letter {
    int from = 0;
    wire::Bytes bytes = {};
  };
  struct Rank {
    std::vector<int> children = {};
    std::unique_ptr<control::Aggregator> aggregator = {};  ///< of inner ranks
    std::vector<Letter> inbox = {};
  };
  wire::Request request(int number) const;
  void post(int from, wire::Bytes bytes);
  template <class PassOn>
  void hear(int rank, const wire::Report& own, PassOn&& pass_on);
  void decide(const wire::Report& own, Round&, const Watch&);

  const int tensors_;
  TimePoint now_{};
  std::vector<int> parents_;
  std::vector<int> order_;  ///< ranks, children before their parents
  int depth_ = 0;
  control::Coordinator coordinator_;
  control::Negotiator negotiator_;
  std::vector<Rank> ranks_;
};

}  // namespace hvd::sim
