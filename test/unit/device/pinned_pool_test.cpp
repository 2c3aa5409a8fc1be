#include "device/pinned_pool.h"

#include <gtest/gtest.h>

#include <functional>
#include <utility>
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

  /// At once: its memory is made on this thread.
  static device::PinnedPool::Buffer take(device::PinnedPool& pool, std::size_t bytes) {
    auto taken = pool.take(bytes);
    EXPECT_TRUE(taken.has_value());
    return taken.value_or(device::PinnedPool::Buffer{});
  }
  /// Given back with a copy to the device behind it, which has not begun.
  void give_back_in_use(device::PinnedPool& pool, device::PinnedPool::Buffer buffer) {
    std::byte* const tensor = gpu_.allocate(buffer.capacity);
    context_.api().copy(tensor, buffer.memory, buffer.capacity, device::Direction::kToDevice,
                        stream_.get());
    buffer.free_after = context_.events()->record(stream_.get());
    pool.give_back(std::move(buffer));
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
    device::PinnedPool pool(context_, arena_);
    const auto first = take(pool, 10000);
    const auto second = take(pool, 1);
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
  device::PinnedPool pool(context_, arena_);
  const auto large = take(pool, std::size_t{2} << 20);
  const auto small = take(pool, 4096);
  EXPECT_FALSE(in_arena(large));
  EXPECT_TRUE(in_arena(small));
  pool.give_back(large);
  pool.give_back(small);
}

TEST_F(PinnedPoolTest, MemoryIsUsedAgainOnceTheDeviceIsDoneWithIt) {
  device::PinnedPool pool(context_, arena_);
  auto buffer = take(pool, 4096);
  const std::byte* const memory = buffer.memory;
  give_back_in_use(pool, std::move(buffer));
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_EQ(take(pool, 100).memory, memory);
}

TEST_F(PinnedPoolTest, MemoryThatIsNotGivenBackIsKept) {
  {
    device::PinnedPool pool(context_, arena_);
    take(pool, 4096);
  }
  EXPECT_EQ(arena_->used(), 4096U);
}

TEST_F(PinnedPoolTest, WithoutAnArenaItComesFromTheDevicesLibrary) {
  device::PinnedPool pool(context_, nullptr);
  const auto buffer = take(pool, 100);
  EXPECT_NE(buffer.memory, nullptr);
  EXPECT_EQ(gpu_.pinned(), 0);
  pool.give_back(buffer);
}

TEST_F(PinnedPoolTest, ItIsMadeAndFreedAside) {
  std::vector<std::function<void()>> aside;
  device::Context context(gpu_.api(0), 0, {.run_aside = [&aside](std::function<void()> function) {
                            aside.push_back(std::move(function));
                          }});
  const auto run_aside = [&aside] {
    for (const auto& function : std::exchange(aside, {})) function();
  };
  {
    device::PinnedPool pool(context, arena_);
    EXPECT_FALSE(pool.take(100));
    EXPECT_FALSE(pool.take(5000)) << "one after the other";
    EXPECT_EQ(aside.size(), 1U);
    run_aside();
    pool.give_back(take(pool, 100));
    EXPECT_FALSE(pool.take(5000));
    EXPECT_EQ(gpu_.counts(0).pinned_made, 1);
  }
  EXPECT_EQ(gpu_.counts(0).pinned_freed, 0);
  run_aside();
  EXPECT_EQ(gpu_.counts(0).pinned_made, 2);
  EXPECT_EQ(gpu_.counts(0).pinned_freed, 2) << "that nobody took, too";
  EXPECT_EQ(arena_->used(), 0U);
}

TEST_F(PinnedPoolTest, WhatIsReservedIsEnoughForWhatIsUnderWayAndWhatTheDeviceUses) {
  device::PinnedPool pool(context_, arena_);
  constexpr std::size_t kUnderWay = 2;
  pool.reserve(kUnderWay + device::PinnedPool::kMostInUse, 4096);
  EXPECT_EQ(gpu_.counts(0).pinned_made, 5);
  for (int round = 0; round < 20; ++round) {
    std::vector<device::PinnedPool::Buffer> taken;
    while (taken.size() < kUnderWay) {
      if (auto buffer = pool.take(4096)) {
        taken.push_back(std::move(*buffer));
      } else {
        gpu_.run_all();
      }
    }
    for (auto& buffer : taken) give_back_in_use(pool, std::move(buffer));
  }
  EXPECT_EQ(gpu_.counts(0).pinned_made, 5);
}

TEST_F(PinnedPoolTest, BehindADeviceThatIsLateItWaitsAndMakesNoMore) {
  bool go = false;
  FakeGpu::Item late;
  late.ready = [&go] { return go; };
  gpu_.enqueue(stream_.get(), std::move(late));
  device::PinnedPool pool(context_, arena_);
  std::vector<device::PinnedPool::Buffer> taken;
  for (std::size_t i = 0; i < device::PinnedPool::kMostInUse; ++i) taken.push_back(take(pool, 100));
  for (auto& buffer : taken) give_back_in_use(pool, std::move(buffer));
  for (int asked = 0; asked < 5; ++asked) EXPECT_FALSE(pool.take(100));
  EXPECT_EQ(gpu_.counts(0).pinned_made, 3);
  go = true;
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(pool.take(100));
}

class UnpinnablePoolTest : public PinnedPoolTest {
 protected:
  UnpinnablePoolTest() : PinnedPoolTest({.can_pin = false}) {}
};

TEST_F(UnpinnablePoolTest, WhatTheSystemDoesNotPinGoesBackToTheArena) {
  device::PinnedPool pool(context_, arena_);
  for (int i = 0; i < 2; ++i) {
    const auto buffer = take(pool, 4096);
    EXPECT_NE(buffer.memory, nullptr);
    EXPECT_FALSE(in_arena(buffer));
    EXPECT_EQ(arena_->used(), 0U);
    pool.give_back(buffer);
  }
}

}  // namespace
}  // namespace hvd::testing
