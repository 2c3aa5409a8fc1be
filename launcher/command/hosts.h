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

/// Parses a list such as "h1:2,h2:2"; a host without a number has one slot.
/// @throws LaunchError (kUsage) that quotes the bad part.
std::vector<Host> parse_host_list(std::string_view list);

/// Parses lines with one host each: "host", "host slots=N" or "host:N". '#' starts a comment. Other
/// key=value words are for mpirun and are ignored. The slots of a host that appears several times
/// are added up, as in mpirun. `file` is the name used in messages.
/// @throws LaunchError (kUsage) that names the file and quotes the line.
std::vector<Host> parse_hostfile(std::string_view content, std::string_view file);

/// @throws LaunchError (kUsage) when the file cannot be read.
std::vector<Host> read_hostfile(const std::string& file);

int total_slots(const std::vector<Host>& hosts);
/// The hosts in the format of mpirun's -H, which parse_host_list() reads.
std::string format_hosts(const std::vector<Host>& hosts);
/// Whether the name is this machine's. A fully qualified name and its first label are the same
/// host.
bool is_local_host(std::string_view name, std::string_view own_hostname);
bool all_local(const std::vector<Host>& hosts, std::string_view own_hostname);

/// The ranks of one host, ascending: the first is its local rank 0.
struct HostRanks {
  std::string host;
  bool local = false;  ///< this machine
  std::vector<int> ranks;
  bool operator==(const HostRanks&) const = default;
};

/// Fills each host's slots before the next one's, as mpirun does with `--map-by slot`. Without
/// hosts, all ranks are on this machine. Hosts without ranks are left out, and all names of this
/// machine count as one host. Pure.
std::vector<HostRanks> place_ranks(int np, const std::vector<Host>& hosts,
                                   const std::string& own_hostname);

}  // namespace hvd::launcher
