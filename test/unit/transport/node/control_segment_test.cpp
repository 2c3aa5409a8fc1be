#include "transport/node/control_segment.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "hvd/error.h"

namespace hvd::host {
namespace {

using namespace std::chrono_literals;

TimePoint now() { return SteadyClock().now(); }

std::string unique_name() {
  static int number = 0;
  return "/hvd-test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

bool name_exists(const std::string& name) { return std::filesystem::exists("/dev/shm" + name); }

/// A child process that enters slot 1 and then does `life`, while the parent holds slot 0.
class Pair {
 public:
  template <typename Life>
  explicit Pair(Life&& life)
      : name_(unique_name()), control_segment_(ControlSegment::create(name_, 2)) {
    control_segment_.enter(0, now());
    child_ = fork();
    if (child_ == 0) {
      ControlSegment own = ControlSegment::attach(name_, 2);
      own.enter(1, now());
      own.unlink();
      life(own);
      _exit(0);
    }
    // The child removes the name when it has entered.
    while (name_exists(name_) && now() < started_ + 10s) std::this_thread::sleep_for(1ms);
    control_segment_.watch_others(now());
  }
  ~Pair() {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  ControlSegment& control_segment() { return control_segment_; }
  pid_t child() const { return child_; }
  /// Checks every millisecond, for at most `limit`.
  std::optional<ControlSegment::Loss> wait_for_loss(Duration timeout, Duration limit) {
    const TimePoint end = now() + limit;
    for (;;) {
      auto loss = control_segment_.check(now(), timeout);
      if (loss || now() > end) return loss;
      std::this_thread::sleep_for(1ms);
    }
  }

 private:
  std::string name_;
  ControlSegment control_segment_;
  TimePoint started_ = now();
  pid_t child_ = -1;
};

void live(ControlSegment& control_segment) {
  for (;;) {
    control_segment.heartbeat(now());
    std::this_thread::sleep_for(5ms);
  }
}

TEST(ControlSegment, LeavesNoName) {
  const std::string name = unique_name();
  {
    ControlSegment control_segment = ControlSegment::create(name, 3);
    EXPECT_TRUE(name_exists(name));
    control_segment.unlink();
    EXPECT_FALSE(name_exists(name));
  }
  {
    const ControlSegment control_segment = ControlSegment::create(name, 3);
    EXPECT_TRUE(name_exists(name));
  }
  EXPECT_FALSE(name_exists(name)) << "the destructor removes it when a start fails half-way";
}

TEST(ControlSegment, AProcessThatEndsBecauseOfALossIsNotTakenForTheLoss) {
  Pair pair([](ControlSegment& control_segment) {
    control_segment.report_loss(7, "lost rank 7: it ended");
  });
  const auto loss = pair.wait_for_loss(60s, 5s);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->slot, 1);
  EXPECT_EQ(loss->accused, 7);
  EXPECT_EQ(loss->cause, "lost rank 7: it ended");
}

TEST(ControlSegment, AProcessMayReportTheLossOfARankThatItCannotName) {
  Pair pair([](ControlSegment& control_segment) {
    control_segment.report_loss(ControlSegment::kUnknownRank, "not all ranks arrived");
  });
  const auto loss = pair.wait_for_loss(60s, 5s);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->accused, ControlSegment::kUnknownRank);
  EXPECT_EQ(loss->cause, "not all ranks arrived");
}

// The watch calls find_loss() while the engine hangs.
TEST(ControlSegment, FindLossReturnsEndedProcessesAndAccusations) {
  Pair ended([](ControlSegment&) {});
  ASSERT_TRUE(ended.wait_for_loss(60s, 5s));
  const auto loss = ended.control_segment().find_loss(0);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->slot, 1);
  EXPECT_EQ(loss->cause, "process " + std::to_string(ended.child()) + " ended");
  EXPECT_FALSE(loss->accused);

  Pair accuses([](ControlSegment& control_segment) {
    control_segment.report_loss(7, "lost rank 7: it ended");
    live(control_segment);
  });
  ASSERT_TRUE(accuses.wait_for_loss(60s, 5s));
  EXPECT_EQ(accuses.control_segment().find_loss(0)->accused, 7);
  EXPECT_FALSE(accuses.control_segment().find_loss(7)) << "an accusation of itself does not count";

