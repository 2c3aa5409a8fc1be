#include "negotiation/tree.h"

#include <algorithm>
#include <cstddef>

#include "base/expect.h"

namespace hvd::control {
namespace {

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

// Adds `ranks` to the tree in their order; the first is already in it. The parent is the earliest
// rank that has room for a child.
void attach(const std::vector<int>& ranks, std::vector<int>& room, std::vector<int>& parents) {
  std::size_t next_parent = 0;
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    while (room[index(ranks[next_parent])] == 0) ++next_parent;
    --room[index(ranks[next_parent])];
    parents[index(ranks[i])] = ranks[next_parent];
  }
}

}  // namespace

bool needs_tree(const Topology& topology, int radix) noexcept {
  return radix >= 2 && topology.host_names.size() > 1 && topology.size > radix + 1;
}

std::vector<int> tree_parents(const Topology& topology, int radix) {
  std::vector<std::vector<int>> hosts(topology.host_names.size());
  for (int rank = 0; rank < topology.size; ++rank)
    hosts[index(topology.host_of_rank[index(rank)])].push_back(rank);
  std::vector<int> parents(index(topology.size), -1);
  std::vector<int> room(index(topology.size), radix);
  std::vector<int> leaders;
  for (const auto& host : hosts) {
    const int leader = host.front();
    leaders.push_back(leader);
    // At most half of a leader's children are on its own host, so that the other half can be
    // leaders.
    const int locals = std::min(radix / 2, static_cast<int>(host.size()) - 1);
    room[index(leader)] = locals;
    attach(host, room, parents);
    room[index(leader)] = radix - locals;
  }
  attach(leaders, room, parents);
  return parents;
}

TreePlace place_in_tree(const Topology& topology, int rank, int radix) {
  HVD_EXPECT(radix >= 2, "a rank has two children or more");
  const std::vector<int> parents = tree_parents(topology, radix);
  TreePlace place;
  place.parent = parents[index(rank)];
  // A parent may have a higher number than its child, so the path to the root is followed for each
  // rank.
  for (int other = 0; other < topology.size; ++other) {
    if (parents[index(other)] == rank) place.children.push_back(other);
    int above = other;
    while (above != rank && above != -1) above = parents[index(above)];
    if (above == rank) place.subtree.append({other, other});
  }
  return place;
}

}  // namespace hvd::control
