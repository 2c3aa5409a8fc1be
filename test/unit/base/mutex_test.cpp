#include "base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace hvd {
namespace {

static_assert(sizeof(Mutex) == sizeof(std::mutex));
static_assert(sizeof(Condition) == sizeof(std::condition_variable));

struct Counted {
  Mutex mutex;
  Condition changed;
  int count HVD_GUARDED_BY(mutex) = 0;
};

TEST(MutexTest, OneThreadAtATime) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 1000;
  Counted counted;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&counted] {
        for (int round = 0; round < kRounds; ++round) {
          const MutexLock lock(counted.mutex);
          ++counted.count;
        }
      });
    }
  }
  const MutexLock lock(counted.mutex);
  EXPECT_EQ(counted.count, kThreads * kRounds);
}

TEST(MutexTest, TryLockFailsWhileAnotherHoldsIt) {
  Mutex mutex;
  bool locked = true;
  {
    const MutexLock lock(mutex);
    std::jthread([&] {
      locked = mutex.try_lock();
      if (locked) mutex.unlock();
    }).join();
    EXPECT_FALSE(locked);
  }
  ASSERT_TRUE(mutex.try_lock());
  { const MutexLock adopted(mutex, std::adopt_lock); }
  ASSERT_TRUE(mutex.try_lock());
  mutex.unlock();
}

TEST(ConditionTest, WaitsUntilItIsNotified) {
  Counted counted;
  std::jthread other([&counted] {
    {
      const MutexLock lock(counted.mutex);
      counted.count = 1;
    }
    counted.changed.notify_one();
  });
  const MutexLock lock(counted.mutex);
  while (counted.count == 0) counted.changed.wait(counted.mutex);
  EXPECT_EQ(counted.count, 1);
}

TEST(ConditionTest, WaitsUntilItsDeadlineAndHoldsTheMutexAfterwards) {
  constexpr Duration kTimeout = std::chrono::milliseconds(20);
  const SteadyClock clock;
  Mutex mutex;
  Condition never;
  const TimePoint deadline = clock.now() + kTimeout;
  {
    const MutexLock lock(mutex);
    while (clock.now() < deadline) never.wait_until(mutex, deadline);
    EXPECT_GE(clock.now(), deadline);
    const TimePoint second = clock.now() + kTimeout;
    while (clock.now() < second) never.wait_for(mutex, second - clock.now());
    bool free = true;
    std::jthread([&] {
      free = mutex.try_lock();
      if (free) mutex.unlock();
    }).join();
    EXPECT_FALSE(free);
  }
  ASSERT_TRUE(mutex.try_lock());
  mutex.unlock();
}

}  // namespace
}  // namespace hvd
