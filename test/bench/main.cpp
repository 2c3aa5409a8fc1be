// hvd-bench: what hvd costs, beside what it competes with, measured in the same processes. docs/benchmarks.md.
#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "bench/collectives.h"
#include "bench/control.h"
#include "bench/report.h"
#include "bench/session.h"

namespace hvd::bench {
namespace {

struct CommandLine {
  SessionOptions session;
  CollectivesOptions collectives;
  ControlOptions control;
  std::string json_path;
};

const std::vector<OpKind> kAllKinds = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast, OpKind::kReducescatter,
                                       OpKind::kAlltoall};

const std::map<std::string, OpKind>& kinds_by_name() {
  static const std::map<std::string, OpKind> kinds = [] {
    std::map<std::string, OpKind> names;
    for (const OpKind kind : kAllKinds) names[std::string(to_string(kind))] = kind;
    return names;
  }();
  return kinds;
}

void declare_collectives(CLI::App& app, CollectivesOptions& options) {
  const CLI::AsSizeValue size(/*kb_is_1000=*/false);
  constexpr std::size_t kLargest = std::size_t{4} << 30;  // MPI counts elements in an int
  app.add_option("--min", options.lowest_bytes, "Smallest size, as 4 or 64KiB")->transform(size)->capture_default_str();
  app.add_option("--max", options.highest_bytes, "Largest size")
      ->transform(size)
      ->check(CLI::Range(std::size_t{1}, kLargest))
      ->capture_default_str();
  app.add_option("--factor", options.factor, "From one size to the next")
      ->check(CLI::Range(std::size_t{2}, std::size_t{1024}))
      ->capture_default_str();
  options.kinds = kAllKinds;
  app.add_option("--kinds", options.kinds, "Which operations; default: all")
      ->delimiter(',')
      ->transform(CLI::CheckedTransformer(kinds_by_name()));
  app.add_option("--budget", options.repetitions.budget_seconds, "Seconds per operation and size, unless --least takes longer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--least", options.repetitions.least, "Repetitions at least")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--most", options.repetitions.most, "Repetitions at most")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--progress", options.progress, "Who drives the engine: the caller, or hvd's thread until the caller waits")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Progress>{{"caller", Progress::kCaller}, {"background", Progress::kBackground}}));
}

void declare_control(CLI::App& app, ControlOptions& options) {
  app.add_option("--repetitions", options.repetitions, "Timed operations per way; 0: no latencies")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--pause", options.pause_ms, "Milliseconds of rest before an operation that wakes a thread")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--worlds", options.worlds, "Numbers of ranks to simulate; 0: none")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--tensors", options.tensors, "Tensors per simulated rank")->check(CLI::Range(1, 1024))->capture_default_str();
}

void declare(CLI::App& app, CommandLine& line) {
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--json", line.json_path, "Also write the results there")->type_name("FILE");
  app.add_flag("--retain-heap", line.session.retain_heap, "Have malloc keep freed memory, which spares MPI's buffers page faults");
  app.add_flag("--plain-mpi", line.session.plain_mpi, "Start MPI with its own defaults instead of hvd's settings");
  app.footer("Start it under hvdrun or mpirun. docs/benchmarks.md says how to read the columns.");
  declare_collectives(*app.add_subcommand("collectives", "Time, bandwidth and ratios to the peers by size"), line.collectives);
  declare_control(*app.add_subcommand("control", "Latency of an allreduce of 8 bytes; cost of the coordinator in large worlds"),
                  line.control);
}

int measure(const Session& session, const CLI::App& app, const CommandLine& line) {
  // Rather now than after minutes of measuring.
  if (session.rank() == 0 && !line.json_path.empty()) write_json(line.json_path, Json::object());
  const Json environment = session.describe();
  if (session.rank() == 0) print_description(environment, std::cout);
  const bool collectives = app.got_subcommand("collectives");
  Json result = collectives ? run_collectives(session, line.collectives, std::cout) : run_control(session, line.control, std::cout);
  const bool correct = result.value("correct", true);
  if (session.rank() == 0) {
    Json document = {{"command", collectives ? "collectives" : "control"}, {"environment", environment}};
    document["load_average_after"] = session.describe()["load_average"];
    document.update(result);
    std::cout << "\n# load_average after: " << document["load_average_after"].dump() << std::endl;
    if (!line.json_path.empty()) write_json(line.json_path, document);
  }
  return correct ? 0 : 1;
}

int run(const CLI::App& app, CommandLine& line) {
  std::erase(line.control.worlds, 0);
  const Session session(line.session);
  try {
    return measure(session, app, line);
  } catch (const std::exception& error) {
    std::cerr << "hvd-bench: " << error.what() << std::endl;
    // The other ranks wait for this one inside MPI, which cannot be told otherwise.
    MPI_Abort(session.peers(), 1);
    return 1;
  }
}

int run_main(int argc, char** argv) {
  CLI::App app("Measures hvd beside what it competes with, in the same processes.", "hvd-bench");
  CommandLine line;
  declare(app, line);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(app, line);
  } catch (const std::exception& error) {
    std::cerr << "hvd-bench: " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace
}  // namespace hvd::bench

int main(int argc, char** argv) { return hvd::bench::run_main(argc, argv); }
