#include "device/buffer_ring.h"

#include <gtest/gtest.h>

#include <vector>

#include "device/context.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

class BufferRingTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kBytes = 1000;

  BufferRingTest()
      : context_(gpu_.api(0), 0),
        in_(context_),
        out_(context_),
        guard_(context_.api(), 0),
        ring_(context_.api()) {}

  FakeGpu gpu_;
  device::Context context_;
  device::OwnedStream in_;
  device::OwnedStream out_;
  device::DeviceGuard guard_;
  device::BufferRing ring_;
  const std::vector<std::span<std::byte>> buffers_{{gpu_.allocate(kBytes), kBytes},
                                                   {gpu_.allocate(kBytes), kBytes}};
  std::byte* const result_ = gpu_.allocate(kBytes);
};

TEST_F(BufferRingTest, TakesTurnsByCountWithoutWaitingOnTheHost) {
  for (std::size_t step = 0; step < 20; ++step) {
    const std::span<std::byte> buffer = ring_.take(buffers_, kBytes - step, in_.get());
    ASSERT_EQ(buffer.data(), buffers_[step % 2].data()) << "also where the other was free sooner";
    ASSERT_EQ(buffer.size(), kBytes - step);
    context_.api().fill(buffer.data(), buffer.size(), 1, 3, in_.get());
    context_.wait(out_.get(), context_.events()->record(in_.get()));
    context_.api().copy(result_, buffer.data(), buffer.size(), device::Direction::kOnDevice,
                        out_.get());
    ring_.release(context_.events()->record(out_.get()));
  }
  EXPECT_EQ(gpu_.counts(0).synchronize, 0);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

TEST_F(BufferRingTest, WhatDoesNotFitTakesNoTurn) {
  EXPECT_TRUE(ring_.take({}, 1, in_.get()).empty());
  EXPECT_TRUE(ring_.take(buffers_, 0, in_.get()).empty());
  EXPECT_TRUE(ring_.take(buffers_, kBytes + 1, in_.get()).empty());
  EXPECT_TRUE(ring_.idle());
  EXPECT_EQ(ring_.take(buffers_, kBytes, in_.get()).data(), buffers_[0].data());
}

TEST_F(BufferRingTest, IsIdleOnceTheDeviceIsDone) {
  EXPECT_TRUE(ring_.idle());
  const std::span<std::byte> buffer = ring_.take(buffers_, 8, in_.get());
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
