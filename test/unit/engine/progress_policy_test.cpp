#include "engine/progress_policy.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

TEST(ProgressPolicy, AutomaticallyInlineWhenARankHasLessThanTwoCores) {
  EXPECT_TRUE(runtime::choose_progress_policy(ProgressMode::kInline, 1).inline_progress);
  EXPECT_FALSE(runtime::choose_progress_policy(ProgressMode::kBackground, 1000).inline_progress);
  EXPECT_TRUE(runtime::choose_progress_policy(ProgressMode::kAuto, 1'000'000).inline_progress);
  EXPECT_FALSE(runtime::choose_progress_policy(ProgressMode::kAuto, 1'000'000).spins)
      << "the others need the core";
  EXPECT_EQ(runtime::describe({true, false}, 1'000'000),
            "inline progress, less than one core per rank");
}

TEST(ProgressPolicy, AQuotaOfCgroupsIsSharedByTheRanks) {
  EXPECT_TRUE(runtime::choose_progress_policy(ProgressMode::kAuto, 1, 1.5).inline_progress);
  EXPECT_TRUE(runtime::choose_progress_policy(ProgressMode::kAuto, 1, 1.5).spins);
  EXPECT_FALSE(runtime::choose_progress_policy(ProgressMode::kAuto, 1, 0.5).spins)
      << "the kernel would take the time away from the step";
  EXPECT_EQ(runtime::describe({true, false}, 2, 1.0),
            "inline progress, less than one core per rank");
}

TEST(ProgressPolicy, ARankThatIsBoundToACoreHasThatCore) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  if (CPU_COUNT(&before) < 2) GTEST_SKIP() << "needs two cores";
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const runtime::ProgressPolicy bound = runtime::choose_progress_policy(ProgressMode::kAuto, 2);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  EXPECT_TRUE(bound.inline_progress);
  EXPECT_TRUE(bound.spins);
}

TEST(PollInterval, GrowsToALimitThatDependsOnThePurpose) {
  using runtime::PollFor;
  using std::chrono::microseconds;
  for (const PollFor purpose : {PollFor::kReplayedLaunch, PollFor::kTransfer, PollFor::kMessages}) {
    EXPECT_EQ(runtime::poll_interval(purpose, 0), microseconds(20));
    EXPECT_EQ(runtime::poll_interval(purpose, 4), microseconds(40));
  }
  EXPECT_EQ(runtime::poll_interval(PollFor::kReplayedLaunch, 1000), microseconds(50));
  EXPECT_EQ(runtime::poll_interval(PollFor::kTransfer, 1000), microseconds(100));
  EXPECT_EQ(runtime::poll_interval(PollFor::kMessages, 1000), microseconds(1000));
}

/// A job of one rank, in which any driver can complete an operation.
class InlineProgress : public ::testing::Test {
 protected:
  static LocalJobOptions options(ProgressMode mode) {
    LocalJobOptions options{.size = 1};
    options.runtime.progress = mode;
    return options;
  }
  std::vector<float> memory_ = {1, 2};
  const SteadyClock clock_{};
};

TEST_F(InlineProgress, TheSubmittingThreadMakesProgress) {
  LocalJob job(options(ProgressMode::kInline), clock_);
  // The engine thread may be driving at first; it sleeps soon.
  bool done = false;
  for (int attempt = 0; attempt < 200 && !done; ++attempt) {
    const Operation operation = submit_one(job.rank(0), float_operation(memory_, "x"));
    done = operation.done();
    operation.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(done);
  job.shut_down();
}

TEST_F(InlineProgress, ACallbackIsNotMadeFromInsideSubmit) {
  LocalJob job(options(ProgressMode::kInline), clock_);
  for (int i = 0; i < 100; ++i) {
    std::thread::id called_by;
    Submission submission = float_operation(memory_, "x");
    submission.on_done = [&called_by](const Status&, const EventPtr&) {
      called_by = std::this_thread::get_id();
    };
    const Operation operation = submit_one(job.rank(0), std::move(submission));
    while (!operation.done()) std::this_thread::yield();
    EXPECT_NE(called_by, std::thread::id());
    EXPECT_NE(called_by, std::this_thread::get_id());
  }
  job.shut_down();
}

}  // namespace
}  // namespace hvd::testing
