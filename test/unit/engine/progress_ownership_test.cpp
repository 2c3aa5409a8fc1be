// Which thread drives an engine, which one a ring wakes, and when waits end: the cases that need
// threads. The order of events is in test/models/progress_ownership.pml.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <future>
#include <thread>

#include "hvd/background.h"
#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

/// While this object lives, this thread and all threads that it starts share one core.
class OneCore {
 public:
  OneCore() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core) {
      if (CPU_ISSET(core, &before_)) CPU_SET(core, &one);
    }
    sched_setaffinity(0, sizeof one, &one);
  }
  ~OneCore() { sched_setaffinity(0, sizeof before_, &before_); }
  OneCore(const OneCore&) = delete;
  OneCore& operator=(const OneCore&) = delete;

 private:
  cpu_set_t before_;
};

Duration time_of(const std::function<void()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  act();
  return std::chrono::steady_clock::now() - begin;
}

bool done_within(const Operation& operation, Duration timeout) {
  const auto limit = std::chrono::steady_clock::now() + timeout;
  while (!operation.done() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(milliseconds(1));
  return operation.done();
}

// A rank has submitted A and B, waits for A, and then computes. Only its engine thread can continue
// with B, and other hosts cannot ring. On one core the engine thread runs as soon as the waiter has
// woken it.
TEST(ProgressOwnership, AfterAWaiterHasLeftTheEngineThreadDrives) {
  const OneCore core;
  const SteadyClock clock;
  for (const ProgressMode progress : {ProgressMode::kBackground, ProgressMode::kInline}) {
    LocalJobOptions options;
    options.hosts = {"a", "b"};
    options.rings_across_hosts = false;
    options.runtime.schedule_lock = false;
    options.runtime.progress = progress;
    options.runtime.peer_timeout =
        seconds(300);  // an idle engine thread sleeps for an eighth of it
    LocalJob job(options, clock);
    std::vector<std::vector<float>> a(2, std::vector<float>(64, 1));
    std::vector<std::vector<float>> b(2, std::vector<float>(64, 1));
    for (int i = 0; i < 30; ++i) {
      const Operation later = submit_one(job.rank(0), float_operation(b[0], "B"));
      std::jthread other(
          [&] { submit_one(job.rank(1), float_operation(a[1], "A"), Progress::kCaller).wait(); });
      submit_one(job.rank(0), float_operation(a[0], "A"), Progress::kCaller).wait();
      other.join();
      const Operation others = submit_one(job.rank(1), float_operation(b[1], "B"));
      ASSERT_TRUE(done_within(later, seconds(5))) << "no thread of rank 0 drives, round " << i;
      ASSERT_TRUE(done_within(others, seconds(5))) << "no thread of rank 1 drives, round " << i;
    }
    job.shut_down();
  }
}

// The submission of a thread that is about to wait does not ring the doorbell.
TEST(ProgressOwnership, AThreadThatIsToWaitRingsForTheOneThatDrives) {
  const SteadyClock clock;
  LocalJobOptions options;
  options.runtime.schedule_lock = false;
  LocalJob job(options, clock);
  const auto plane = job.network().plane(1);
  Doorbell& doorbell = plane->doorbell();
  constexpr std::size_t kThreads = 10;
  std::vector<std::vector<float>> data(2 * kThreads, std::vector<float>(4, 1));
  const auto run = [&](int rank, std::size_t i) {
    std::vector<float>& memory = data[static_cast<std::size_t>(rank) * kThreads + i];
    submit_one(job.rank(rank), float_operation(memory, "w" + std::to_string(i)), Progress::kCaller)
        .wait();
  };
  std::vector<std::jthread> waiting;
  std::size_t begun = 0;
  const auto one_more_waits = [&] { waiting.emplace_back([&run, i = begun++] { run(1, i); }); };
  one_more_waits();
  while (!job.rank(1).has_waiters()) std::this_thread::sleep_for(milliseconds(1));
  // Rank 0 sends no message meanwhile. The next waiter rarely arrives at a moment in which no
  // thread drives the progress.
  const std::uint32_t before = doorbell.ticket();
  while (doorbell.ticket() == before && begun < kThreads) {
    one_more_waits();
    for (int i = 0; i < 300 && doorbell.ticket() == before; ++i)
      std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_NE(doorbell.ticket(), before);
  for (std::size_t i = 0; i < begun; ++i) run(0, i);
  waiting.clear();
  job.shut_down();
}

TEST(ProgressOwnership, ShutdownEndsInTimeThoughAnotherThreadDrives) {
  const SteadyClock clock;
  LocalJobOptions options;
  options.runtime.stall_shutdown = seconds(4);  // when the operation would end by itself
  LocalJob job(options, clock);
  std::vector<float> data(4, 1);
  const Operation never = submit_one(job.rank(0), float_operation(data, "never"));
  std::jthread waits([&] { never.wait(); });
  while (!job.rank(0).has_waiters()) std::this_thread::sleep_for(milliseconds(1));
  const Duration took = time_of([&] { EXPECT_FALSE(job.rank(0).shutdown(milliseconds(200))); });
  EXPECT_GE(took, milliseconds(200));
  EXPECT_LT(took, seconds(2));
  waits.join();
  EXPECT_EQ(never.status().code, StatusCode::kShutdown);
  EXPECT_THROW(submit_one(job.rank(0), float_operation(data, "late")), ShutdownError);
  EXPECT_FALSE(job.rank(0).shutdown(seconds(60))) << "once more, at once";
}

TEST(WaitFor, ReturnsInTimeAndTheOperationContinues) {
  const SteadyClock clock;
  for (const ProgressMode progress : {ProgressMode::kBackground, ProgressMode::kInline}) {
    LocalJobOptions options;
    options.runtime.progress = progress;
    LocalJob job(options, clock);
    std::vector<std::vector<float>> data = {{1, 2}, {3, 4}};
    const Operation early = submit_one(job.rank(0), float_operation(data[0], "w"));
    EXPECT_FALSE(early.wait_for(seconds(0)));
    const Duration took = time_of([&] { EXPECT_FALSE(early.wait_for(milliseconds(50))); });
    EXPECT_GE(took, milliseconds(50));
    EXPECT_FALSE(early.wait_for(seconds(-1)));
    const Operation late = submit_one(job.rank(1), float_operation(data[1], "w"));
    EXPECT_TRUE(late.wait_for(seconds(60)));
    EXPECT_TRUE(early.wait_for(std::chrono::nanoseconds::max())) << "no limit";
    EXPECT_TRUE(early.status().ok()) << early.status().message;
    EXPECT_TRUE(early.wait_for(seconds(0)));
    EXPECT_THAT(data[0], ::testing::ElementsAre(4, 6));
    job.shut_down();
  }
}

// A submission with Progress::kCaller wakes no thread, because the waiter drives the engine.
TEST(WaitFor, DrivesTheEngineAndHandsItOverWhenTheTimeIsUp) {
  const SteadyClock clock;
  LocalJobOptions options;
  options.runtime.peer_timeout = seconds(300);  // an idle engine thread sleeps for an eighth
  LocalJob job(options, clock);
  std::vector<std::vector<float>> data(2, std::vector<float>(4, 1));
  for (int i = 0; i < 20; ++i) {
    const Operation first =
        submit_one(job.rank(0), float_operation(data[0], "w"), Progress::kCaller);
    EXPECT_FALSE(first.wait_for(i % 2 == 0 ? milliseconds(0) : milliseconds(2)));
    const Operation second =
        submit_one(job.rank(1), float_operation(data[1], "w"), Progress::kCaller);
    ASSERT_TRUE(second.wait_for(seconds(30)));
    ASSERT_TRUE(done_within(first, seconds(30))) << "no thread of rank 0 drives, round " << i;
  }
  job.shut_down();
}

// All ranks wait, some only for a limited time, after which they continue by themselves.
TEST(WaitFor, ARankThatWaitsForAWhileIsNoPartOfADeadlock) {
  const SteadyClock clock;
  LocalJobOptions options;
  options.runtime.deadlock_timeout = milliseconds(100);
  LocalJob job(options, clock);
  std::vector<std::vector<float>> data(4, std::vector<float>(1, 1));
  const Operation ours = submit_one(job.rank(0), float_operation(data[0], "a"));
  const Operation theirs = submit_one(job.rank(1), float_operation(data[1], "b"));
  std::jthread waits([&] { ours.wait(); });
  EXPECT_FALSE(theirs.wait_for(milliseconds(700)));
  EXPECT_FALSE(ours.done()) << ours.status().message;
  const Operation one = submit_one(job.rank(1), float_operation(data[2], "a"));
  const Operation other = submit_one(job.rank(0), float_operation(data[3], "b"));
  EXPECT_TRUE(theirs.wait_for(seconds(60)));
  waits.join();
  for (const Operation& operation : {ours, theirs, one, other}) {
    operation.wait();
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  }
  job.shut_down();
}

TEST(WaitFor, AnEmptyHandleIsRefusedAndAFailureEndsIt) {
  EXPECT_THROW((void)Operation().wait_for(seconds(1)), UsageError);
  const SteadyClock clock;
  LocalJob job({}, clock);
  std::vector<float> data(4, 1);
  const Operation never = submit_one(job.rank(0), float_operation(data, "never"));
  std::jthread fails([&] {
    while (!job.rank(0).has_waiters()) std::this_thread::sleep_for(milliseconds(1));
    job.rank(0).abort({StatusCode::kPeerLost, "rank 1 is gone", 1});
  });
  EXPECT_TRUE(never.wait_for(seconds(60)));
  EXPECT_EQ(never.status().code, StatusCode::kPeerLost);
}

/// Lets another thread act whenever this one reads the time.
class InterruptedClock final : public Clock {
 public:
  TimePoint now() const noexcept override {
    if (std::this_thread::get_id() == of_.load() && ++calls_ == 2) act_();
    return clock_.now();
  }
  /// Acts when the calling thread reads the time for the second time from now.
  void arm(std::function<void()> act) {
    act_ = std::move(act);
    calls_ = 0;
    of_ = std::this_thread::get_id();
  }
  void disarm() { of_ = std::thread::id(); }

 private:
  SteadyClock clock_;
  std::function<void()> act_;
  std::atomic<std::thread::id> of_{};
  mutable int calls_ = 0;
};

// The submitter may hold locks that the callback needs.
TEST(ProgressOwnership, InlineProgressLeavesCallbacksOfOthersToTheEngineThread) {
  InterruptedClock clock;
  LocalJobOptions options;
  options.size = 1;
  options.runtime.progress = ProgressMode::kInline;
  LocalJob job(options, clock);
  std::vector<float> own(4, 1);
  std::vector<float> others(4, 1);
  std::promise<std::thread::id> called_on;
  Operation mine;
  Operation theirs;
  bool submitted = false;
  // In submit() the clock is read first, and then when the engine begins a step, unless the engine
  // thread is driving just then.
  for (int attempt = 0; attempt < 1000 && !submitted; ++attempt) {
    clock.arm([&] {
      std::jthread([&] {
        Submission submission = float_operation(others, "theirs");
        submission.on_done = [&](const Status&, const EventPtr&) {
          called_on.set_value(std::this_thread::get_id());
        };
        theirs = submit_one(job.rank(0), std::move(submission));
        submitted = true;
      });
    });
    mine = submit_one(job.rank(0), float_operation(own, "mine"));
    clock.disarm();
    if (!submitted) mine.wait();
    std::this_thread::sleep_for(milliseconds(1));
  }
  ASSERT_TRUE(submitted);
  auto called = called_on.get_future();
  ASSERT_EQ(called.wait_for(seconds(10)), std::future_status::ready) << "the callback is lost";
  EXPECT_NE(called.get(), std::this_thread::get_id());
  theirs.wait();
  mine.wait();
  job.shut_down();
}

TEST(ProgressOwnership, WhenEveryRankWaitsForAnotherAllGetAnErrorInTime) {
  const SteadyClock clock;
  for (const bool several_hosts : {false, true}) {
    LocalJobOptions options;
    options.size = 3;
    if (several_hosts) options.hosts = {"a", "b", "c"};
    options.runtime.deadlock_timeout = milliseconds(300);
    options.runtime.stall_shutdown = seconds(20);
    LocalJob job(options, clock);
    std::vector<std::vector<float>> data(3, std::vector<float>(4, 1));
    std::vector<Operation> operations(3);
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
          Operation& operation = operations[static_cast<std::size_t>(rank)];
          operation = submit_one(
              job.rank(rank),
              float_operation(data[static_cast<std::size_t>(rank)], rank == 0 ? "x" : "y"));
          operation.wait();
        });
      }
    }
    for (const Operation& operation : operations) {
      EXPECT_EQ(operation.status().code, StatusCode::kStalled);
      EXPECT_THAT(operation.status().message, HasSubstr("every rank waits for another"));
      EXPECT_THAT(operation.status().message,
                  HasSubstr("waits for allreduce 'x'; ranks 1 and 2: waits for allreduce 'y'"));
    }
    job.shut_down();
  }
}

