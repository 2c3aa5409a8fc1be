#pragma once

#include <vector>

#include "base/rank_set.h"
#include "base/topology.h"

namespace hvd::control {

/// Where a rank stands in the tree through which reports travel to rank 0 and plans from it.
struct TreePlace {
  int parent = -1;                 ///< -1: this is the root, rank 0
  std::vector<int> children = {};  ///< ascending
  RankSet subtree = {};            ///< whose reports pass here, this rank's included
};

/// Whether reports are to be merged on their way at all. A job on one host, or of so few ranks that
/// rank 0 may hear each of them, has no tree: every rank talks to rank 0.
bool needs_tree(const Topology&, int radix) noexcept;

/// A function of the topology and the radix only, equal on every rank. Nobody has more than `radix`
/// children. On a host the lowest rank is the leader, and the others hang below it; the leaders
/// form a tree among themselves in the order of the hosts, so that between hosts nobody but leaders
/// talks. @pre radix >= 2
TreePlace place_in_tree(const Topology&, int rank, int radix);

/// The parent of each rank, from which the places follow.
std::vector<int> tree_parents(const Topology&, int radix);

}  // namespace hvd::control
