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

/// The negotiating parts of all ranks of a job in one thread: the real Negotiator of every rank,
/// the real Coordinator of rank 0 and, in a tree, the real Aggregator of every inner rank. Messages
/// between ranks are encoded and decoded.
///
/// The world makes messages and accepts those that arrive. Its user delivers them, provides the
/// time, and chooses when rank 0 decides and which rank applies which plan:
///
///     unit/negotiation/cluster.h            by hand, in the order of a test
///     unit/negotiation/aggregator_test.cpp  at once, up a tree
///     support/uniform_world.h               in rounds, of many ranks that do the same
///     sim/protocol_sim.h                    in virtual time, after random delays
class ControlWorld {
 public:
  struct Options {
    control::CoordinatorOptions coordinator = {};  ///< its hosts are those of the ranks
    int radix = 0;  ///< of the tree; 0: no tree, every rank reports to rank 0
    Duration longest_hold = std::chrono::seconds(1);  ///< in the tree
    /// All ranks behave the same and share the negotiator of rank 0.
    bool alike = false;
    /// Called with the merged report of an inner rank after it was forwarded.
    std::function<void(int rank, wire::Report&&)> on_merged = {};
  };
  /// Delivers a message on its way to rank 0, now or later, by receive(). Rank 0 sends to itself if
  /// there is no tree.
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
  /// Empty unless the rank is an inner rank of the tree.
  const std::optional<control::Aggregator>& aggregator(int rank) const noexcept {
    return at(rank).aggregator;
  }

  // These return whether the coordinator has accepted a report.

  /// Sends a rank's report, if it has one.
  bool report(int rank, TimePoint now);
  bool receive(int to, const wire::Bytes&, TimePoint now);
  /// Like receive(), for a decoded message. An inner rank also accepts its own report.
  bool accept(int to, wire::AnyMessage, TimePoint now);
  /// Forwards the reports that an inner rank no longer holds back. The functions above do it too.
  bool forward(int rank, TimePoint now);

  /// Applies a plan at this rank, or at all ranks if they are alike.
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

/// The host of every rank, with `ranks_per_host` ranks on each: "host0", "host1", ...
std::vector<std::string> hosts_of_ranks(int ranks, int ranks_per_host);

}  // namespace hvd::testing
