#include "base/clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace hvd {
namespace {

TEST(SteadyClock, TheCoarseTimeIsCloseAndNeverAhead) {
  const SteadyClock clock;
  for (int look = 0; look < 20; ++look) {
    const TimePoint before = clock.now();
    const TimePoint about = clock.about_now();
    const TimePoint after = clock.now();
    EXPECT_LE(about, after);
    EXPECT_LE(before - about, std::chrono::milliseconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace
}  // namespace hvd
