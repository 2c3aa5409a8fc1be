#include "device/buffers.h"

#include <gtest/gtest.h>

#include "device/context.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

class BuffersTest : public ::testing::Test {
 protected:
  BuffersTest()
      : context_(gpu_.api(0), 0),
        in_(context_),
        out_(context_),
        guard_(context_.api(), 0),
        pool_(context_) {}

  device::BufferLease take(std::size_t bytes) {
    EXPECT_TRUE(pool_.prepare({&bytes, 1}));
    return pool_.lease(bytes, in_.get());
  }
  /// A batch that writes the buffer on one queue and reads it on another.
  void run_batch(std::size_t bytes) {
    device::BufferLease lease = take(bytes);
    ASSERT_EQ(lease.bytes().size(), bytes);
    context_.api().fill(lease.bytes().data(), bytes, 1, 3, in_.get());
    context_.wait(out_.get(), context_.events()->record(in_.get()));
    context_.api().copy(result_, lease.bytes().data(), bytes, device::Direction::kOnDevice,
                        out_.get());
    lease.release(context_.events()->record(out_.get()));
  }

  FakeGpu gpu_;
  device::Context context_;
  device::OwnedStream in_;
  device::OwnedStream out_;
  device::DeviceGuard guard_;
  device::BufferPool pool_;
  std::byte* const result_ = gpu_.allocate(1 << 20);
};

TEST_F(BuffersTest, BuffersAreUsedAgainWithoutWaitingOnTheHost) {
  for (int step = 0; step < 50; ++step) run_batch(1000 + static_cast<std::size_t>(step));
  EXPECT_EQ(pool_.allocations(), 1U)
      << "one is enough as long as it is given back before the next is asked for";
  EXPECT_EQ(gpu_.counts(0).synchronize, 0);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

TEST_F(BuffersTest, GrowsAndFreesOnlyWhatIsNoLongerUsed) {
  {
    device::BufferLease first = take(100);
    device::BufferLease second = take(100);
    EXPECT_NE(first.bytes().data(), second.bytes().data());
    first.release(context_.events()->record(in_.get()));
    second.release(context_.events()->record(in_.get()));
  }
  for (const std::size_t bytes : {100U, 100000U, 200000U, 400000U, 400000U, 100U}) run_batch(bytes);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_EQ(pool_.allocations(), 5U);
  run_batch(300000);
  EXPECT_EQ(pool_.allocations(), 5U);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

TEST_F(BuffersTest, ReservedOnesTakeTurnsAndSmallerBatchesNeedNoOthers) {
  pool_.reserve(100000);
  const std::byte* last = nullptr;
  for (const std::size_t bytes : {1U, 100000U, 5000U, 99999U}) {
    device::BufferLease lease = take(bytes);
    EXPECT_NE(lease.bytes().data(), last);
    last = lease.bytes().data();
    lease.release(nullptr);
  }
  EXPECT_EQ(pool_.allocations(), 2U);
  run_batch(200000);
  EXPECT_EQ(pool_.allocations(), 3U);
}

TEST_F(BuffersTest, WhatCannotBeReservedIsMadeWhenItIsNeeded) {
  gpu_.run_out_of_memory(0, 1);
  pool_.reserve(100000);
  run_batch(100);
  EXPECT_EQ(pool_.allocations(), 1U);
  run_batch(100000);
  EXPECT_EQ(pool_.allocations(), 2U);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

TEST(FusionBufferBytesTest, ABatchFitsWithItsPadding) {
  EXPECT_EQ(device::fusion_buffer_bytes(0), 0U) << "nothing is fused";
  EXPECT_EQ(device::fusion_buffer_bytes(1), 2U << 20);
  EXPECT_EQ(device::fusion_buffer_bytes(64 << 20), 68U << 20);
}

TEST_F(BuffersTest, ADroppedLeaseIsNeverUsedAgain) {
  std::byte* lost = nullptr;
  {
    const device::BufferLease lease = take(100);
    lost = lease.bytes().data();
  }
  for (int i = 0; i < 5; ++i) {
    device::BufferLease lease = take(100);
    EXPECT_NE(lease.bytes().data(), lost);
    lease.release(nullptr);
  }
}

}  // namespace
}  // namespace hvd::testing
