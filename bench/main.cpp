// hvd-bench measures the cost of hvd and of its competitors in the same processes. See
// bench/README.md.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/commands.h"
#include "bench/parameter_sets.h"
#include "bench/report.h"
#include "bench/session.h"

namespace hvd::bench {
namespace {

struct CommandLine {
  SessionOptions session;
  std::string json_path;
  std::vector<Command> commands;
};

const std::vector<OpKind> kAllKinds = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                                       OpKind::kReducescatter, OpKind::kAlltoall};

const std::map<std::string, OpKind>& kinds_by_name() {
  static const std::map<std::string, OpKind> kinds = [] {
    std::map<std::string, OpKind> names;
    for (const OpKind kind : kAllKinds) names[std::string(to_string(kind))] = kind;
    return names;
  }();
  return kinds;
}

Command collectives_command(CLI::App& parent) {
  CLI::App& app =
      *parent.add_subcommand("collectives", "Time, bandwidth and ratios to the peers by size");
  const auto options = std::make_shared<CollectivesOptions>();
  const CLI::AsSizeValue size(/*kb_is_1000=*/false);
  constexpr std::size_t kLargest = std::size_t{4} << 30;  // MPI counts elements in an int
  app.add_option("--min", options->lowest_bytes, "Smallest size, as 4 or 64KiB")
      ->transform(size)
      ->capture_default_str();
  app.add_option("--max", options->highest_bytes, "Largest size")
      ->transform(size)
      ->check(CLI::Range(std::size_t{1}, kLargest))
      ->capture_default_str();
  app.add_option("--factor", options->factor, "Ratio of one size to the previous one")
      ->check(CLI::Range(std::size_t{2}, std::size_t{1024}))
      ->capture_default_str();
  app.add_option("--loop", options->loop,
                 "Calls of a loop, at most 4 above 256 KiB; 1: only single calls")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  options->kinds = kAllKinds;
  app.add_option("--kinds", options->kinds, "Which operations; default: all")
      ->delimiter(',')
      ->transform(CLI::CheckedTransformer(kinds_by_name()));
  declare_repetitions(app, options->repetitions, "Seconds per operation and size");
  declare_gloo(app, options->gloo_path);
  app.add_option("--progress", options->progress,
                 "Which thread drives the engine: the caller's, or hvd's until the caller waits")
      ->transform(CLI::CheckedTransformer(std::map<std::string, Progress>{
          {"caller", Progress::kCaller}, {"background", Progress::kBackground}}));
  app.add_flag_callback(
      "--shared-memory", [options] { options->memory = Memory::kShared; },
      "Tensors lie in hvd::allocate_shared(), where ranks of a host reduce them in place");
  return {&app, [options](const Session& session, std::ostream& out) {
            return run_collectives(session, *options, out);
          }};
}

Command control_command(CLI::App& parent) {
  CLI::App& app = *parent.add_subcommand(
      "control", "Latency of an allreduce of 8 bytes; cost of the coordinator in large worlds");
  const auto options = std::make_shared<ControlOptions>();
  app.add_option("--repetitions", options->repetitions, "Timed operations per way; 0: no latencies")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--pause", options->pause_ms,
                 "Milliseconds of rest before an operation that wakes a thread")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--worlds", options->worlds, "Numbers of ranks to simulate; 0: none")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--tensors", options->tensors, "Tensors per simulated rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  return {&app, [options](const Session& session, std::ostream& out) {
            std::erase(options->worlds, 0);
            return run_control(session, *options, out);
          }};
}

Command steady_command(CLI::App& parent) {
  CLI::App& app = *parent.add_subcommand(
      "steady", "Cost of a deviation from the steady state, and of an idle program");
  const auto options = std::make_shared<SteadyOptions>();
  app.add_option("--steps", options->steps, "Steps of a run")
      ->check(CLI::Range(10, 1'000'000))
      ->capture_default_str();
  app.add_option("--rounds", options->rounds, "Pairs of runs, with and without a deviation")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--tensors", options->tensors, "Tensors of a step")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  app.add_option("--pause", options->pause_seconds, "Seconds to be idle for")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  return {&app, [options](const Session& session, std::ostream& out) {
            return run_steady(session, *options, out);
          }};
}

