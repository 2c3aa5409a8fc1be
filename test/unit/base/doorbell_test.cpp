#include "base/doorbell.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

namespace hvd {
namespace {

using Sleeper = Doorbell::Sleeper;
using std::chrono::milliseconds;
using std::chrono::seconds;

Duration elapsed(TimePoint start) { return SteadyClock().now() - start; }
TimePoint now() { return SteadyClock().now(); }

TEST(Doorbell, ARingAfterTheTicketEndsTheSleepAtOnce) {
  Doorbell bell;
  const std::uint32_t ticket = bell.ticket();
  bell.ring();
  const TimePoint start = now();
  bell.sleep(ticket, Sleeper::kStandby, seconds(20));
  EXPECT_LT(elapsed(start), seconds(10));
}

TEST(Doorbell, SleepEndsAfterTheTimeout) {
  Doorbell bell;
  bell.ring();  // before the ticket: must not count
  const TimePoint start = now();
  bell.sleep(bell.ticket(), Sleeper::kDriver, milliseconds(30));
  EXPECT_GE(elapsed(start), milliseconds(29));
  EXPECT_LT(elapsed(start), seconds(10));
}

TEST(Doorbell, NoTimeoutLeftReturnsAtOnce) {
  Doorbell bell;
  const TimePoint start = now();
  bell.sleep(bell.ticket(), Sleeper::kDriver, Duration::zero());
  bell.sleep(bell.ticket(), Sleeper::kDriver, -seconds(1));
  EXPECT_LT(elapsed(start), seconds(5));
}

TEST(Doorbell, ARingWakesEverySleeperOfBothKinds) {
  Doorbell bell;
  const std::uint32_t ticket = bell.ticket();
  std::vector<std::jthread> sleepers;
  for (const Sleeper who :
       {Sleeper::kStandby, Sleeper::kStandby, Sleeper::kDriver, Sleeper::kDriver}) {
    sleepers.emplace_back([&bell, ticket, who] { bell.sleep(ticket, who, Duration::max()); });
  }
  std::this_thread::sleep_for(milliseconds(20));
  bell.ring();
  sleepers.clear();  // joins; a sleeper that was missed hangs until the watchdog
}

// How long a standby sleeper that took its ticket before `act` stays asleep, with `limit` as
// timeout.
template <class Act>
Duration standby_sleep(Doorbell& bell, Duration limit, Act act) {
  const std::uint32_t ticket = bell.ticket();
  const TimePoint start = now();
  Duration slept{};
  std::jthread standby([&] {
    bell.sleep(ticket, Sleeper::kStandby, limit);
    slept = elapsed(start);
  });
  std::this_thread::sleep_for(milliseconds(50));
  act();
  standby.join();
  return slept;
}

TEST(Doorbell, ADriverKeepsRingsFromTheStandbySleeper) {
  Doorbell bell;
  bell.take_over();
  // A spurious wake-up would fail this, but nothing here sends the thread a signal.
  EXPECT_GE(standby_sleep(bell, milliseconds(300), [&] { bell.ring(); }), milliseconds(299));
  bell.hand_back(bell.ticket());
  EXPECT_LT(standby_sleep(bell, seconds(20), [&] { bell.ring(); }), seconds(10));
}

TEST(Doorbell, HandBackPassesOnARingThatTheDriverDidNotHandle) {
  Doorbell bell;
  EXPECT_LT(standby_sleep(bell, seconds(20),
                          [&] {
                            bell.take_over();
                            const std::uint32_t handled = bell.ticket();
                            bell.ring();
                            bell.hand_back(handled);
                          }),
            seconds(10));
}

TEST(Doorbell, HandBackOfAllHandledWakesNobody) {
  Doorbell bell;
  EXPECT_GE(standby_sleep(bell, milliseconds(300),
                          [&] {
                            bell.take_over();
                            bell.ring();
                            bell.hand_back(bell.ticket());
                          }),
            milliseconds(299));
}

TEST(Doorbell, DriversNest) {
  Doorbell bell;
  bell.take_over();
  bell.take_over();
  bell.hand_back(bell.ticket());
  EXPECT_GE(standby_sleep(bell, milliseconds(300), [&] { bell.ring(); }), milliseconds(299));
  bell.hand_back(bell.ticket());
}

// Two sides pass a token back and forth through plain words beside the bells; a lost ring hangs
// until the sleep's timeout and is seen as the time that it takes.
struct PingPong {
  Doorbell bells[2];
  std::atomic<std::uint32_t> turns{0};

