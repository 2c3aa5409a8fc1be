#include "bootstrap/data_neighbours.h"

#include <cstddef>

namespace hvd::runtime {

std::vector<int> data_neighbours(const Topology& topology) {
  std::vector<int> neighbours;
  for (const int host : {topology.host_index() - 1, topology.host_index() + 1}) {
    int position = 0;
    for (int rank = 0; rank < topology.size; ++rank) {
      if (topology.host_of_rank[static_cast<std::size_t>(rank)] != host) continue;
      if (position++ == topology.local_rank) neighbours.push_back(rank);
    }
  }
  return neighbours;
}

}  // namespace hvd::runtime