// A background thread waits for the other rank, whose disk is slow, while the program of its own
// rank computes. Later all ranks continue.
TEST(ProgressOwnership, WaitsOfABackgroundThreadAreNoDeadlock) {
  const SteadyClock clock;
  LocalJobOptions options;
  options.size = 2;
  options.runtime.deadlock_timeout = milliseconds(200);
  LocalJob job(options, clock);
  std::vector<std::vector<float>> data(4, std::vector<float>(4, 1));
  const auto submit = [&](int rank, const std::string& name, std::size_t buffer) {
    return submit_one(job.rank(rank), float_operation(data[buffer], name));
  };
  const Operation program = submit(0, "gradient", 0);
  const Operation hidden = submit(1, "checkpoint", 1);
  {
    std::jthread waits([&] { program.wait(); });
    std::jthread waits_in_the_background([&] {
      const BackgroundThread here;
      hidden.wait();
    });
    std::this_thread::sleep_for(milliseconds(1000));
    EXPECT_FALSE(program.done());
    EXPECT_FALSE(hidden.done());
    submit(1, "gradient", 2).wait();
    submit(0, "checkpoint", 3).wait();
  }
  EXPECT_TRUE(program.status().ok()) << program.status().message;
  EXPECT_TRUE(hidden.status().ok()) << hidden.status().message;
  job.shut_down();
}

/// Counts how often the time is read.
class CountingClock final : public Clock {
 public:
  TimePoint now() const noexcept override {
    calls.fetch_add(1, std::memory_order_relaxed);
    return clock_.now();
  }
  mutable std::atomic<int> calls{0};

 private:
  SteadyClock clock_;
};

TEST(ProgressOwnership, AFailedRuntimeUsesNoCore) {
  CountingClock clock;
  LocalJobOptions options;
  options.runtime.peer_timeout = milliseconds(200);  // soon all timed work is due
  LocalJob job(options, clock);
  job.rank(0).abort({StatusCode::kPeerLost, "rank 0 ran out of data", 0});
  while (!job.rank(1).failed()) std::this_thread::sleep_for(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(150));  // the last messages go out
  const int before = clock.calls.load();
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_LT(clock.calls.load() - before, 100);
  job.shut_down();
}

}  // namespace
}  // namespace hvd::testing
