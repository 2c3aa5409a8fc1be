#include "backend/hierarchical/host_plan.h"

#include <algorithm>

namespace hvd::hierarchical {

HostPlan make_plan(const Topology& topology, const std::vector<int>& ranks, int set_rank,
                   int most_drivers) {
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
  plan.drivers = most_drivers;
  for (const auto& members : plan.hosts)
    plan.drivers = std::min(plan.drivers, static_cast<int>(members.size()));
  return plan;
}

int HostPlan::first_position(int of_host) const noexcept {
  std::size_t before = 0;
  for (int other = 0; other < of_host; ++other)
    before += hosts[static_cast<std::size_t>(other)].size();
  return static_cast<int>(before);
}

int HostPlan::host_of(int member) const noexcept {
  const auto found = std::find_if(hosts.begin(), hosts.end(), [member](const auto& members) {
    return std::binary_search(members.begin(), members.end(), member);
  });
  return static_cast<int>(found - hosts.begin());
}

}  // namespace hvd::hierarchical
