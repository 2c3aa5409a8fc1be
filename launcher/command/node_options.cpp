#include "command/node_options.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

constexpr int kMaxRanks = 1'000'000;
constexpr int kStaticPort = 29500;  // torchrun's default ports
constexpr int kC10dPort = 29400;

[[noreturn]] void refuse(std::string_view option, std::string_view expected,
                         const std::string& given) {
  throw LaunchError(ExitCode::kUsage, text(option, ": expected ", expected, ", got '", given, "'"));
}

int parse_count(std::string_view option, const std::string& value, int minimum, int maximum) {
  const auto count = parse_number<int>(value);
  if (!count || *count < minimum || *count > maximum)
    refuse(option, text("a whole number from ", minimum, " to ", maximum), value);
  return *count;
}

/// Parses a number of nodes, or a range, which selects an elastic job.
void parse_nodes(const std::string& value, NodeOptions& node) {
  const std::size_t colon = value.find(':');
  node.nodes = parse_count("--nnodes", value.substr(0, colon), 1, kMaxRanks);
  if (colon == std::string::npos) return;
  const int max_nodes = parse_count("--nnodes", value.substr(colon + 1), node.nodes, kMaxRanks);
  if (max_nodes > node.nodes) node.max_nodes = max_nodes;
}

int parse_processes(const std::string& value, const Machine& machine) {
  if (value == "cpu") return machine.cpus();
  if (value == "gpu" || value == "auto") {
    const int gpus = machine.gpus();
    if (gpus > 0) return gpus;
    if (value == "auto") return machine.cpus();
    throw LaunchError(ExitCode::kUsage,
                      "--nproc-per-node gpu: expected at least one GPU on this machine, got none; "
                      "see 'hvdrun --check-build'");
  }
  const auto count = parse_number<int>(value);
  if (!count || *count < 1 || *count > kMaxRanks)
    refuse("--nproc-per-node", "a number of ranks, auto, cpu or gpu", value);
  return *count;
}

struct Endpoint {
  std::string host;
  int port = 0;
};

bool is_host(std::string_view host) {
  return !host.empty() && std::all_of(host.begin(), host.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_' || c == ':';
  });
}

std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

/// Parses HOST or HOST:PORT; an IPv6 address stands in brackets.
Endpoint parse_endpoint(const std::string& value, int default_port) {
  Endpoint endpoint{.host = value, .port = default_port};
  const bool only_address = value.starts_with('[') && value.ends_with(']');
  const std::size_t colon = only_address ? std::string::npos : value.rfind(':');
  if (colon != std::string::npos) {
    endpoint.host = value.substr(0, colon);
    endpoint.port = parse_number<int>(value.substr(colon + 1)).value_or(-1);
  }
  endpoint.host = without_brackets(endpoint.host);
  if (!is_host(endpoint.host) || endpoint.port < 1 || endpoint.port > 65535)
    refuse("--rdzv-endpoint", "HOST:PORT (an IPv6 address in brackets)", value);
  return endpoint;
}

/// The address at which rank 0 serves, and this node's rank, in a job of several nodes.
void place_node(const NodeOptionTexts& texts, bool is_static, NodeOptions& node) {
  Endpoint master;
  if (!texts.endpoint.empty()) {
    master = parse_endpoint(texts.endpoint, is_static ? 0 : kC10dPort);
  } else if (!is_static) {
    throw LaunchError(ExitCode::kUsage,
                      "--rdzv-backend c10d: expected --rdzv-endpoint HOST:PORT, the same on every "
                      "node, got none");
  } else if (texts.master_address.empty()) {
    throw LaunchError(ExitCode::kUsage,
                      text("--nnodes ", node.nodes,
                           ": expected --master-addr HOST (the host of node 0) or --rdzv-endpoint "
                           "HOST:PORT, the same on every node, got neither"));
  } else {
    if (texts.master_port == "0") {
      throw LaunchError(ExitCode::kUsage,
                        text("--nnodes ", node.nodes,
                             ": expected a --master-port that is the same on every node, got '0'; "
                             "with --rdzv-backend c10d node 0 chooses a free port"));
    }
    master.host = without_brackets(texts.master_address);
    master.port = texts.master_port.empty()
                      ? kStaticPort
                      : parse_count("--master-port", texts.master_port, 1, 65535);
    if (!is_host(master.host)) refuse("--master-addr", "a host name or an address", master.host);
  }
  node.master_address = master.host;
  node.master_port = master.port;
  if (texts.rank.empty()) {
    node.rank.reset();
    if (!is_static) return;
    throw LaunchError(
        ExitCode::kUsage,
        text("--nnodes ", node.nodes, ": expected --node-rank K, from 0 to ", node.nodes - 1,
             " and different on every node, got none; with --rdzv-backend c10d the "
             "nodes distribute the ranks themselves"));
  }
  node.rank = parse_count("--node-rank", texts.rank, 0, node.nodes - 1);
}

