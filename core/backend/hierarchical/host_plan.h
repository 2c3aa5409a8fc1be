#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/topology.h"

namespace hvd::hierarchical {

/// The members of a process set by host. A member is a position in the set.
struct HostPlan {
  /// The members of each host, ascending. The hosts are in the order of their first members.
  std::vector<std::vector<int>> hosts = {};
  int host = 0;     ///< index of this rank's host in `hosts`
  int index = 0;    ///< this rank's position in local()
  int drivers = 1;  ///< the first `drivers` members of each host send to other hosts

  std::size_t member_count() const noexcept {
    return static_cast<std::size_t>(first_position(host_count()));
  }
  int host_count() const noexcept { return static_cast<int>(hosts.size()); }
  const std::vector<int>& local() const noexcept { return hosts[static_cast<std::size_t>(host)]; }
  int local_count() const noexcept { return static_cast<int>(local().size()); }
  bool drives() const noexcept { return index < drivers; }
  /// The member at this position of a host.
  int member(int of_host, int at) const noexcept {
    return hosts[static_cast<std::size_t>(of_host)][static_cast<std::size_t>(at)];
  }
  /// The number of members on the hosts before this one, which is the position of its first member
  /// in the order of the reduction.
  int first_position(int of_host) const noexcept;
  int host_of(int member) const noexcept;
};

/// @param ranks world ranks of the set, ascending
/// @param max_drivers at least 1; there are also at most as many drivers as the smallest host has
/// members
inline HostPlan make_plan(const Topology& topology, const std::vector<int>& ranks, int set_rank,
                          int max_drivers) {
  HostPlan plan;
  std::vector<int> place_of_host(topology.host_names.size(), -1);
  for (int member = 0; member < static_cast<int>(ranks.size()); ++member) {
    const int world_rank = ranks[static_cast<std::size_t>(member)];
    int& place = place_of_host[static_cast<std::size_t>(
        topology.host_of_rank[static_cast<std::size_t>(world_rank)])];
    if (place < 0) {
      place = plan.host_count();
      plan.hosts.emplace_back();
    }
    std::vector<int>& members = plan.hosts[static_cast<std::size_t>(place)];
    if (member == set_rank) {
      plan.host = place;
      plan.index = static_cast<int>(members.size());
    }
    members.push_back(member);
  }
  plan.drivers = max_drivers;
  for (const auto& members : plan.hosts)
    plan.drivers = std::min(plan.drivers, static_cast<int>(members.size()));
  return plan;
}

inline int HostPlan::first_position(int of_host) const noexcept {
  std::size_t before = 0;
  for (int other = 0; other < of_host; ++other)
    before += hosts[static_cast<std::size_t>(other)].size();
  return static_cast<int>(before);
}

inline int HostPlan::host_of(int member) const noexcept {
  const auto found = std::find_if(hosts.begin(), hosts.end(), [member](const auto& members) {
    return std::binary_search(members.begin(), members.end(), member);
  });
  return static_cast<int>(found - hosts.begin());
}

}  // namespace hvd::hierarchical
