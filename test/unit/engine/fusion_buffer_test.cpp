#include "engine/host_staging.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

namespace hvd::runtime {
namespace {

TEST(FusionBufferPool, GivesAlignedMemoryOfTheSize) {
  FusionBufferPool pool;
  for (const std::size_t size : {0UL, 1UL, 63UL, 64UL, 1000UL, 1UL << 20}) {
    const FusionLease lease = pool.lease(size);
    EXPECT_EQ(lease.bytes().size(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease.bytes().data()) % 64, 0U);
  }
}

TEST(FusionBufferPool, ReusesMemoryAndKeepsTheTwoLargest) {
  FusionBufferPool pool;
  const std::byte* large = nullptr;
  {
    const FusionLease a = pool.lease(100), b = pool.lease(5000), c = pool.lease(300);
    large = b.bytes().data();
  }
  EXPECT_EQ(pool.free_buffers(), 2U);
  EXPECT_EQ(pool.lease(4000).bytes().data(), large);
}

TEST(FusionBufferPool, TrimsLargeBuffers) {
  FusionBufferPool pool;
  { const FusionLease small = pool.lease(100), large = pool.lease(5000); }
  pool.trim(4000);
  EXPECT_EQ(pool.free_buffers(), 1U);
  pool.trim(100);
  EXPECT_EQ(pool.free_buffers(), 1U);
}

TEST(FusionBufferPool, TwoLeasesNeverShare) {
  FusionBufferPool pool;
  { const FusionLease first = pool.lease(64); }
  const FusionLease a = pool.lease(64), b = pool.lease(64);
  EXPECT_NE(a.bytes().data(), b.bytes().data());
}

TEST(FusionBufferPool, AMovedLeaseGivesBackOnce) {
  FusionBufferPool pool;
  {
    FusionLease a = pool.lease(64);
    FusionLease b = std::move(a);
    a = std::move(b);
    a = pool.lease(128);
    EXPECT_EQ(pool.free_buffers(), 1U);
  }
  EXPECT_EQ(pool.free_buffers(), 2U);
}

}  // namespace
}  // namespace hvd::runtime
