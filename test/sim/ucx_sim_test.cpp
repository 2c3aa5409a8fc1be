// Runs the whole runtime over the carrier of UCX, with the schedules of runtime_sim_test. The
// connections of the simulated workers have random delays and break at random moments. One test
// uses the real UCX, with ranks as threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "sim/runtime_program.h"
#include "sim/runtime_runs.h"
#include "support/fake_ucx_network.h"
#include "support/seeds.h"
#include "support/ucx_worlds.h"
#include "transport/ucx/worker.h"

namespace hvd::testing {
namespace {

using std::chrono::microseconds;

std::shared_ptr<FakeUcxNetwork> network_of(const LocalJobOptions& options, const Clock& clock) {
  return FakeUcxNetwork::create({.size = options.size,
                                 .longest_delay = options.longest_delay,
                                 .seed = options.seed,
                                 // A held message leaves when its rank next makes progress, which
                                 // takes a while when ranks are threads.
                                 .holds_one_of = options.runtime.background_thread ? 100U : 3U},
                                clock);
}

std::function<RankWorld(int)> worlds_on(FakeUcxNetwork& network, const LocalJobOptions& options) {
  std::vector<ucx::Workers> workers;
  for (int rank = 0; rank < options.size; ++rank) workers.push_back(network.workers(rank));
  if (options.runtime.background_thread) return worlds_over_ucx(std::move(workers), options.hosts);
  // The ranks must not block, because a waiting rank would prevent the others from answering.
  return worlds_over_ucx(std::move(workers), options.hosts, Duration(0));
}

std::function<RankWorld(int)> simulated(const LocalJobOptions& options, const Clock& clock) {
  return worlds_on(*network_of(options, clock), options);
}

TEST(UcxSimulation, AnyOrderAndDelayGiveTheRightNumbersOnEveryRank) {
  run_any_order_and_delay(seeds(24, 200), false, simulated);
}

TEST(UcxSimulation, AnyOrderAndDelayOverATree) {
  run_any_order_and_delay(seeds(24, 200), true, simulated);
}

TEST(UcxSimulation, LockedStepsGiveTheRightNumbersWhateverComesInBetween) {
  run_replayed_steps(Layout::kOneHost, seeds(40, 400), simulated);
}

TEST(UcxSimulation, LockedStepsOfSeveralHostsDoToo) {
  run_replayed_steps(Layout::kHosts, seeds(40, 400), simulated);
}

TEST(UcxSimulation, LockedStepsOverATreeDoToo) {
  run_replayed_steps(Layout::kTree, seeds(40, 400), simulated);
}

TEST(UcxSimulation, RanksAsThreads) { run_ranks_as_threads(seeds(30, 200), simulated); }

#if HVD_HAVE_UCX
TEST(UcxSimulation, RanksAsThreadsOverTheRealUcx) {
  run_ranks_as_threads(seeds(12, 100), [](const LocalJobOptions& options, const Clock&) {
    std::vector<ucx::Workers> workers;
    for (int rank = 0; rank < options.size; ++rank) workers.push_back(ucx::open_workers());
    return worlds_over_ucx(std::move(workers), options.hosts);
  });
}
#endif

enum class Fault { kDeath, kCut };

/// A job of threads in which a rank dies, or the connections between two break, at some moment.
class FaultyJob {
 public:
  FaultyJob(std::uint64_t seed, Fault fault, const Clock& clock)
      : seed_(seed),
        fault_(fault),
        random_(seed),
        options_(options_of(seed, fault)),
        network_(network_of(options_, clock)),
        program_(seed, options_.size, {.steady = true}),
        victim_(static_cast<int>(random_() % static_cast<unsigned>(options_.size))),
        other_(
            (victim_ + 1 + static_cast<int>(random_() % static_cast<unsigned>(options_.size - 1))) %
            options_.size),
        ends_(static_cast<std::size_t>(options_.size)) {
    options_.world = worlds_on(*network_, options_);
    job_ = std::make_unique<LocalJob>(options_, clock);
  }

  /// Runs until all ranks have ended. @return a description of the error; empty without an error
  std::string run();

 private:
  /// How a rank has ended.
  struct End {
    Status failure = {};
    std::string problem = {};
  };
  static LocalJobOptions options_of(std::uint64_t seed, Fault);
  void run_rank(int rank);
  void strike();
  bool may_say(int rank, const Status& failure) const;