void check_elastic_nodes(const NodeOptionTexts& texts) {
  const auto refuse_with = [&](const char* advice) {
    throw LaunchError(ExitCode::kUsage,
                      text("--nnodes ", texts.nodes, " is an elastic job: ", advice));
  };
  if (texts.standalone) refuse_with("it has several nodes; remove --standalone");
  if (texts.backend != "c10d")
    refuse_with(
        "expected --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, the same on every node");
  if (!texts.rank.empty()) refuse_with("its ranks change; remove --node-rank");
}

}  // namespace

int parse_max_restarts(const NodeOptionTexts& texts) {
  if (texts.max_restarts.empty()) return 0;
  return parse_count("--max-restarts", texts.max_restarts, 0, 1000);
}

NodeOptions make_node_options(const NodeOptionTexts& texts, const Machine& machine) {
  NodeOptions node;
  if (!texts.nodes.empty()) parse_nodes(texts.nodes, node);
  node.processes = parse_processes(texts.processes.empty() ? "1" : texts.processes, machine);
  if (!texts.run_id.empty()) node.run_id = texts.run_id;
  if (!texts.role.empty()) node.role = texts.role;
  if (node.nodes > 1 && !node.is_elastic() && parse_max_restarts(texts) > 0) {
    throw LaunchError(ExitCode::kUsage,
                      text("--max-restarts: expected 0 with --nnodes ", node.nodes,
                           ", because each hvdrun could restart the ranks of its own node only, "
                           "got '",
                           texts.max_restarts, "'"));
  }
  if (!texts.backend.empty() && texts.backend != "static" && texts.backend != "c10d") {
    throw LaunchError(
        ExitCode::kUsage,
        text("--rdzv-backend: expected static or c10d, got '", texts.backend,
             "'; with c10d the node of --rdzv-endpoint HOST:PORT serves, and no other "
             "server is needed"));
  }
  const int max_nodes = std::max(node.nodes, node.max_nodes);
  if (static_cast<long long>(max_nodes) * node.processes > kMaxRanks) {
    throw LaunchError(ExitCode::kUsage,
                      text("--nnodes and --nproc-per-node: expected at most ", kMaxRanks,
                           " ranks, got ", max_nodes, " times ", node.processes));
  }
  if (node.is_elastic()) check_elastic_nodes(texts);
  const bool is_static = texts.backend != "c10d";
  if (node.nodes > 1 || node.is_elastic()) {
    if (texts.standalone) {
      throw LaunchError(ExitCode::kUsage, text("--standalone is for one node, but --nnodes is ",
                                               node.nodes, "; remove one of them"));
    }
    place_node(texts, is_static, node);
    return node;
  }
  if (!texts.rank.empty()) parse_count("--node-rank", texts.rank, 0, 0);
  // Port 0 stands for a free one, which hvdrun chooses.
  if (!texts.standalone && is_static && !texts.master_port.empty() && texts.master_port != "0") {
    node.master_address = without_brackets(texts.master_address.empty() ? std::string("127.0.0.1")
                                                                        : texts.master_address);
    node.master_port = parse_count("--master-port", texts.master_port, 1, 65535);
  }
  return node;
}

std::map<int, Streams> parse_streams(const std::string& option, const std::string& value) {
  const auto to_streams = [&](std::string_view digits) -> Streams {
    const auto number = parse_number<int>(digits);
    if (!number || *number < 0 || *number > 3)
      refuse(option, "0, 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:N separated by commas",
             value);
    return {(*number & 1) != 0, (*number & 2) != 0};
  };
  std::map<int, Streams> streams;
  if (value.find(':') == std::string::npos) {
    streams[-1] = to_streams(value);
    return streams;
  }
  for (const std::string_view part : split_text(value, ',')) {
    const std::size_t colon = part.find(':');
    const auto rank = parse_number<int>(part.substr(0, colon));
    const auto digits = colon == std::string_view::npos ? "" : part.substr(colon + 1);
    const Streams chosen = to_streams(digits);
    if (!rank || *rank < 0) to_streams("");
    streams[*rank] = chosen;
  }
  return streams;
}

std::set<int> parse_local_ranks(const std::string& value) {
  std::set<int> ranks;
  for (const std::string_view part : split_text(value, ',')) {
    const auto rank = parse_number<int>(part);
    if (!rank || *rank < 0)
      refuse("--local-ranks-filter", "local ranks separated by commas, as in 0,1", value);
    ranks.insert(*rank);
  }
  return ranks;
}

RankStreams streams_of(const LogOptions& options, int local_rank) {
  const auto value_of = [local_rank](const std::map<int, Streams>& given) -> Streams {
    const auto found = given.find(given.contains(local_rank) ? local_rank : -1);
    return found != given.end() ? found->second : Streams{};
  };
  const Streams redirected = value_of(options.redirects), teed = value_of(options.tee);
  const bool filtered = !options.shown_ranks.empty() && !options.shown_ranks.contains(local_rank);
  RankStreams streams;
  for (std::size_t i = 0; i < 2; ++i) {
    streams.logged[i] = redirected[i] || teed[i];
    streams.shown[i] = !filtered && (teed[i] || !redirected[i]);
  }
  return streams;
}

}  // namespace hvd::launcher
