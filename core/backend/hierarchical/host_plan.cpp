#include "backend/hierarchical/host_plan.h"

#include <algorithm>

#include "base/cache_line.h"

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

Range slice_of(std::size_t bytes, int index, int drivers) noexcept {
  const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
  const auto edge = [&](int at) {
    return std::min(bytes, lines * static_cast<std::size_t>(at) /
                               static_cast<std::size_t>(drivers) * kCacheLine);
  };
  return {edge(index), edge(index + 1)};
}

Range round_of(std::size_t bytes, std::size_t round, std::size_t step) noexcept {
  const std::size_t begin = std::min(bytes, round * step);
  return {begin, begin + std::min(step, bytes - begin)};
}

}  // namespace hvd::hierarchical
