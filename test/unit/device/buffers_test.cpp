#include "device/buffers.h"

#include <span>
#include <vector>

#include "unit/device/context_fixture.h"

namespace hvd::testing {
namespace {

class BuffersTest : public ContextFixture {
 protected:
  device::BufferLease lease_buffer(std::size_t bytes) {
    EXPECT_TRUE(pool_.prepare({&bytes, 1}));
    return pool_.lease(bytes, in_.get());
  }
  void run_batch(std::size_t bytes) {
    device::BufferLease lease = lease_buffer(bytes);
    ASSERT_EQ(lease.bytes().size(), bytes);
    lease.release(use(lease.bytes()));
  }

  device::BufferPool pool_{context_};
};

TEST_F(BuffersTest, BuffersAreReusedWithoutWaitingOnTheHost) {
  for (int step = 0; step < 50; ++step) run_batch(1000 + static_cast<std::size_t>(step));
  EXPECT_EQ(pool_.allocations(), 1U)
      << "one buffer suffices if each batch releases it before the next one begins";
  EXPECT_EQ(gpu_.counts(0).synchronize, 0);
}

TEST_F(BuffersTest, GrowsAndFreesOnlyUnusedBuffers) {
  {
    device::BufferLease first = lease_buffer(100);
    device::BufferLease second = lease_buffer(100);
    EXPECT_NE(first.bytes().data(), second.bytes().data());
    first.release(context_.events()->record(in_.get()));
    second.release(context_.events()->record(in_.get()));
  }
  for (const std::size_t bytes : {100U, 100000U, 200000U, 400000U, 400000U, 100U}) run_batch(bytes);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_EQ(pool_.allocations(), 5U);
  run_batch(300000);
  EXPECT_EQ(pool_.allocations(), 5U);
}

TEST_F(BuffersTest, ReservedBuffersAlternateAndServeSmallerBatches) {
  pool_.reserve(100000);
  const std::byte* last = nullptr;
  for (const std::size_t bytes : {1U, 100000U, 5000U, 99999U}) {
    device::BufferLease lease = lease_buffer(bytes);
    EXPECT_NE(lease.bytes().data(), last);
    last = lease.bytes().data();
    lease.release(nullptr);
  }
  EXPECT_EQ(pool_.allocations(), 2U);
  run_batch(200000);
  EXPECT_EQ(pool_.allocations(), 3U);
}

TEST_F(BuffersTest, BuffersThatCannotBeReservedAreAllocatedWhenNeeded) {
  gpu_.run_out_of_memory(0, 1);
  pool_.reserve(100000);
  run_batch(100);
  EXPECT_EQ(pool_.allocations(), 1U);
  run_batch(100000);
  EXPECT_EQ(pool_.allocations(), 2U);
}

TEST(FusionBufferBytesTest, ABatchFitsWithItsPadding) {
  EXPECT_EQ(device::fusion_buffer_bytes(0), 0U) << "fusion is off";
  EXPECT_EQ(device::fusion_buffer_bytes(1), 2U << 20);
  EXPECT_EQ(device::fusion_buffer_bytes(64 << 20), 68U << 20);
}

TEST_F(BuffersTest, ADroppedLeaseIsNeverReused) {
  std::byte* lost = nullptr;
  {
    const device::BufferLease lease = lease_buffer(100);
    lost = lease.bytes().data();
  }
  for (int i = 0; i < 5; ++i) {
    device::BufferLease lease = lease_buffer(100);
    EXPECT_NE(lease.bytes().data(), lost);
    lease.release(nullptr);
  }
}

class BufferRingTest : public ContextFixture {
 protected:
  static constexpr std::size_t kBytes = 1000;

  device::BufferRing ring_{context_.api()};
  const std::vector<std::span<std::byte>> buffers_{{gpu_.allocate(kBytes), kBytes},
                                                   {gpu_.allocate(kBytes), kBytes}};
};

TEST_F(BufferRingTest, AlternatesByCountWithoutWaitingOnTheHost) {
  for (std::size_t step = 0; step < 20; ++step) {
    const std::span<std::byte> buffer = ring_.acquire(buffers_, kBytes - step, in_.get());
    ASSERT_EQ(buffer.data(), buffers_[step % 2].data())
        << "even if the other buffer was free earlier";
    ASSERT_EQ(buffer.size(), kBytes - step);
    ring_.release(use(buffer));
  }
  EXPECT_EQ(gpu_.counts(0).synchronize, 0);
}

TEST_F(BufferRingTest, ASizeThatDoesNotFitKeepsThePosition) {
  EXPECT_TRUE(ring_.acquire({}, 1, in_.get()).empty());
  EXPECT_TRUE(ring_.acquire(buffers_, 0, in_.get()).empty());
  EXPECT_TRUE(ring_.acquire(buffers_, kBytes + 1, in_.get()).empty());
  EXPECT_TRUE(ring_.idle());
  EXPECT_EQ(ring_.acquire(buffers_, kBytes, in_.get()).data(), buffers_[0].data());
}

TEST_F(BufferRingTest, IsIdleOnceTheDeviceIsDone) {
  EXPECT_TRUE(ring_.idle());
  const std::span<std::byte> buffer = ring_.acquire(buffers_, 8, in_.get());
  EXPECT_FALSE(ring_.idle());
  FakeGpu::Item slow;
  bool go = false;
  slow.ready = [&go] { return go; };
  gpu_.enqueue(in_.get(), std::move(slow));
  context_.api().fill(buffer.data(), buffer.size(), 1, 3, in_.get());
  ring_.release(context_.events()->record(in_.get()));
  EXPECT_FALSE(ring_.idle());
  go = true;
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(ring_.idle());
}

}  // namespace
}  // namespace hvd::testing