  const std::uint64_t seed_;
  const Fault fault_;
  std::mt19937_64 random_;
  LocalJobOptions options_;
  const std::shared_ptr<FakeUcxNetwork> network_;
  const RandomProgram program_;
  const int victim_;
  const int other_;
  std::unique_ptr<LocalJob> job_;
  std::vector<End> ends_;  // each written by its rank's thread
};

LocalJobOptions FaultyJob::options_of(std::uint64_t seed, Fault fault) {
  LocalJobOptions options{
      .size = 3 + static_cast<int>(seed % 3), .longest_delay = microseconds(200), .seed = seed};
  options.runtime.peer_timeout = std::chrono::seconds(4);
  // On one host a rank learns from the operating system that another process has ended. Ranks are
  // threads here, so a death is simulated across hosts only.
  const bool one_host = fault == Fault::kCut && seed % 2 == 1;
  for (int rank = 0; rank < options.size; ++rank)
    options.hosts.push_back("host" + std::to_string(one_host ? 0 : rank));
  return options;
}

void FaultyJob::run_rank(int rank) {
  runtime::Runtime& runtime = job_->rank(rank);
  End& end = ends_[static_cast<std::size_t>(rank)];
  try {
    for (int repeated = 0; repeated < 20; ++repeated) {
      ProgramRun run(program_, runtime, rank, seed_);
      while (!run.finished()) {
        run.submit_next();
        run.wait();
        if (runtime.failed()) break;
        if (end.problem.empty()) end.problem = run.check();
      }
    }
  } catch (const Error&) {  // an operation was submitted after the failure
  }
  if (runtime.failed()) end.failure = runtime.failure();
  job_->leave(rank);
  network_->end(rank);  // the rank's process ends
}

void FaultyJob::strike() {
  std::this_thread::sleep_for(microseconds(random_() % 30'000));
  if (fault_ == Fault::kCut) return network_->cut(victim_, other_);
  network_->kill(victim_);
}

bool FaultyJob::may_say(int rank, const Status& failure) const {
  if (failure.ok()) return true;  // the fault came too late
  if (failure.code != StatusCode::kPeerLost) return false;
  return failure.rank == victim_ || (fault_ == Fault::kCut && failure.rank == other_) ||
         (fault_ == Fault::kDeath && rank == victim_);
}

std::string FaultyJob::run() {
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < options_.size; ++rank)
      threads.emplace_back([this, rank] { run_rank(rank); });
    strike();
  }
  std::string wrong;
  for (int rank = 0; rank < options_.size; ++rank) {
    const End& end = ends_[static_cast<std::size_t>(rank)];
    if (!end.problem.empty()) wrong += end.problem + "\n";
    if (!may_say(rank, end.failure)) {
      wrong += "rank " + std::to_string(rank) + " of " + std::to_string(options_.size) +
               " reports: " + end.failure.message + " (" + std::to_string(end.failure.rank) +
               "); expected rank " + std::to_string(victim_) + " or " + std::to_string(other_) +
               "\n";
    }
  }
  return wrong;
}

void run_faults(Fault fault, std::uint64_t count) {
  const SteadyClock clock;
  constexpr std::uint64_t kAtOnce = 8;  // the jobs mostly wait
  for (std::uint64_t first = 0; first < count; first += kAtOnce) {
    std::vector<std::unique_ptr<FaultyJob>> jobs;
    for (std::uint64_t seed = first; seed < std::min(first + kAtOnce, count); ++seed)
      jobs.push_back(std::make_unique<FaultyJob>(seed, fault, clock));
    std::vector<std::string> wrong(jobs.size());
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < jobs.size(); ++i)
        threads.emplace_back([&, i] { wrong[i] = jobs[i]->run(); });
    }
    for (std::size_t i = 0; i < jobs.size(); ++i) EXPECT_EQ(wrong[i], "") << "seed " << first + i;
  }
}

TEST(UcxSimulation, ThreadsThatLoseARankNameIt) { run_faults(Fault::kDeath, seeds(8, 120)); }

TEST(UcxSimulation, ThreadsWhoseConnectionBreaksNameAnEndOfIt) {
  run_faults(Fault::kCut, seeds(8, 120));
}

}  // namespace
}  // namespace hvd::testing
