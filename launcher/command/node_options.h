#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>

namespace hvd::launcher {

/// A job in which each hvdrun starts the ranks of its own node, as torchrun does: the same command
/// line runs on every node.
struct NodeOptions {
  int nodes = 1;      ///< in an elastic job, the minimum
  int max_nodes = 0;  ///< --nnodes A:B selects an elastic job of at most B nodes; else 0
  /// This node's rank; empty: the nodes distribute the ranks at the endpoint. The endpoint is then
  /// the master's address with a port other than the master's.
  std::optional<int> rank = 0;
  int processes = 1;  ///< per node
  /// The address at which rank 0 of the job serves or, in an elastic job, the hvdrun of that node.
  /// Empty: hvdrun chooses an address and a port (one node only).
  std::string master_address = {};
  int master_port = 0;
  std::string run_id = "none";
  std::string role = "default";

  bool is_elastic() const { return max_nodes > 0; }
  int first_rank() const { return rank.value_or(0) * processes; }
  int world_size() const { return nodes * processes; }
  bool operator==(const NodeOptions&) const = default;
};

/// The values of torchrun's options as text. Empty: not given.
struct NodeOptionTexts {
  std::string nodes = {}, processes = {}, rank = {}, master_address = {}, master_port = {},
              backend = {}, endpoint = {}, run_id = {}, role = {}, max_restarts = {};
  bool standalone = false;
};

/// Counts the processors of this machine, for --nproc-per-node auto, cpu and gpu.
struct Machine {
  int (*cpus)();
  int (*gpus)();
};

/// The value of --max-restarts; 0 if it is not given. @throws LaunchError (kUsage)
int parse_max_restarts(const NodeOptionTexts& texts);

/// @throws LaunchError (kUsage) that names the option
NodeOptions make_node_options(const NodeOptionTexts& texts, const Machine& machine);

/// Which streams of a process an option concerns: stdout, stderr.
using Streams = std::array<bool, 2>;

/// torchrun's options for the output of the ranks of one host.
struct LogOptions {
  std::optional<std::string> folder;  ///< --log-dir
  /// By local rank; -1: the default for all other local ranks.
  std::map<int, Streams> redirects, tee;
  std::set<int> shown_ranks;  ///< local ranks whose output is shown; empty: all

  bool any() const { return folder || !redirects.empty() || !tee.empty() || !shown_ranks.empty(); }
};

/// Parses torchrun's format for streams: "3" for all local ranks, or "0:1,1:2" for some; 0 none, 1
/// stdout, 2 stderr, 3 both. @throws LaunchError (kUsage) that names the option
std::map<int, Streams> parse_streams(const std::string& option, const std::string& value);
/// Parses "0,2". @throws LaunchError (kUsage)
std::set<int> parse_local_ranks(const std::string& value);

/// Where the output of one rank goes.
struct RankStreams {
  Streams logged = {false, false};  ///< to its file
  Streams shown = {true, true};     ///< to hvdrun's own stdout and stderr
  bool operator==(const RankStreams&) const = default;
};
/// Combines the options: a redirected stream is not shown unless it is also teed. Pure.
RankStreams streams_of(const LogOptions& options, int local_rank);

}  // namespace hvd::launcher
