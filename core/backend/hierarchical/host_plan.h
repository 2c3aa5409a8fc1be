#pragma once

#include <cstddef>
#include <vector>

#include "base/topology.h"

namespace hvd::hierarchical {

/// Which members of a process set live together. Members are positions in the set.
struct HostPlan {
  /// Per host its members, ascending; hosts in the order of their first members.
  std::vector<std::vector<int>> hosts = {};
  int host = 0;     ///< this rank's, an index into `hosts`
  int index = 0;    ///< this rank's position among its host's members
  int drivers = 1;  ///< members of every host that exchange data with other hosts; the first ones

  int host_count() const noexcept { return static_cast<int>(hosts.size()); }
  const std::vector<int>& local() const noexcept { return hosts[static_cast<std::size_t>(host)]; }
  int local_count() const noexcept { return static_cast<int>(local().size()); }
  bool drives() const noexcept { return index < drivers; }
  /// The member at this position of a host.
  int member(int of_host, int at) const noexcept {
    return hosts[static_cast<std::size_t>(of_host)][static_cast<std::size_t>(at)];
  }
  /// How many members the hosts before this one have: where its members begin in the order of the
  /// reduction.
  int first_position(int of_host) const noexcept;
  int host_of(int member) const noexcept;
};

/// @param ranks world ranks of the set, ascending
/// @param most_drivers at least 1; beyond the members of the smallest host there are none
HostPlan make_plan(const Topology&, const std::vector<int>& ranks, int set_rank, int most_drivers);

}  // namespace hvd::hierarchical