Command carriers_command(CLI::App& parent) {
  CLI::App& app = *parent.add_subcommand(
      "carriers", "hvd over UCX and over MPI beside plain messages of both, between two ranks");
  const auto options = std::make_shared<CarriersOptions>();
  app.add_option("--sizes", options->sizes, "Bytes of a tensor, as 8,1MiB")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(std::size_t{4}, std::size_t{1} << 30))
      ->capture_default_str();
  app.add_option("--rounds", options->rounds, "Rounds; every contender runs once in each")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--tensors", options->tensors, "Tensors of the first negotiation")
      ->check(CLI::Range(1, 10'000))
      ->capture_default_str();
  declare_repetitions(app, options->repetitions, "Seconds per size in a turn");
  return {&app, [options](const Session& session, std::ostream& out) {
            return run_carriers(session, *options, out);
          }};
}

Command messages_command(CLI::App& parent) {
  CLI::App& app = *parent.add_subcommand(
      "messages", "send() and recv() between two ranks, there and back, beside MPI's");
  const auto options = std::make_shared<MessagesOptions>();
  app.add_option("--sizes", options->sizes, "Bytes of a message, as 8,1MiB")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::Range(std::size_t{1}, std::size_t{1} << 30))
      ->capture_default_str();
  app.add_option("--loop", options->loop, "Exchanges of a sample; one above 256 KiB")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  declare_repetitions(app, options->repetitions, "Seconds per size");
  return {&app, [options](const Session& session, std::ostream& out) {
            return run_messages(session, *options, out);
          }};
}

Command shapes_command(CLI::App& parent) {
  CLI::App& app =
      *parent.add_subcommand("shapes", "Write the shapes of the parameter sets, for gloo_peers.py");
  const auto path = std::make_shared<std::string>("shapes.json");
  app.add_option("-o,--output", *path, "The JSON file")->capture_default_str();
  return {&app, {}, [path] { write_json(*path, all_parameter_sets()); }};
}

void declare(CLI::App& app, CommandLine& line) {
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--json", line.json_path, "Also write the results there")->type_name("FILE");
  app.add_flag("--retain-heap", line.session.retain_heap,
               "Have malloc keep freed memory, which spares MPI's buffers page faults");
  app.add_flag("--plain-mpi", line.session.plain_mpi,
               "Start MPI with its own defaults instead of hvd's settings");
  app.add_option(
         "--init-method", line.session.init_method,
         "How hvd's ranks meet, for jobs over UCX beside MPI's: file:///path or tcp://host:port")
      ->type_name("METHOD");
  app.footer("Start it under hvdrun or mpirun. bench/README.md says how to read the columns.");
  line.commands = {collectives_command(app), control_command(app),  steady_command(app),
                   carriers_command(app),    messages_command(app), shapes_command(app)};
  for (Command& command : torch_commands(app)) line.commands.push_back(std::move(command));
}

int measure(const Session& session, const Command& command, const std::string& json_path) {
  // Fail now, not after minutes of measuring, if the file cannot be written.
  if (session.rank() == 0 && !json_path.empty()) write_json(json_path, Json::object());
  const Json environment = session.describe();
  if (session.rank() == 0) print_description(environment, std::cout);
  const CoreDistance before = session.core_distance();
  if (session.rank() == 0)
    std::cout << "# cores of ranks 0 and 1: " << to_text(before) << std::endl;
  const Json result = command.measure(session, std::cout);
  const CoreDistance after = session.core_distance();
  if (session.rank() == 0) {
    Json document = {{"command", command.app->get_name()}, {"environment", environment}};
    document["load_average_after"] = session.describe()["load_average"];
    document["cores"] = {{"before", to_json(before)}, {"after", to_json(after)}};
    document.update(result);
    std::cout << "\n# load_average after: " << document["load_average_after"].dump()
              << "\n# cores of ranks 0 and 1 after: " << to_text(after) << std::endl;
    if (!json_path.empty()) write_json(json_path, document);
  }
  return result.value("correct", true) ? 0 : 1;
}

int run(const Command& command, const CommandLine& line) {
  if (command.work) {
    command.work();
    return 0;
  }
  const Session session(line.session);
  try {
    return measure(session, command, line.json_path);
  } catch (const std::exception& error) {
    std::cerr << "hvd-bench: " << error.what() << std::endl;
    // The other ranks wait for this one inside MPI, and only MPI_Abort() ends their wait.
    MPI_Abort(session.peers(), 1);
    return 1;
  }
}

int run_main(int argc, char** argv) {
  CLI::App app("Measures hvd and its competitors in the same processes.", "hvd-bench");
  CommandLine line;
  declare(app, line);
  CLI11_PARSE(app, argc, argv);
  const auto chosen = std::find_if(line.commands.begin(), line.commands.end(),
                                   [](const Command& one) { return one.app->parsed(); });
  try {
    return run(*chosen, line);
  } catch (const std::exception& error) {
    std::cerr << "hvd-bench: " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace

void declare_repetitions(CLI::App& app, RepetitionLimits& limits, const std::string& per) {
  app.add_option("--budget", limits.budget_seconds, per + ", unless --least takes longer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--least", limits.least, "Repetitions at least")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--most", limits.most, "Repetitions at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

void declare_gloo(CLI::App& app, std::string& path) {
  app.add_option("--gloo", path, "A file of gloo_peers.py whose results are printed too")
      ->type_name("FILE")
      ->check(CLI::ExistingFile);
}

}  // namespace hvd::bench

int main(int argc, char** argv) { return hvd::bench::run_main(argc, argv); }
