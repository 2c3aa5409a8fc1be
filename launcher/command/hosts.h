#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

struct Host {
  std::string name;
  int slots = 1;
  bool operator==(const Host&) const = default;
};

/// "h1:2,h2:2"; a host without a number has one slot.
/// @throws LaunchError (kUsage) that quotes the bad part.
std::vector<Host> parse_host_list(std::string_view list);

/// One host a line, "host", "host slots=N" or "host:N"; '#' starts a comment; other key=value words
/// are mpirun's and are ignored. A host that appears again adds to its slots, as in mpirun. `file`
/// is the name used in messages.
/// @throws LaunchError (kUsage) that names the file and quotes the line.
std::vector<Host> parse_hostfile(std::string_view content, std::string_view file);

/// @throws LaunchError (kUsage) when the file cannot be read.
std::vector<Host> read_hostfile(const std::string& file);

int total_slots(const std::vector<Host>& hosts);
/// The hosts in the format of mpirun's -H, which parse_host_list() reads.
std::string format_hosts(const std::vector<Host>& hosts);
/// Whether the name is this machine's. A fully qualified name equals its first label.
bool is_local_host(std::string_view name, std::string_view own_hostname);
bool all_local(const std::vector<Host>& hosts, std::string_view own_hostname);

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
