#include "sim/runtime_runs.h"

#include <gtest/gtest.h>

#include <thread>

#include "sim/member_sets_program.h"
#include "sim/overlap_program.h"
#include "sim/runtime_program.h"

namespace hvd::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

int ranks_for(std::uint64_t seed) {
  constexpr int kSizes[] = {2, 3, 4, 5, 7, 8, 13, 16};
  if (seed % 50 == 49) return 64;
  return kSizes[seed % 8];
}

runtime::RuntimeOptions options_for(std::uint64_t seed) {
  runtime::RuntimeOptions options;
  options.background_thread = false;
  options.fusion_threshold = seed % 3 == 0 ? 2000 : 64 << 20;
  options.cache_capacity = seed % 4 == 0 ? 3 : 1024;  // 3: evicts all the time
  return options;
}

ProgramShape shape_for(std::uint64_t seed) {
  return {.joins = seed / 2 % 3 == 1, .sets = seed / 2 % 2 == 1};
}

/// Steps the job until the programs of all ranks have finished.
template <class Run>
void run_to_end(LocalJob& job, VirtualClock& clock, std::vector<Run>& runs, std::uint64_t seed) {
  std::string problem;
  const bool finished = job.run_until(clock, seconds(60), [&] {
    bool all = true;
    for (Run& run : runs) {
      run.go_on();
      all = all && run.finished();
      if (problem.empty()) problem = run.problem();
    }
    return all || !problem.empty();
  });
  ASSERT_EQ(problem, "") << "seed " << seed;
  ASSERT_TRUE(finished) << "seed " << seed << ": an operation hangs";
}

}  // namespace

// Hosts of one, two or three ranks in turn, so that a tree of radix 2 or 3 is deep and uneven.
std::vector<std::string> many_hosts(int ranks) {
  std::vector<std::string> hosts;
  for (int host = 0; static_cast<int>(hosts.size()) < ranks; ++host) {
    for (int i = 0; i <= host % 3 && static_cast<int>(hosts.size()) < ranks; ++i)
      hosts.push_back("host" + std::to_string(host));
  }
  return hosts;
}

namespace {

/// Whether all ranks have applied the same number of plans and, without other process sets, made
/// the same number of calls.
bool alike(LocalJob& job, bool sets) {
  const Metrics first = job.rank(0).metrics();
  for (int rank = 1; rank < job.size(); ++rank) {
    const Metrics other = job.rank(rank).metrics();
    if (other.plans_applied != first.plans_applied ||
        (!sets && other.backend_calls != first.backend_calls))
      return false;
  }
  return true;
}

}  // namespace

void run_any_order_and_delay(std::uint64_t count, bool tree, const MakeWorlds& make_worlds) {
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const int ranks = ranks_for(seed);
    VirtualClock clock;
    LocalJobOptions job_options{
        .size = ranks,
        .runtime = options_for(seed),
        .longest_delay = seed % 5 == 0 ? Duration(0) : Duration(milliseconds(2)),
        .seed = seed};
    if (tree) {
      job_options.hosts = many_hosts(ranks);
      job_options.runtime.control_radix = 2 + static_cast<int>(seed % 2);
    }
    if (make_worlds) job_options.world = make_worlds(job_options, clock);
    LocalJob job(job_options, clock);
    const RandomProgram program(seed, ranks, shape_for(seed));
    std::vector<ProgramRun> runs;
    for (int rank = 0; rank < ranks; ++rank) runs.emplace_back(program, job.rank(rank), rank, seed);
    // A rank begins its next step as soon as its own operations are done, so ranks are up to one
    // step apart.
    for (ProgramRun& run : runs) run.submit_next();
    const bool finished = job.run_until(clock, seconds(60), [&] {
      bool all = true;
      for (ProgramRun& run : runs) {
        if (!run.done()) {
          all = false;
        } else if (!run.finished()) {
          EXPECT_EQ(run.check(), "") << "seed " << seed;
          run.submit_next();
          all = false;
        }
      }
      return all;
    });
    ASSERT_TRUE(finished) << "seed " << seed << ": an operation hangs";
    for (const ProgramRun& run : runs) EXPECT_EQ(run.check(), "") << "seed " << seed;
    // A joined rank may still take part in operations that the others have finished.
    job.run_until(clock, seconds(1), [&] { return alike(job, !program.sets().empty()); });
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(job.rank(rank).metrics().plans_applied, job.rank(0).metrics().plans_applied)
          << "seed " << seed;
      if (!program.sets().empty()) continue;  // ranks outside a set make fewer calls
      EXPECT_EQ(job.rank(rank).metrics().backend_calls, job.rank(0).metrics().backend_calls)
          << "seed " << seed;
    }
    if (::testing::Test::HasFailure()) return;
  }
}

