#include "bench/commands.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "bench/statistics.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "support/uniform_world.h"

namespace hvd::bench {
namespace {

/// The coordinator's cost of one round in which every rank reports the same tensors: medians of CPU
/// time in microseconds.
struct RoundCost {
  double accept_us = 0;  ///< decode and process all reports
  double decide_us = 0;  ///< decide, and encode the plan
  std::size_t report_bytes = 0;
  std::size_t plan_bytes = 0;
  int rounds = 0;
};
struct WorldCost {
  int ranks = 0;
  int tensors = 0;
  /// Levels of the tree below rank 0; 0: no tree, rank 0 exchanges messages with each rank.
  int depth = 0;
  /// Messages that rank 0 receives from other ranks in one round.
  int messages_received = 0;
  /// Messages received by the rank that receives the most, including its own report.
  int max_received = 0;
  RoundCost first = {};
  RoundCost cached = {};
};

/// CPU time of this thread only, so that other programs on the machine do not count.
double thread_cpu_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Sample {
  double accept = 0;
  double decide = 0;
  testing::UniformWorld::Round round = {};
};

Sample measure_round(testing::UniformWorld& world) {
  Sample sample;
  double begun = 0;
  double accepted = 0;
  testing::UniformWorld::Watch watch;
  watch.begin = [&] { begun = thread_cpu_seconds(); };
  watch.accepted = [&] { accepted = thread_cpu_seconds(); };
  watch.decided = [&] { sample.decide = thread_cpu_seconds() - accepted; };
  sample.round = world.round(watch);
  sample.accept = accepted - begun;
  return sample;
}

RoundCost summarize_rounds(const std::vector<Sample>& samples) {
  std::vector<double> accept;
  std::vector<double> decide;
  for (const Sample& sample : samples) {
    accept.push_back(sample.accept * 1e6);
    decide.push_back(sample.decide * 1e6);
  }
  const auto& last = samples.back().round;
  return {percentile(accept, 0.5), percentile(decide, 0.5), last.report_bytes, last.plan_bytes,
          static_cast<int>(samples.size())};
}

// The time of a first negotiation grows with ranks and tensors, so larger worlds are measured fewer
// times.
int worlds_to_measure(int ranks, int tensors) {
  return static_cast<int>(
      std::clamp<std::int64_t>(2'000'000 / (std::int64_t{ranks} * tensors), 3, 20));
}
constexpr int kCachedRounds = 20;
constexpr int kRanksPerHost = 8;
constexpr int kRadix = 32;

/// Runs the real Coordinator on reports of the real Negotiator. With a tree, the real Aggregators
/// merge the reports first. All ranks submit the same tensors.
/// @param tree whether to use an aggregation tree with eight ranks per host, as in jobs of more
/// than 33 ranks; otherwise every rank exchanges messages with rank 0
/// @throws std::runtime_error when the plans are wrong
WorldCost measure_world(int ranks, int tensors, bool tree) {
  const int worlds = worlds_to_measure(ranks, tensors);
  std::vector<Sample> first;
  std::vector<Sample> cached;
  for (int i = 0; i < worlds; ++i) {
    testing::UniformWorld world(ranks, kRanksPerHost, tree ? kRadix : 0, tensors);
    first.push_back(measure_round(world));
    if (i + 1 < worlds) continue;
    world.round();  // untimed: the first round that uses the caches
    for (int round = 0; round < kCachedRounds; ++round) cached.push_back(measure_round(world));
  }
  const auto& round = first.back().round;
  return {ranks,
          tensors,
          round.depth,
          static_cast<int>(round.root_received) - 1,
          static_cast<int>(round.max_received),
          summarize_rounds(first),
          summarize_rounds(cached)};
}

using Clock = std::chrono::steady_clock;

enum class Names { kNew, kSame };
enum class Waiting {
  kDrives,  ///< the caller waits and drives the engine itself
  kPolls,   ///< hvd's thread is woken; the caller polls and yields its core in between
  kSleeps,  ///< hvd's thread is woken; the caller sleeps until the callback wakes it
  kMpi,     ///< MPI_Allreduce, without hvd
};

struct Way {
  Names names;
  Waiting waiting;
  const char* label;
};
constexpr std::array<Way, 7> kWays = {{
    {Names::kNew, Waiting::kDrives, "new name, caller drives"},
    {Names::kSame, Waiting::kDrives, "same name, caller drives"},
    {Names::kNew, Waiting::kPolls, "new name, thread woken, caller polls"},
    {Names::kSame, Waiting::kPolls, "same name, thread woken, caller polls"},
    {Names::kNew, Waiting::kSleeps, "new name, thread woken, caller sleeps"},
    {Names::kSame, Waiting::kSleeps, "same name, thread woken, caller sleeps"},
    {Names::kSame, Waiting::kMpi, "MPI_Allreduce"},
}};
constexpr std::size_t kMpiWay = kWays.size() - 1;

/// Sums of metrics over the timed operations of one way.
struct Counts {
  double messages_sent = 0;
  double negotiated = 0;
  double cached = 0;
  double replayed = 0;
};

Counts operator-(const Metrics& after, const Metrics& before) {
  const auto difference = [](std::uint64_t a, std::uint64_t b) {
    return static_cast<double>(a - b);
  };
  return {difference(after.control_messages_sent, before.control_messages_sent),
          difference(after.negotiated_operations, before.negotiated_operations),
          difference(after.cached_operations, before.cached_operations),
          difference(after.locked_operations, before.locked_operations)};
}

class Latency {
 public:
  Latency(const Session& session, const ControlOptions& options)
      : session_(session), options_(options) {}

