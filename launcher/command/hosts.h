#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

struct Host {
  std::string name;  ///< a name or an address, without brackets
  int slots = 1;
  std::string user = {};  ///< for the remote shell; empty: the shell's own choice
  bool local = false;     ///< set by mark_local_hosts()
  bool operator==(const Host&) const = default;
};

/// Parses "host" or "host:N". Empty if the text is neither. @param slots of a host without a number
std::optional<Host> parse_host(std::string_view text, int slots = 1);
/// Adds a host. The slots of a host that is listed already are added up.
void add_host(std::vector<Host>& hosts, const Host& host);

/// Parses a list such as "h1:2,user@h2:2,[fd00::3]:2"; a host without a number has one slot, and an
/// IPv6 address stands in brackets. @throws LaunchError (kUsage) that quotes the bad part.
std::vector<Host> parse_host_list(std::string_view list);

/// Parses lines with one host each: "host", "host slots=N" or "host:N", where a host is as in
/// parse_host_list(). '#' starts a comment. Other
/// key=value words are for mpirun and are ignored. The slots of a host that appears several times
/// are added up, as in mpirun. `file` is the name used in messages.
/// @throws LaunchError (kUsage) that names the file and quotes the line.
std::vector<Host> parse_hostfile(std::string_view content, std::string_view file);

/// @throws LaunchError (kUsage) when the file cannot be read.
std::vector<Host> read_hostfile(const std::string& file);

int total_slots(const std::vector<Host>& hosts);
/// The hosts in the format that parse_host_list() reads, which is that of mpirun's -H if no host
/// has a user or an IPv6 address.
std::string format_hosts(const std::vector<Host>& hosts);
/// The host as the remote shell's argument: "h1", "user@h1".
std::string shell_target(const Host& host);

/// The names of this machine. @param addresses numeric, without loopback
struct OwnNames {
  std::string hostname = {};
  std::vector<std::string> addresses = {};
  std::string user = {};
  /// The numeric addresses of names; those without an address are left out.
  std::function<std::map<std::string, std::vector<std::string>>(const std::vector<std::string>&)>
      resolve = {};
};
/// The names of this machine. Name look-ups take at most a second in total.
OwnNames own_names();

/// Whether the name is this machine's. A fully qualified name and its first label are the same
/// host.
bool is_local_host(std::string_view name, std::string_view own_hostname);
/// Marks the hosts that are this machine: by its name, by one of its addresses, or by a name that
/// resolves to one of these. A host with a user other than this process's is not marked.
void mark_local_hosts(std::vector<Host>& hosts, const OwnNames& own);
bool all_local(const std::vector<Host>& hosts, std::string_view own_hostname);

/// The ranks of one host, ascending: the first is its local rank 0.
struct HostRanks {
  std::string host;    ///< as shell_target()
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