// Tests schedule replay with steps that repeat, and with deviations at random moments: operations
// that are not in every step, joins, other orders.
void run_replayed_steps(Layout layout, std::uint64_t count, const MakeWorlds& make_worlds,
                        bool sets) {
  std::uint64_t replayed = 0, negotiated = 0;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const int ranks = (layout == Layout::kTree ? 4 : 2) + static_cast<int>(seed % 4);
    VirtualClock clock;
    runtime::RuntimeOptions options = options_for(seed);
    options.cache_capacity = seed % 16 == 0 ? 3 : 1024;
    LocalJobOptions job_options{
        .size = ranks,
        .runtime = options,
        .longest_delay = seed % 5 == 0 ? Duration(0) : Duration(milliseconds(2)),
        .seed = seed};
    if (layout != Layout::kOneHost) job_options.hosts = many_hosts(ranks);
    job_options.runtime.control_radix =
        layout == Layout::kTree ? 2 + static_cast<int>(seed % 2) : 0;
    if (make_worlds) job_options.world = make_worlds(job_options, clock);
    LocalJob job(job_options, clock);
    const RandomProgram program(seed, ranks,
                                {.joins = seed % 3 == 1, .sets = sets, .steady = true});
    std::vector<ProgramRun> runs;
    for (int rank = 0; rank < ranks; ++rank) runs.emplace_back(program, job.rank(rank), rank, seed);
    const bool finished = job.run_until(clock, seconds(60), [&] {
      bool all = true;
      for (ProgramRun& run : runs) {
        if (run.done() && !run.finished()) {
          EXPECT_EQ(run.check(), "") << "seed " << seed;
          run.submit_next();
        }
        all = all && run.done() && run.finished();
      }
      return all;
    });
    ASSERT_TRUE(finished) << "seed " << seed << ": an operation hangs";
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(runs[static_cast<std::size_t>(rank)].check(), "") << "seed " << seed;
      // A rank that has joined, or is outside a set, is absent from some operations.
      if (program.joins() || sets) continue;
      EXPECT_EQ(job.rank(rank).metrics().locked_operations, job.rank(0).metrics().locked_operations)
          << "seed " << seed;
    }
    replayed += job.rank(0).metrics().locked_operations;
    negotiated += job.rank(0).metrics().negotiated_operations;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(replayed, negotiated / 2) << "the lock was hardly tried";
}

// The results show whether all ranks leave a replay at the same position. If a use is skipped,
// counted twice or mixed up with a use of another step, results are wrong or the program never
// ends.
void run_overlapping_steps(std::uint64_t count) {
  std::uint64_t replayed = 0;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 3);
    VirtualClock clock;
    LocalJobOptions options{
        .size = ranks,
        .longest_delay = seed % 5 == 0 ? Duration(0) : Duration(milliseconds(2)),
        .seed = seed};
    options.runtime.background_thread = false;
    options.runtime.fusion_threshold = seed % 2 == 0 ? 40 : 64 << 20;
    if (seed / 3 % 3 == 1) options.hosts = many_hosts(ranks);
    if (seed / 3 % 6 == 4) options.runtime.control_radix = 2;
    LocalJob job(options, clock);
    const OverlapProgram program(seed, ranks);
    std::vector<OverlapRun> runs;
    for (int rank = 0; rank < ranks; ++rank) {
      runs.emplace_back(program, job.rank(rank), rank, seed);
      runs.back().submit_set();
    }
    ASSERT_NO_FATAL_FAILURE(run_to_end(job, clock, runs, seed));
    replayed += job.rank(0).metrics().locked_operations;
  }
  EXPECT_GT(replayed, count * 10) << "hardly anything was replayed";
}

// A set that waits for ever, or a plan that some rank cannot apply, ends the run with an error.
void run_member_sets(Layout layout, std::uint64_t count) {
  std::uint64_t replayed = 0;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const int ranks = (layout == Layout::kTree ? 4 : 2) + static_cast<int>(seed % 5);
    VirtualClock clock;
    LocalJobOptions options{
        .size = ranks,
        .runtime = options_for(seed),
        .longest_delay = seed % 5 == 0 ? Duration(0) : Duration(milliseconds(2)),
        .seed = seed};
    if (layout != Layout::kOneHost) options.hosts = many_hosts(ranks);
    options.runtime.control_radix = layout == Layout::kTree ? 2 + static_cast<int>(seed % 2) : 0;
    LocalJob job(options, clock);
    const MemberSetsProgram program(seed, ranks);
    std::map<std::size_t, std::int64_t> numbers;
    std::vector<MemberSetsRun> runs;
    for (int rank = 0; rank < ranks; ++rank)
      runs.emplace_back(program, job.rank(rank), rank, seed, numbers);
    ASSERT_NO_FATAL_FAILURE(run_to_end(job, clock, runs, seed));
    replayed += job.rank(0).metrics().locked_operations;
  }
  EXPECT_GT(replayed, count * 10) << "hardly anything was replayed";
}

void run_ranks_as_threads(std::uint64_t count, const MakeWorlds& make_worlds) {
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 4);
    const SteadyClock clock;
    runtime::RuntimeOptions options = options_for(seed);
    options.background_thread = true;
    LocalJobOptions job_options{
        .size = ranks,
        .runtime = options,
        .longest_delay = seed % 2 == 0 ? Duration(0) : Duration(microseconds(300)),
        .seed = seed};
    if (make_worlds) {
      if (seed % 3 == 2) job_options.hosts = many_hosts(ranks);
      job_options.world = make_worlds(job_options, clock);
    }
    LocalJob job(job_options, clock);
    const RandomProgram program(
        seed, ranks,
        seed % 2 == 0 ? shape_for(seed) : ProgramShape{.joins = seed % 3 == 1, .steady = true});
    std::vector<std::string> problems(static_cast<std::size_t>(ranks));
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
          ProgramRun run(program, job.rank(rank), rank, seed);
          while (!run.finished()) {
            run.submit_next();
            run.wait();
            auto& problem = problems[static_cast<std::size_t>(rank)];
            if (problem.empty()) problem = run.check();
          }
          job.leave(rank);
        });
      }
    }
    for (const auto& problem : problems) EXPECT_EQ(problem, "") << "seed " << seed;
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace hvd::testing
