#include "command/placement.h"

#include <algorithm>
#include <numeric>

namespace hvd::launcher {

std::vector<HostRanks> place_ranks(int np, const std::vector<Host>& hosts,
                                   const std::string& own_hostname) {
  if (hosts.empty()) {
    HostRanks all{.host = own_hostname, .local = true, .ranks = {}};
    all.ranks.resize(static_cast<std::size_t>(np));
    std::iota(all.ranks.begin(), all.ranks.end(), 0);
    return {std::move(all)};
  }
  std::vector<HostRanks> placed;
  int rank = 0;
  for (const Host& host : hosts) {
    const bool local = is_local_host(host.name, own_hostname);
    auto known = std::find_if(placed.begin(), placed.end(), [&](const HostRanks& other) {
      return other.host == host.name || (local && other.local);
    });
    for (int slot = 0; slot < host.slots && rank < np; ++slot) {
      if (known == placed.end())
        known = placed.insert(known, {.host = host.name, .local = local, .ranks = {}});
      known->ranks.push_back(rank++);
    }
  }
  return placed;
}

}  // namespace hvd::launcher
