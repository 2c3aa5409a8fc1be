#include "backend/segment/cache_distance.h"

#include <gtest/gtest.h>

#include <atomic>

namespace hvd::segment {
namespace {

using namespace std::chrono_literals;

void add(CacheDistance& distance, CacheDistance::Nanoseconds load, int times) {
  for (int time = 0; time < times; ++time) distance.add(load);
}

TEST(CacheDistance, FollowsTheNewestLoads) {
  CacheDistance distance;
  EXPECT_FALSE(distance.far()) << "near until it is measured";
  add(distance, 260ns, 20);
  EXPECT_TRUE(distance.far());
  add(distance, 60ns, 20);
  EXPECT_FALSE(distance.far());
  add(distance, 260ns, 20);
  EXPECT_TRUE(distance.far());
}

TEST(CacheDistance, FewContraryLoadsDoNotChangeIt) {
  CacheDistance distance;
  add(distance, 260ns, 20);
  add(distance, 60ns, 3);
  EXPECT_TRUE(distance.far());
  for (int time = 0; time < 100; ++time) {
    add(distance, 260ns, 2);
    add(distance, 60ns, 1);
  }
  EXPECT_TRUE(distance.far());
}

TEST(CacheDistance, IgnoresItsOwnCacheAndInterruptions) {
  CacheDistance distance;
  add(distance, 50us, 100);
  EXPECT_FALSE(distance.far());
  add(distance, 260ns, 20);
  add(distance, 3ns, 1000);
  add(distance, 0ns, 1000);
  EXPECT_TRUE(distance.far());
}

TEST(CacheDistance, LoadsTheCounter) {
  CacheDistance distance;
  std::atomic<std::uint64_t> counter{7};
  EXPECT_EQ(distance.load(counter), 7U);
}

}  // namespace
}  // namespace hvd::segment