  /// Runs the ways in turns, in blocks that are long enough to reach a steady state.
  Json measure() {
    constexpr int kBlocks = 10;
    const int per_block = std::max(1, options_.repetitions / kBlocks);
    for (int block = 0; block < kBlocks; ++block) {
      for (std::size_t turn = 0; turn < kWays.size(); ++turn) {
        const std::size_t way = (turn + static_cast<std::size_t>(block)) % kWays.size();
        measure_block(way, per_block);
      }
    }
    for (auto& samples : samples_) session_.slowest(samples);
    Json rows = Json::array();
    for (std::size_t way = 0; way < kWays.size(); ++way) rows.push_back(row(way));
    return rows;
  }

 private:
  void measure_block(std::size_t way, int repetitions) {
    // Schedule replay starts only after some equal steps.
    constexpr int kWarmUps = 10;
    for (int i = 0; i < kWarmUps; ++i) once(kWays[way]);
    session_.align();
    const Metrics before = metrics();
    for (int i = 0; i < repetitions; ++i) samples_[way].push_back(once(kWays[way]));
    session_.align();
    const Counts counts = metrics() - before;
    Counts& total = counts_[way];
    total.messages_sent += counts.messages_sent;
    total.negotiated += counts.negotiated;
    total.cached += counts.cached;
    total.replayed += counts.replayed;
  }

  double once(const Way& way) {
    if (way.waiting == Waiting::kPolls || way.waiting == Waiting::kSleeps) {
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(options_.pause_ms));
    }
    data_ = {static_cast<float>(session_.rank()), 1};
    const std::string name = way.names == Names::kNew
                                 ? "control.new." + std::to_string(++names_used_)
                                 : std::string("control.same");
    session_.align();
    const auto begin = Clock::now();
    run(way, name);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (data_[1] != static_cast<float>(session_.size()))
      throw Error("hvd-bench: an allreduce of 8 bytes gave a wrong sum");
    return seconds;
  }

  void run(const Way& way, const std::string& name) {
    if (way.waiting == Waiting::kMpi) {
      MPI_Allreduce(MPI_IN_PLACE, data_.data(), static_cast<int>(data_.size()), MPI_FLOAT, MPI_SUM,
                    session_.peers());
      return;
    }
    std::atomic<bool> told{false};
    Submission submission;
    submission.name = name;
    submission.input = {reinterpret_cast<std::byte*>(data_.data()), 2, DataType::kFloat32, {}, {2}};
    submission.output = submission.input;
    if (way.waiting == Waiting::kSleeps) {
      submission.on_done = [&told](const Status&, const EventPtr&) {
        told.store(true);
        told.notify_one();
      };
    }
    const bool drives = way.waiting == Waiting::kDrives;
    const Operation operation =
        submit(std::move(submission), drives ? Progress::kCaller : Progress::kBackground);
    if (drives) operation.wait();
    if (way.waiting == Waiting::kSleeps) told.wait(false);
    // The callback runs shortly before the name is free again.
    while (!operation.done()) sched_yield();
    operation.status().raise_if_error();
  }

  Json row(std::size_t way) const {
    const Summary summary = summarize(samples_[way]);
    Json row;
    row["way"] = kWays[way].label;
    row["repetitions"] = summary.samples;
    row["p50_us"] = json_number(summary.p50 * 1e6);
    row["p95_us"] = json_number(summary.p95 * 1e6);
    row["p99_us"] = json_number(summary.p99 * 1e6);
    row["ratio_to_mpi"] = json_number(summary.p50 / percentile(samples_[kMpiWay], 0.5));
    const double operations = static_cast<double>(summary.samples);
    const Counts& counts = counts_[way];
    // The sum over the whole job. The other counts are equal on all ranks.
    row["control_messages_per_operation"] = session_.sum(counts.messages_sent) / operations;
    row["negotiated_per_operation"] = counts.negotiated / operations;
    row["cached_per_operation"] = counts.cached / operations;
    row["replayed_per_operation"] = counts.replayed / operations;
    row["locked_per_operation"] = row["replayed_per_operation"];  // the former name
    return row;
  }

