#pragma once

#include <cstddef>

namespace hvd::bench {

/// Cost of the coordinator in one round in which every rank reports the same tensors, as medians of
/// CPU time in microseconds.
struct RoundCost {
  double accept_us = 0;  ///< decode and take in all reports
  double decide_us = 0;  ///< decide, and encode the plan
  std::size_t report_bytes = 0;
  std::size_t plan_bytes = 0;
  int rounds = 0;
};
struct WorldCost {
  int ranks = 0;
  int tensors = 0;
  /// Levels of the tree below rank 0; 0: no tree, rank 0 exchanges messages with each rank.
  int depth = 0;
  /// Messages that rank 0 receives from other ranks in one round.
  int messages_received = 0;
  /// Messages received by the rank that receives the most, its own report included.
  int most_received = 0;
  RoundCost first = {};
  RoundCost cached = {};
};

/// Runs the real Coordinator on reports of the real Negotiator; with a tree, on reports that the
/// real Aggregators have merged. All ranks submit the same tensors.
/// @param tree an aggregation tree, as jobs of more than 33 ranks use it, with eight ranks to a
/// host; otherwise every rank exchanges messages with rank 0
/// @throws std::runtime_error when the plans are not what they must be.
WorldCost measure_world(int ranks, int tensors, bool tree);

}  // namespace hvd::bench
