#include "base/topology.h"

#include <map>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd {

Topology make_topology(int rank, const std::vector<std::string>& host_per_rank) {
  const int size = static_cast<int>(host_per_rank.size());
  if (rank < 0 || rank >= size) {
    throw Error(text("topology: rank ", rank, " is outside a job of ", size,
                     " ranks; expected 0 to size - 1"));
  }
  Topology topology;
  topology.rank = rank;
  topology.size = size;
  topology.host_names.clear();
  topology.host_of_rank.clear();

  std::map<std::string, int> index_of_host;
  std::vector<int> ranks_on_host;
  for (int other = 0; other < size; ++other) {
    const std::string& name = host_per_rank[static_cast<std::size_t>(other)];
    const auto [entry, is_new] =
        index_of_host.try_emplace(name, static_cast<int>(topology.host_names.size()));
    if (is_new) {
      topology.host_names.push_back(name);
      ranks_on_host.push_back(0);
    }
    int& position = ranks_on_host[static_cast<std::size_t>(entry->second)];
    if (other == rank) {
      topology.local_rank = position;
    }
    ++position;
    topology.host_of_rank.push_back(entry->second);
  }

  const int own_host = topology.host_of_rank[static_cast<std::size_t>(rank)];
  topology.local_size = ranks_on_host[static_cast<std::size_t>(own_host)];
  topology.cross_rank = 0;
  topology.cross_size = 0;
  for (int host = 0; host < static_cast<int>(ranks_on_host.size()); ++host) {
    const int ranks_there = ranks_on_host[static_cast<std::size_t>(host)];
    if (ranks_there > topology.local_rank) {
      topology.cross_rank += host < own_host ? 1 : 0;
      ++topology.cross_size;
    }
    topology.homogeneous = topology.homogeneous && ranks_there == topology.local_size;
  }
  return topology;
}

}  // namespace hvd
