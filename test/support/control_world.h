#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "negotiation/aggregator.h"
#include "negotiation/coordinator.h"
#include "negotiation/negotiator.h"
#include "negotiation/tree.h"

namespace hvd::testing {

inline std::size_t rank_index(int rank) { return static_cast<std::size_t>(rank); }

/// The ranks of a job as far as they negotiate, in one thread: of every rank the real Negotiator,
/// of rank 0 the real Coordinator and, over a tree, of every inner rank the real Aggregator. What
/// ranks tell each other is encoded and decoded.
///
/// The world makes messages and takes in those that arrive. Whoever has it delivers them, is the
/// clock, and says when rank 0 decides and who applies which plan:
///
///     unit/control/cluster.h            by hand, as a test says
///     unit/control/aggregator_test.cpp  at once, up a tree
///     support/uniform_world.h           in rounds, of many ranks that do the same
///     sim/protocol_sim.h                in virtual time, after random delays
class ControlWorld {
 public:
  struct Options {
    control::CoordinatorOptions coordinator = {};  ///< its hosts say where the ranks are
    int radix = 0;  ///< of the tree; 0: none, every rank talks to rank 0
    Duration longest_hold = std::chrono::seconds(1);  ///< in the tree
    /// All ranks do the same, and the negotiator of rank 0 speaks for them.
    bool alike = false;
    /// Called with what an inner rank has merged, after it went on.
    std::function<void(int rank, wire::Report&&)> on_merged = {};
  };
  /// Delivers a message on its way to rank 0, now or later, by receive(). Rank 0 sends to itself
  /// where there is no tree.
  using Send = std::function<void(int from, int to, wire::Bytes)>;

  ControlWorld(Options, Send);
  ControlWorld(const ControlWorld&) = delete;
  ControlWorld& operator=(const ControlWorld&) = delete;

  int size() const noexcept { return static_cast<int>(ranks_.size()); }
  control::Coordinator& coordinator() noexcept { return coordinator_; }
  control::Negotiator& negotiator(int rank) noexcept {
    return *negotiators_[options_.alike ? 0 : rank_index(rank)];
  }
  const control::TreePlace& place(int rank) const noexcept { return at(rank).place; }
  /// Of inner ranks of the tree.
  const std::optional<control::Aggregator>& aggregator(int rank) const noexcept {
    return at(rank).aggregator;
  }

  // These return whether the coordinator has heard something.

  /// A rank's news, if it has any, begin their way.
  bool report(int rank, TimePoint now);
  bool receive(int to, const wire::Bytes&, TimePoint now);
  /// The same, decoded; an inner rank takes in its own report, too.
  bool take_in(int to, const wire::AnyMessage&, TimePoint now);
  /// What an inner rank no longer holds back goes on; above, it does so by itself.
  bool pass_on(int rank, TimePoint now);

  /// Where all do the same, every rank applies it at once.
  control::Applied apply(int rank, const wire::Plan&);

 private:
  struct Rank {
    control::TreePlace place = {};
    std::optional<control::Aggregator> aggregator = {};
  };
  Rank& at(int rank) noexcept { return ranks_[rank_index(rank)]; }
  const Rank& at(int rank) const noexcept { return ranks_[rank_index(rank)]; }

  const Options options_;
  const Send send_;
  control::Coordinator coordinator_;
  std::vector<std::unique_ptr<control::Negotiator>> negotiators_;
  std::vector<Rank> ranks_;
};

/// "host0", "host1", ...: that of every rank, with so many ranks on each.
std::vector<std::string> hosts_of_ranks(int ranks, int ranks_per_host);

}  // namespace hvd::testing
