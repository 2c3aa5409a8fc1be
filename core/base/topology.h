#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace hvd {

/// The ranks and hosts of the job, and the position of this rank. The local and cross ranks and
/// sizes depend on the rank; the number of ranks and the hosts are the same everywhere.
struct Topology {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< position among the ranks of this host
  int local_size = 1;  ///< ranks of this host
  int cross_rank =
      0;  ///< position of this host among the hosts that have a rank at this local_rank
  int cross_size = 1;       ///< hosts that have a rank at this local_rank
  bool homogeneous = true;  ///< every host has the same number of ranks
  std::vector<std::string> host_names = {"localhost"};  ///< per host, in order of its lowest rank
  std::vector<int> host_of_rank = {0};                  ///< per rank, an index into host_names

  const std::string& host_name(int world_rank) const {
    return host_names[static_cast<std::size_t>(host_of_rank[static_cast<std::size_t>(world_rank)])];
  }
  /// The lowest rank of a host, given by its index into host_names.
  int first_rank_on(int host) const {
    return static_cast<int>(std::find(host_of_rank.begin(), host_of_rank.end(), host) -
                            host_of_rank.begin());
  }
  int host_index() const { return host_of_rank[static_cast<std::size_t>(rank)]; }
  bool same_host(int a, int b) const {
    return host_of_rank[static_cast<std::size_t>(a)] == host_of_rank[static_cast<std::size_t>(b)];
  }
};

/// Derives a rank's topology from every rank's host name, in rank order.
Topology make_topology(int rank, const std::vector<std::string>& host_per_rank);

}  // namespace hvd