  void play(std::uint32_t side, std::uint32_t rounds, Duration timeout) {
    for (std::uint32_t turn = side; turn < rounds; turn += 2) {
      for (;;) {
        const std::uint32_t ticket = bells[side].ticket();
        if (turns.load(std::memory_order_acquire) >= turn) {
          break;
        }
        bells[side].sleep(ticket, side == 0 ? Sleeper::kStandby : Sleeper::kDriver, timeout);
      }
      turns.store(turn + 1, std::memory_order_release);
      bells[1 - side].ring();
    }
  }
};

TEST(Doorbell, NoRingIsLostBetweenThreads) {
  PingPong game;
  const TimePoint start = now();
  std::jthread other([&] { game.play(1, 20000, seconds(40)); });
  game.play(0, 20000, seconds(40));
  other.join();
  EXPECT_LT(elapsed(start), seconds(40));
}

TEST(Doorbell, NoRingIsLostBetweenProcesses) {
  void* const page =
      mmap(nullptr, sizeof(PingPong), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto* const game = static_cast<PingPong*>(page);  // zero-filled memory is a valid game
  const TimePoint start = now();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(50);
    game->play(1, 20000, seconds(40));
    _exit(0);
  }
  game->play(0, 20000, seconds(40));
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_LT(elapsed(start), seconds(40));
  munmap(page, sizeof(PingPong));
}

// A standby thread and drivers that come and go share an engine's token, as the runtime does;
// producers count work and ring. All work must be done without any sleep running into its timeout.
TEST(Doorbell, NoRingIsLostBetweenStandbyAndDrivers) {
  constexpr int kItems = 20000;
  Doorbell bell;
  std::atomic<bool> token{false};
  std::atomic<int> offered{0};
  std::atomic<int> done{0};
  const auto drive = [&] {
    bool worked = false;
    for (int n = done.load(); n < offered.load(); n = done.load()) {
      done.store(n + 1);
      worked = true;
    }
    return worked;
  };
  const TimePoint start = now();
  std::jthread standby([&] {
    while (done.load() < kItems) {
      const std::uint32_t ticket = bell.ticket();
      if (!token.exchange(true)) {
        drive();
        token.store(false);
        if (done.load() >= kItems) {
          break;
        }
      }
      bell.sleep(ticket, Sleeper::kStandby, seconds(40));
    }
  });
  std::jthread driver([&] {
    for (int visit = 0; done.load() < kItems && visit < 5000; ++visit) {
      bell.take_over();
      std::uint32_t handled = bell.ticket() - 1;
      if (!token.exchange(true)) {
        handled = bell.ticket();
        drive();
        if (visit % 16 == 0) {
          bell.sleep(handled, Sleeper::kDriver, milliseconds(1));
          handled = bell.ticket();
          drive();
        }
        token.store(false);
      }
      bell.hand_back(handled);
    }
  });
  for (int i = 0; i < kItems; ++i) {
    offered.fetch_add(1);
    bell.ring();
    if (i % 64 == 0) {
      std::this_thread::yield();
    }
  }
  driver.join();
  bell.ring();  // a driver that did the last item leaves the standby thread asleep, as it should
  standby.join();
  EXPECT_EQ(done.load(), kItems);
  EXPECT_LT(elapsed(start), seconds(40));
}

}  // namespace
}  // namespace hvd
