#pragma once

#include <string>
#include <vector>

#include "command/hosts.h"

namespace hvd::launcher {

/// The ranks of one host, ascending: the first is its local rank 0.
struct HostRanks {
  std::string host;
  bool local = false;  ///< this machine
  std::vector<int> ranks;
  bool operator==(const HostRanks&) const = default;
};

/// Fills each host's slots before the next one's, as mpirun does with `--map-by slot`. Pure. No
/// hosts: all ranks are on this machine. Hosts without ranks are left out, and names of this
/// machine are one host.
std::vector<HostRanks> place_ranks(int np, const std::vector<Host>& hosts,
                                   const std::string& own_hostname);

}  // namespace hvd::launcher