  Pair lives(live);
  EXPECT_FALSE(lives.control_segment().find_loss(0));
}

TEST(ControlSegment, RefusesAMissingOrForeignSegment) {
  EXPECT_THROW(ControlSegment::attach(unique_name(), 2), Error);
  const std::string name = unique_name();
  ControlSegment control_segment = ControlSegment::create(name, 2);
  EXPECT_THROW(ControlSegment::attach(name, 3), Error);
  EXPECT_THROW(ControlSegment::create(name, 2), Error);
  EXPECT_NO_THROW(ControlSegment::attach(name, 2));
}

TEST(ControlSegment, NamesTheReasonWhyItCannotBeMade) {
  try {
    ControlSegment::create("/hvd-test/with/slashes", 2);
    FAIL() << "shm_open allows no directories";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/dev/shm"), std::string::npos) << error.what();
  }
}

TEST(ControlSegment, RingsAnotherProcess) {
  Pair pair([](ControlSegment& control_segment) {
    const std::uint32_t ticket = control_segment.own_doorbell().ticket();
    control_segment.doorbell(0).ring();
    control_segment.own_doorbell().sleep(ticket, Doorbell::Sleeper::kStandby, 20s);
    control_segment.doorbell(0).ring();
    live(control_segment);
  });
  const TimePoint end = now() + 10s;
  while (pair.control_segment().doorbell(0).ticket() < 1 && now() < end)
    std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(50ms);
  pair.control_segment().doorbell(1).ring();
  while (pair.control_segment().doorbell(0).ticket() < 2 && now() < end)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(pair.control_segment().doorbell(0).ticket(), 2U);
}

TEST(ControlSegment, SeesNoLossAmongTheLiving) {
  Pair pair(live);
  EXPECT_FALSE(pair.wait_for_loss(200ms, 600ms).has_value());
}

TEST(ControlSegment, DetectsAKilledProcessThatIsAZombie) {
  Pair pair(live);
  kill(pair.child(), SIGKILL);
  const TimePoint killed = now();
  const auto loss = pair.wait_for_loss(60s, 5s);
  ASSERT_TRUE(loss.has_value());
  EXPECT_LT(now() - killed, 1s);
  EXPECT_EQ(loss->slot, 1);
  EXPECT_EQ(loss->cause, "process " + std::to_string(pair.child()) + " ended");
}

TEST(ControlSegment, AllAreRungWhenOneIsSeenToEnd) {
  Pair pair([](ControlSegment& control_segment) {
    control_segment.watch_others(now());
    control_segment.doorbell(0).ring();
    live(control_segment);
  });
  ControlSegment& own = pair.control_segment();
  const TimePoint end = now() + 20s;
  while (own.own_doorbell().ticket() < 1 && now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(own.endings(), 0U);
  kill(pair.child(), SIGKILL);
  while (own.own_doorbell().ticket() < 2 && now() < end) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(own.own_doorbell().ticket(), 2U);
  EXPECT_EQ(own.endings(), 1U);
  EXPECT_EQ(own.check(now(), 60s)->slot, 1);
}

TEST(ControlSegment, SeesAnExit) {
  Pair pair([](ControlSegment&) {});
  const auto loss = pair.wait_for_loss(60s, 5s);
  ASSERT_TRUE(loss.has_value());
  EXPECT_EQ(loss->slot, 1);
}

TEST(ControlSegment, SeesAStoppedProcessByItsSilence) {
  Pair pair(live);
  kill(pair.child(), SIGSTOP);
  const TimePoint stopped = now();
  const auto loss = pair.wait_for_loss(1s, 5s);
  ASSERT_TRUE(loss.has_value());
  EXPECT_GT(now() - stopped, 900ms);
  EXPECT_LT(now() - stopped, 2s);
  EXPECT_NE(loss->cause.find("no sign of life for 1.0 s"), std::string::npos) << loss->cause;
}

TEST(ControlSegment, AProcessThatLeftIsNoLoss) {
  Pair pair([](ControlSegment& control_segment) { control_segment.farewell(); });
  EXPECT_FALSE(pair.wait_for_loss(100ms, 500ms).has_value());
  const TimePoint end = now() + 10s;
  while ((pair.control_segment().departures().empty() ||
          !pair.control_segment().departures().front().second) &&
         now() < end)
    std::this_thread::sleep_for(1ms);
  const auto left = pair.control_segment().departures();
  ASSERT_EQ(left.size(), 1U);
  EXPECT_EQ(left.front().first, 1);
  EXPECT_TRUE(left.front().second);
}

TEST(ControlSegment, ReportsAProcessThatLeftAndLivesOn) {
  Pair pair([](ControlSegment& control_segment) {
    control_segment.farewell();
    for (;;) ::pause();
  });
  const TimePoint end = now() + 10s;
  while (pair.control_segment().departures().empty() && now() < end)
    std::this_thread::sleep_for(1ms);
  const auto left = pair.control_segment().departures();
  ASSERT_EQ(left.size(), 1U);
  EXPECT_FALSE(left.front().second);
  Pair staying(live);
  EXPECT_TRUE(staying.control_segment().departures().empty());
}

TEST(ProcessWatch, RecognisesAReusedPidByItsStartTime) {
  ProcessIdentity other = current_process();
  EXPECT_FALSE(ProcessWatch(other).ended());
  other.start_time += 1;
  EXPECT_TRUE(ProcessWatch(other).ended());
}

TEST(ProcessWatch, DoesNotJudgeAcrossPidNamespaces) {
  ProcessIdentity other = current_process();
  other.pid_namespace += 1;
  ProcessWatch watch(other);
  EXPECT_FALSE(watch.works());
  EXPECT_FALSE(watch.ended());
}

}  // namespace
}  // namespace hvd::host
