#include "device/pinned_pool.h"

#include <gtest/gtest.h>

#include <vector>

#include "device/context.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

class PinnedPoolTest : public ::testing::Test {
 protected:
  explicit PinnedPoolTest(const FakeGpuOptions& options = {}) : gpu_(options) {}
  ~PinnedPoolTest() override {
    EXPECT_TRUE(gpu_.run_all());
    EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  }
  bool in_arena(const device::PinnedPool::Buffer& buffer) const {
    return arena_->offset_of(buffer.memory, buffer.capacity).has_value();
  }

  FakeGpu gpu_;
  device::Context context_{gpu_.api(0), 0};
  const device::OwnedStream stream_{context_};
  const device::DeviceGuard guard_{context_.api(), 0};
  std::shared_ptr<SharedArena> arena_ = SharedArena::create(1 << 20);
};

TEST_F(PinnedPoolTest, MemoryLiesInTheArenaAndGoesBackThere) {
  ASSERT_NE(arena_, nullptr);
  {
    device::PinnedPool pool(context_.api(), 0, arena_);
    const auto first = pool.take(10000);
    const auto second = pool.take(1);
    EXPECT_EQ(first.capacity, 12288U);
    EXPECT_EQ(second.capacity, 4096U);
    EXPECT_TRUE(in_arena(first));
    EXPECT_TRUE(in_arena(second));
    pool.give_back(first);
    pool.give_back(second);
  }
  EXPECT_EQ(gpu_.pinned(), 2);
  EXPECT_EQ(arena_->used(), 0U);
}

TEST_F(PinnedPoolTest, AFullArenaIsMadeUpForByTheDevicesLibrary) {
  device::PinnedPool pool(context_.api(), 0, arena_);
  const auto large = pool.take(std::size_t{2} << 20);
  const auto small = pool.take(4096);
  EXPECT_FALSE(in_arena(large));
  EXPECT_TRUE(in_arena(small));
  pool.give_back(large);
  pool.give_back(small);
}

TEST_F(PinnedPoolTest, MemoryIsUsedAgainOnceTheDeviceIsDoneWithIt) {
  device::PinnedPool pool(context_.api(), 0, arena_);
  std::byte* const tensor = gpu_.allocate(4096);
  auto buffer = pool.take(4096);
  context_.api().copy(tensor, buffer.memory, 4096, device::Direction::kToDevice, stream_.get());
  buffer.free_after = context_.events()->record(stream_.get());
  const std::byte* const memory = buffer.memory;
  pool.give_back(std::move(buffer));
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_EQ(pool.take(100).memory, memory);
}

TEST_F(PinnedPoolTest, MemoryThatIsNotGivenBackIsKept) {
  {
    device::PinnedPool pool(context_.api(), 0, arena_);
    pool.take(4096);
  }
  EXPECT_EQ(arena_->used(), 4096U);
}

TEST_F(PinnedPoolTest, WithoutAnArenaItComesFromTheDevicesLibrary) {
  device::PinnedPool pool(context_.api(), 0, nullptr);
  const auto buffer = pool.take(100);
  EXPECT_NE(buffer.memory, nullptr);
  EXPECT_EQ(gpu_.pinned(), 0);
  pool.give_back(buffer);
}

class UnpinnablePoolTest : public PinnedPoolTest {
 protected:
  UnpinnablePoolTest() : PinnedPoolTest({.can_pin = false}) {}
};

TEST_F(UnpinnablePoolTest, WhatTheSystemDoesNotPinGoesBackToTheArena) {
  device::PinnedPool pool(context_.api(), 0, arena_);
  for (int i = 0; i < 2; ++i) {
    const auto buffer = pool.take(4096);
    EXPECT_NE(buffer.memory, nullptr);
    EXPECT_FALSE(in_arena(buffer));
    EXPECT_EQ(arena_->used(), 0U);
    pool.give_back(buffer);
  }
}

}  // namespace
}  // namespace hvd::testing
