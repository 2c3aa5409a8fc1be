// Tests when a rank checks the others, when it reports that it is blocked, and the clock without
// pauses.
#include "engine/peers.h"

#include <gtest/gtest.h>

#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// The control plane of a rank that is alone in its job.
class LonelyPlane final : public control::ControlPlane {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  void ring(int) noexcept override {}
  const Topology& topology() const noexcept override { return topology_; }
  void send(int, std::span<const std::byte>) override {}
  void send(std::span<const int>, std::span<const std::byte>) override {}
  std::optional<control::Message> poll() override { return std::nullopt; }
  bool busy() const noexcept override { return false; }
  bool rung_by_all() const noexcept override { return true; }
  bool quiet() const noexcept override { return true; }
  Doorbell& doorbell() noexcept override { return doorbell_; }
  ArrivalFlags* arrival_flags(int, int) noexcept override { return nullptr; }
  ArrivalFlags* remote_arrival_flags() noexcept override { return nullptr; }
  void heartbeat(TimePoint) noexcept override {}
  std::optional<control::PeerLoss> check_peers(TimePoint, Duration) override {
    return std::nullopt;
  }
  std::uint32_t endings() const noexcept override { return ended; }
  void report_loss(int, std::string_view) noexcept override {}
  void farewell() noexcept override {}

  std::uint32_t ended = 0;

 private:
  const Topology topology_{.rank = 0, .size = 1};
  Doorbell doorbell_;
};

TEST(PeerWatchTest, AnEndedProcessIsHandledAtOnce) {
  VirtualClock clock;
  const runtime::RuntimeOptions options;
  LonelyPlane plane;
  observe::Counters counters;
  runtime::StepTime time(clock, options.peer_timeout / 4);
  runtime::PeerWatch watch(options, plane, counters, time);
  EXPECT_TRUE(watch.due(true));
  EXPECT_FALSE(watch.due(true)) << "no time has passed";
  plane.ended = 1;
  EXPECT_TRUE(watch.due(true));
  EXPECT_FALSE(watch.due(true)) << "once for each";
  plane.ended = 3;
  EXPECT_TRUE(watch.due(false));
}

TEST(StepTime, LeavesOutPausesOfTheProcess) {
  VirtualClock clock;
  const TimePoint start = clock.now();
  runtime::StepTime time(clock, seconds(1));
  clock.advance(seconds(2));  // a long sleep, but not twice as long as the longest
  EXPECT_EQ(time.step(), start) << "no step has begun since";
  time.begin_step();
  EXPECT_EQ(time.step(), start + seconds(2));
  EXPECT_EQ(time.awake(), clock.now());
  clock.advance(seconds(10));
  time.begin_step();
  EXPECT_EQ(time.awake(), start + seconds(3)) << "one second may have been sleep";
  EXPECT_EQ(time.awake(time.step()), time.awake());
  EXPECT_EQ(time.on_the_clock(time.awake()), clock.now());
}

TEST(BlockedNotice, IsDueAFifthOfTheTimeAfterAThreadWaitsAgainAndAgain) {
  runtime::BlockedNotice notice(seconds(10));
  TimePoint now{seconds(100)};
  EXPECT_FALSE(notice.due(now));
  now += seconds(50);
  EXPECT_FALSE(notice.due(now)) << "no thread waits";
  notice.on_blocked_wait();
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(notice.due(now));
    EXPECT_FALSE(notice.due(now + milliseconds(1999)));
    EXPECT_TRUE(notice.due(now += seconds(2)));
  }
  now += milliseconds(1999);
  EXPECT_FALSE(notice.due(now));
  notice.on_submission();
  EXPECT_FALSE(notice.due(now += seconds(1)));
  EXPECT_FALSE(notice.due(now + milliseconds(1999)));
  EXPECT_TRUE(notice.due(now + seconds(2)));
  notice.on_plan();
  EXPECT_FALSE(notice.due(now + seconds(20)));
  notice.on_blocked_wait();
  EXPECT_FALSE(notice.due(now + seconds(30))) << "the time begins with the wait";
  runtime::BlockedNotice never(Duration::zero());
  never.on_blocked_wait();
  EXPECT_FALSE(never.due(now));
  EXPECT_FALSE(never.due(now + seconds(99)));
}

}  // namespace
}  // namespace hvd::testing
