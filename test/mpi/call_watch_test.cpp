#include "transport/mpi/call_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;

TEST(WatchedCall, IsSeenFromOutsideWhileItLasts) {
  const std::uint64_t before = call_state.moves.load();
  ASSERT_EQ(before % 2, 0U);
  {
    const WatchedCall outer("MPI_Testsome", 3);
    EXPECT_EQ(call_state.moves.load(), before + 1);
    const WatchedCall inner("MPI_Get_count");
    EXPECT_EQ(call_state.moves.load(), before + 1) << "an inner call belongs to the outer one";
    EXPECT_STREQ(call_state.call.load(), "MPI_Testsome");
    EXPECT_EQ(call_state.peer.load(), 3);
  }
  EXPECT_EQ(call_state.moves.load(), before + 2);
}

TEST(CallTimer, CountsWhileTheSameCallLasts) {
  CallTimer timer(10ms, 0ms, 7);
  timer.sample(10ms, 7);
  timer.sample(20ms, 7);
  EXPECT_EQ(timer.in_call(), 20ms);
  timer.sample(30ms, 9);  // the call returned, and the next one began
  EXPECT_EQ(timer.in_call(), 0ms);
  timer.sample(40ms, 9);
  EXPECT_EQ(timer.in_call(), 10ms);
  timer.sample(50ms, 10);
  EXPECT_EQ(timer.in_call(), 0ms);
  timer.sample(60ms, 10);
  EXPECT_EQ(timer.in_call(), 0ms) << "time outside of calls does not count";
  EXPECT_EQ(timer.total(), 60ms);
}

TEST(CallTimer, DoesNotCountTimeInWhichThisProcessWasStopped) {
  CallTimer timer(10ms, 0ms, 1);
  timer.sample(10ms, 1);
  timer.sample(1h, 1);
  EXPECT_EQ(timer.in_call(), 30ms);
  EXPECT_EQ(timer.total(), 30ms);
}

/// The hangs that a watch has reported.
struct Hangs {
  std::atomic<int> count{0};
  CallWatch::Hang last;
  CallWatch::OnHang handler() {
    return [this](const CallWatch::Hang& hang) {
      last = hang;
      ++count;
    };
  }
  bool wait_for_one(Duration limit) const {
    const SteadyClock clock;
    for (const TimePoint begin = clock.now(); count == 0 && clock.now() - begin < limit;)
      std::this_thread::sleep_for(1ms);
    return count > 0;
  }
};

TEST(CallWatch, ReportsACallThatDoesNotReturn) {
  Hangs start;
  Hangs work;
  CallWatch watch(10s, start.handler());
  watch.watch_calls(80ms, work.handler());
  const WatchedCall call("MPI_Testsome", 2);
  ASSERT_TRUE(work.wait_for_one(10s));
  EXPECT_EQ(work.last.call, "MPI_Testsome");
  EXPECT_EQ(work.last.peer, 2);
  EXPECT_GE(work.last.lasted, 80ms);
  EXPECT_EQ(start.count, 0);
}

TEST(CallWatch, ReportsItSoonerOnceALossIsKnown) {
  Hangs work;
  std::atomic<bool> known{false};
  CallWatch watch(10s, [](const CallWatch::Hang&) {});
  watch.watch_calls(2s, work.handler(), [&known] { return known.load(); });
  const WatchedCall call("MPI_Testsome");
  std::this_thread::sleep_for(600ms);
  EXPECT_EQ(work.count, 0);
  known = true;
  ASSERT_TRUE(work.wait_for_one(1s));
  EXPECT_LT(work.last.lasted, 2s);
}

TEST(CallWatch, LeavesCallsAloneThatReturn) {
  Hangs start;
  Hangs work;
  {
    CallWatch watch(10s, start.handler());
    watch.watch_calls(800ms, work.handler(), [] { return true; });  // a sample every 100 ms
    const SteadyClock clock;
    for (const TimePoint begin = clock.now(); clock.now() - begin < 400ms;) {
      const WatchedCall call("MPI_Testsome");
      std::this_thread::sleep_for(1ms);
    }
    std::this_thread::sleep_for(200ms);  // without a call
  }
  EXPECT_EQ(work.count, 0);
  EXPECT_EQ(start.count, 0);
}

// All calls of a start share the limit, so that a late call does not get the whole limit again.
TEST(CallWatch, LimitsTheStartAsAWhole) {
  Hangs start;
  CallWatch watch(200ms, start.handler());
  for (int i = 0; i < 150; ++i) {
    const WatchedCall call("MPI_Test");
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(start.count, 0);
  const WatchedCall call("MPI_Comm_free");
  ASSERT_TRUE(start.wait_for_one(10s));
  EXPECT_EQ(start.last.call, "MPI_Comm_free");
  EXPECT_GE(start.last.lasted, 200ms);
}

TEST(CallWatch, TakesNoSignalsThatAreForTheProgram) {
  static std::atomic<bool> taken_here{false};
  static const pthread_t here = ::pthread_self();
  ASSERT_NE(
      ::signal(SIGUSR2, [](int) { taken_here = ::pthread_equal(::pthread_self(), here) != 0; }),
      SIG_ERR);
  CallWatch watch(10s, [](const CallWatch::Hang&) {});
  for (int i = 0; i < 100; ++i) {
    taken_here = false;
    ASSERT_EQ(::kill(::getpid(), SIGUSR2), 0);
    ASSERT_TRUE(taken_here);
  }
  ::signal(SIGUSR2, SIG_DFL);
}

}  // namespace
}  // namespace hvd::mpi
