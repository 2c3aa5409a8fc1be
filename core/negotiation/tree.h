#pragma once

#include <vector>

#include "base/rank_set.h"
#include "base/topology.h"

namespace hvd::control {

/// The neighbours of a rank in the tree through which reports travel to rank 0 and plans from it.
struct TreePlace {
  int parent = -1;                 ///< -1: this is the root, rank 0
  std::vector<int> children = {};  ///< ascending
  RankSet subtree = {};            ///< the ranks whose reports pass here, with this rank
};

/// Whether reports are merged on their way. In a job on one host, or of at most radix + 1 ranks,
/// every rank sends its reports to rank 0 directly.
bool needs_tree(const Topology&, int radix) noexcept;

/// The place of `rank` in the tree. It depends only on the topology and the radix, so all ranks
/// agree. No rank has more than `radix` children. The lowest rank of a host is its leader, and the
/// others are below it. The leaders form a tree in the order of the hosts, so only leaders exchange
/// messages between hosts.
/// @pre radix >= 2
TreePlace place_in_tree(const Topology&, int rank, int radix);

/// The parent of each rank; -1 for rank 0.
std::vector<int> tree_parents(const Topology&, int radix);

}  // namespace hvd::control
