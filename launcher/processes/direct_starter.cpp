#include "processes/direct_starter.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/text.h"
#include "mpirun/mpirun_starter.h"
#include "system/error.h"
#include "system/text.h"

// Note [Starting without mpirun]
//
//   hvdrun ---------------- agent --+-- program                this host
//      |                            +-- program
//      +-- ssh h2 .. ------ agent --+-- program
//                                   +-- program
//
// hvdrun starts one agent per host, and the agent starts and watches the programs of that host's
// ranks. Once an agent has connected to hvdrun, it does not matter how it was started: its
// connection, not the remote shell's process, shows whether the host is alive. An agent reads its
// order, with the token, from its standard input, where `ps` does not show it. Rank 0's input
// follows the order there.
//
// No process outlives hvdrun: when hvdrun dies, the agents' connections end or cannot be made, and
// an agent without an order reads the end of its input. When an agent dies, the kernel kills its
// programs.

namespace hvd::launcher {

DirectStarter::DirectStarter(asio::io_context& io, LaunchPlan plan, Show show)
    : io_(io),
      plan_(std::move(plan)),
      hosts_(place_ranks(plan_.np, plan_.hosts, plan_.hostname)),
      show_(std::move(show)),
      spawner_(io, plan_) {}

std::vector<std::string> DirectStarter::commands() const {
  std::vector<std::string> lines;
  for (const HostRanks& host : hosts_) {
    std::vector<std::string> words = host.local ? plan_.program : spawner_.command(host);
    for (std::string& word : words) word = shell_quote(word);
    std::vector<int> ranks = host.ranks;
    for (int& rank : ranks) rank += plan_.first_rank;
    lines.push_back(text(rank_list(ranks), host.local ? ", each: " : ": ", join_text(words, " ")));
  }
  return lines;
}

void DirectStarter::start() {
  Pipe output = make_pipe();
  output_.emplace(io_, std::move(output.read_end), [this](std::string_view bytes) {
    wrote_ = wrote_ || !bytes.empty();
    show_(bytes);
  });
  // Remote ranks take longer to start, so they start first.
  for (const bool local : {false, true}) {
    for (const HostRanks& host : hosts_)
      if (host.local == local) start_agent(host, output.write_end.get());
  }
}

void DirectStarter::start_agent(const HostRanks& host, int output) {
  const int source = host.ranks.front() == 0 ? STDIN_FILENO : -1;
  const pid_t pid = spawner_.spawn(host, {.size = plan_.np, .ranks = host.ranks}, output, source);
  children_.push_back({.pid = pid, .ranks = host.ranks, .host = host.local ? "" : host.host});
}

std::vector<JobStarter::Exit> DirectStarter::reap() {
  std::vector<Exit> exits;
  for (Child& child : children_) {
    if (child.end) continue;
    child.end = try_wait(child.pid);
    if (child.end) exits.push_back({.ranks = child.ranks});
  }
  if (!exits.empty()) {
    exits.back().last = std::all_of(children_.begin(), children_.end(),
                                    [](const Child& child) { return child.end.has_value(); });
  }
  return exits;
}

void DirectStarter::signal_all(int signal) {
  for (Child& child : children_) {
    if (child.end) continue;
    child.stopped = true;
    ::kill(child.pid, signal);
  }
}

void DirectStarter::explain(JobRecord& record) const {
  record.starter_wrote = wrote_;
  record.starter = "hvdrun's agents";
  for (const Child& child : children_) {
    // A remote shell has done its work when its ranks have connected. An agent must also have
    // reported its programs' ends: hvdrun may receive the hello of a killed agent only after it has
    // reaped the process.
    const bool did_its_work = std::all_of(child.ranks.begin(), child.ranks.end(), [&](int rank) {
      const RankRecord& known = record.rank(rank);
      return known.connected && (known.ended || !child.host.empty());
    });
    if (!child.end || child.stopped || did_its_work) continue;
    const bool first = record.starter_code == 0;
    if (first) record.starter_code = child.end->code;
    if (child.host.empty()) {
      if (first) record.starter = "the agent of this host";
      continue;
    }
    if (first) record.starter = std::filesystem::path(plan_.remote_shell.front()).filename();
    record.suspect_hosts.push_back(child.host);
    const bool missing = child.end->code == static_cast<int>(ExitCode::kNotFound) ||
                         child.end->code == static_cast<int>(ExitCode::kCannotRun);
    (missing ? record.lacks_executable : record.lost_host) = true;
  }
}

std::unique_ptr<JobStarter> make_starter(asio::io_context& io, const LaunchPlan& plan, bool verbose,
                                         JobStarter::Show show) {
  if (plan.controller.controller == Controller::kUcx)
    return std::make_unique<DirectStarter>(io, plan, std::move(show));
  return std::make_unique<MpirunStarter>(io, plan, verbose, std::move(show));
}

}  // namespace hvd::launcher
