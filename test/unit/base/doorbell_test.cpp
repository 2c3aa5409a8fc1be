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
  Doorbell doorbell;
  const std::uint32_t ticket = doorbell.ticket();
  doorbell.ring();
  const TimePoint start = now();
  doorbell.sleep(ticket, Sleeper::kStandby, seconds(20));
  EXPECT_LT(elapsed(start), seconds(10));
}

TEST(Doorbell, SleepEndsAfterTheTimeout) {
  Doorbell doorbell;
  doorbell.ring();  // before the ticket: must not count
  const TimePoint start = now();
  doorbell.sleep(doorbell.ticket(), Sleeper::kDriver, milliseconds(30));
  EXPECT_GE(elapsed(start), milliseconds(29));
  EXPECT_LT(elapsed(start), seconds(10));
}

TEST(Doorbell, NoTimeoutLeftReturnsAtOnce) {
  Doorbell doorbell;
  const TimePoint start = now();
  doorbell.sleep(doorbell.ticket(), Sleeper::kDriver, Duration::zero());
  doorbell.sleep(doorbell.ticket(), Sleeper::kDriver, -seconds(1));
  EXPECT_LT(elapsed(start), seconds(5));
}

TEST(Doorbell, ARingWakesEverySleeperOfBothKinds) {
  Doorbell doorbell;
  const std::uint32_t ticket = doorbell.ticket();
  std::vector<std::jthread> sleepers;
  for (const Sleeper who :
       {Sleeper::kStandby, Sleeper::kStandby, Sleeper::kDriver, Sleeper::kDriver}) {
    sleepers.emplace_back(
        [&doorbell, ticket, who] { doorbell.sleep(ticket, who, Duration::max()); });
  }
  std::this_thread::sleep_for(milliseconds(20));
  doorbell.ring();
  sleepers.clear();  // joins; a sleeper that was missed hangs until the watchdog
}

// Returns how long a standby sleeper stays asleep that took its ticket before `act`. Its timeout is
// `limit`.
template <class Act>
Duration standby_sleep(Doorbell& doorbell, Duration limit, Act act) {
  const std::uint32_t ticket = doorbell.ticket();
  const TimePoint start = now();
  Duration slept{};
  std::jthread standby([&] {
    doorbell.sleep(ticket, Sleeper::kStandby, limit);
    slept = elapsed(start);
  });
  std::this_thread::sleep_for(milliseconds(50));
  act();
  standby.join();
  return slept;
}

TEST(Doorbell, ADriverKeepsRingsFromTheStandbySleeper) {
  Doorbell doorbell;
  doorbell.add_driver();
  // A spurious wake-up would fail this, but the thread receives no signal here.
  EXPECT_GE(standby_sleep(doorbell, milliseconds(300), [&] { doorbell.ring(); }),
            milliseconds(299));
  doorbell.remove_driver(doorbell.ticket());
  EXPECT_LT(standby_sleep(doorbell, seconds(20), [&] { doorbell.ring(); }), seconds(10));
}

TEST(Doorbell, ARemovedDriverPassesOnARingThatItDidNotHandle) {
  Doorbell doorbell;
  EXPECT_LT(standby_sleep(doorbell, seconds(20),
                          [&] {
                            doorbell.add_driver();
                            const std::uint32_t handled = doorbell.ticket();
                            doorbell.ring();
                            doorbell.remove_driver(handled);
                          }),
            seconds(10));
}

TEST(Doorbell, ARemovedDriverThatHandledAllRingsWakesNoSleeper) {
  Doorbell doorbell;
  EXPECT_GE(standby_sleep(doorbell, milliseconds(300),
                          [&] {
                            doorbell.add_driver();
                            doorbell.ring();
                            doorbell.remove_driver(doorbell.ticket());
                          }),
            milliseconds(299));
}

TEST(Doorbell, DriversNest) {
  Doorbell doorbell;
  doorbell.add_driver();
  doorbell.add_driver();
  doorbell.remove_driver(doorbell.ticket());
  EXPECT_GE(standby_sleep(doorbell, milliseconds(300), [&] { doorbell.ring(); }),
            milliseconds(299));
  doorbell.remove_driver(doorbell.ticket());
}

// Two sides pass a token back and forth through words next to the doorbells. A lost ring costs a
// whole timeout, which the measured time shows.
struct PingPong {
  Doorbell doorbells[2];
  std::atomic<std::uint32_t> turns{0};

  void play(std::uint32_t side, std::uint32_t rounds, Duration timeout) {
    for (std::uint32_t turn = side; turn < rounds; turn += 2) {
      for (;;) {
        const std::uint32_t ticket = doorbells[side].ticket();
        if (turns.load(std::memory_order_acquire) >= turn) {
          break;
        }
        doorbells[side].sleep(ticket, side == 0 ? Sleeper::kStandby : Sleeper::kDriver, timeout);
      }
      turns.store(turn + 1, std::memory_order_release);
      doorbells[1 - side].ring();
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

// A standby thread and changing drivers share an engine's progress, as in the runtime. Producers
// count work and ring. All work must be done without any sleep running into its timeout.
TEST(Doorbell, NoRingIsLostBetweenStandbyAndDrivers) {
  constexpr int kItems = 20000;
  Doorbell doorbell;
  std::atomic<bool> progress_owned{false};
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
      const std::uint32_t ticket = doorbell.ticket();
      if (!progress_owned.exchange(true)) {
        drive();
        progress_owned.store(false);
        if (done.load() >= kItems) {
          break;
        }
      }
      doorbell.sleep(ticket, Sleeper::kStandby, seconds(40));
    }
  });
  std::jthread driver([&] {
    for (int visit = 0; done.load() < kItems && visit < 5000; ++visit) {
      doorbell.add_driver();
      std::uint32_t handled = doorbell.ticket() - 1;
      if (!progress_owned.exchange(true)) {
        handled = doorbell.ticket();
        drive();
        if (visit % 16 == 0) {
          doorbell.sleep(handled, Sleeper::kDriver, milliseconds(1));
          handled = doorbell.ticket();
          drive();
        }
        progress_owned.store(false);
      }
      doorbell.remove_driver(handled);
    }
  });
  for (int i = 0; i < kItems; ++i) {
    offered.fetch_add(1);
    doorbell.ring();
    if (i % 64 == 0) {
      std::this_thread::yield();
    }
  }
  driver.join();
  doorbell.ring();  // a driver that did the last item leaves the standby thread asleep
  standby.join();
  EXPECT_EQ(done.load(), kItems);
  EXPECT_LT(elapsed(start), seconds(40));
}

}  // namespace
}  // namespace hvd