  const Session& session_;
  const ControlOptions& options_;
  std::array<float, 2> data_ = {};
  int names_used_ = 0;
  std::array<std::vector<double>, kWays.size()> samples_;  // seconds
  std::array<Counts, kWays.size()> counts_ = {};
};

void print_latency(const Json& rows, std::ostream& out) {
  out << "\nallreduce of 8 bytes; counts per operation, messages of all ranks together\n";
  Table table({"way", "times", "p50 us", "p95 us", "p99 us", "/MPI", "messages", "negotiated",
               "cached", "replayed"});
  for (const Json& row : rows) {
    std::vector<std::string> cells = {row["way"], std::to_string(row["repetitions"].get<int>())};
    for (const char* key :
         {"p50_us", "p95_us", "p99_us", "ratio_to_mpi", "control_messages_per_operation",
          "negotiated_per_operation", "cached_per_operation", "replayed_per_operation"}) {
      cells.push_back(row[key].is_null() ? "-" : number_text(row[key].get<double>()));
    }
    table.add(std::move(cells));
  }
  table.print(out);
}

Json json_of(const RoundCost& cost) {
  return {{"accept_us", cost.accept_us},
          {"decide_us", cost.decide_us},
          {"cpu_us", cost.accept_us + cost.decide_us},
          {"report_bytes", cost.report_bytes},
          {"plan_bytes", cost.plan_bytes},
          {"rounds", cost.rounds}};
}

constexpr int kMaxRanksWithoutTree = 33;
/// Larger worlds are measured with a tree only, because rank 0 alone takes seconds for a round.
constexpr int kMaxRanksForComparison = 16384;

Json measure_worlds(const ControlOptions& options) {
  Json worlds = Json::array();
  for (const int ranks : options.worlds) {
    std::vector<WorldCost> costs;
    if (ranks <= kMaxRanksForComparison)
      costs.push_back(measure_world(ranks, options.tensors, /*tree=*/false));
    if (ranks > kMaxRanksWithoutTree)
      costs.push_back(measure_world(ranks, options.tensors, /*tree=*/true));
    for (const WorldCost& cost : costs) {
      worlds.push_back({{"ranks", cost.ranks},
                        {"tensors", cost.tensors},
                        {"tree_depth", cost.depth},
                        {"messages_received_per_round", cost.messages_received},
                        {"most_received_per_rank_and_round", cost.max_received},
                        {"first", json_of(cost.first)},
                        {"cached", json_of(cost.cached)}});
    }
  }
  return worlds;
}

void print_worlds(const Json& worlds, const ControlOptions& options, std::ostream& out) {
  out << "\ncoordinator, " << options.tensors
      << " tensors per rank: CPU time of one round at rank 0, and message sizes\n";
  Table table({"ranks", "tree", "messages in", "first us", "accept", "decide", "report B", "plan B",
               "cached us", "accept", "decide", "report B", "plan B"});
  for (const Json& world : worlds) {
    const int depth = world["tree_depth"].get<int>();
    std::vector<std::string> cells = {
        std::to_string(world["ranks"].get<int>()), depth == 0 ? "-" : std::to_string(depth),
        std::to_string(world["messages_received_per_round"].get<int>())};
    for (const char* round : {"first", "cached"}) {
      for (const char* key : {"cpu_us", "accept_us", "decide_us"})
        cells.push_back(number_text(world[round][key].get<double>()));
      for (const char* key : {"report_bytes", "plan_bytes"})
        cells.push_back(std::to_string(world[round][key].get<std::size_t>()));
    }
    table.add(std::move(cells));
  }
  table.print(out);
}

}  // namespace

Json run_control(const Session& session, const ControlOptions& options, std::ostream& out) {
  Json result;
  result["latency"] = options.repetitions > 0 ? Latency(session, options).measure() : Json::array();
  if (session.rank() == 0 && options.repetitions > 0) print_latency(result["latency"], out);
  result["worlds"] = session.rank() == 0 ? measure_worlds(options) : Json::array();
  if (session.rank() == 0 && !options.worlds.empty()) print_worlds(result["worlds"], options, out);
  // The other ranks sleep here meanwhile: unlike MPI's barrier, hvd's does not occupy their cores.
  barrier();
  return result;
}

}  // namespace hvd::bench
