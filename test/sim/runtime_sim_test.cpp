// Tests the whole runtime over the in-process network, with ranks that one thread steps in virtual
// time, and with ranks as threads.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "sim/runtime_runs.h"
#include "support/float_operation.h"
#include "support/local_job.h"
#include "support/seeds.h"

namespace hvd::testing {
namespace {

TEST(RuntimeSimulation, AnyOrderAndDelayGiveTheRightNumbersOnEveryRank) {
  run_any_order_and_delay(seeds(100, 200), false);
}

TEST(RuntimeSimulation, AnyOrderAndDelayOverATree) {
  run_any_order_and_delay(seeds(100, 200), true);
}

TEST(RuntimeSimulation, LockedStepsGiveTheRightNumbersWhateverComesInBetween) {
  run_replayed_steps(Layout::kOneHost, seeds(300, 1000));
}

TEST(RuntimeSimulation, LockedStepsOfSeveralHostsDoToo) {
  run_replayed_steps(Layout::kHosts, seeds(150, 400));
}

TEST(RuntimeSimulation, LockedStepsOverATreeDoToo) {
  run_replayed_steps(Layout::kTree, seeds(150, 400));
}

TEST(RuntimeSimulation, LockedStepsOfOverlappingSetsDoToo) {
  run_replayed_steps(Layout::kOneHost, seeds(300, 1000), {}, /*sets=*/true);
}

TEST(RuntimeSimulation, StepsThatOverlapGiveTheRightNumbers) {
  run_overlapping_steps(seeds(1000, 10000));
}

TEST(RuntimeSimulation, SetsThatTheirMembersMakeAloneGiveTheRightNumbers) {
  run_member_sets(Layout::kOneHost, seeds(150, 1000));
}

TEST(RuntimeSimulation, SetsThatTheirMembersMakeAloneOnSeveralHostsDoToo) {
  run_member_sets(Layout::kHosts, seeds(100, 500));
}

TEST(RuntimeSimulation, SetsThatTheirMembersMakeAloneOverATreeDoToo) {
  run_member_sets(Layout::kTree, seeds(100, 500));
}

TEST(RuntimeSimulation, RanksAsThreads) { run_ranks_as_threads(seeds(100, 200)); }

TEST(RuntimeSimulation, SeveralThreadsOfARankWaitAtOnce) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, rank, thread] {
          for (int i = 0; i < 50; ++i) {
            std::vector<float> data(100, static_cast<float>(rank + 1));
            const Progress progress = i % 2 == 0 ? Progress::kCaller : Progress::kBackground;
            std::vector<Submission> one;
            one.push_back(float_operation(data, "thread" + std::to_string(thread)));
            const Operation operation = job.rank(rank).submit(std::move(one), progress).front();
            operation.wait();
            if (!operation.status().ok() || data[99] != 3.0F) ++wrong;
          }
        });
      }
    }
  }
  EXPECT_EQ(wrong, 0);
  job.shut_down();
}

}  // namespace
}  // namespace hvd::testing
