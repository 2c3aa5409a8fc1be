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

  /// Acquires a buffer whose memory is allocated at once on this thread.
  static device::PinnedPool::Buffer acquire(device::PinnedPool& pool, std::size_t bytes) {
    auto acquired = pool.acquire(bytes);
    EXPECT_TRUE(acquired.has_value());
    return acquired.value_or(device::PinnedPool::Buffer{});
  }
  /// Releases the buffer while a copy from it to the device is queued.
  void release_in_use(device::PinnedPool& pool, device::PinnedPool::Buffer buffer) {
    std::byte* const tensor = gpu_.allocate(buffer.capacity);
    context_.api().copy(tensor, buffer.memory, buffer.capacity, device::Direction::kToDevice,
                        stream_.get());
    buffer.free_after = context_.events()->record(stream_.get());
    pool.release(std::move(buffer));
  }

  FakeGpu gpu_;
  device::Context context_{gpu_.api(0), 0};
  const device::OwnedStream stream_{context_};
  const device::DeviceGuard guard_{context_.api(), 0};
  std::shared_ptr<SharedArena> arena_ = SharedArena::create(1 << 20);
};

TEST_F(PinnedPoolTest, MemoryIsInTheArenaAndReturnsThere) {
  ASSERT_NE(arena_, nullptr);
  {
    device::PinnedPool pool(context_, arena_);
    const auto first = acquire(pool, 10000);
    const auto second = acquire(pool, 1);
    EXPECT_EQ(first.capacity, 12288U);
    EXPECT_EQ(second.capacity, 4096U);
    EXPECT_TRUE(in_arena(first));
    EXPECT_TRUE(in_arena(second));
    pool.release(first);
    pool.release(second);
  }
  EXPECT_EQ(gpu_.pinned(), 2);
  EXPECT_EQ(arena_->used(), 0U);
}

TEST_F(PinnedPoolTest, TheDevicesLibraryReplacesAFullArena) {
  device::PinnedPool pool(context_, arena_);
  const auto large = acquire(pool, std::size_t{2} << 20);
  const auto small = acquire(pool, 4096);
  EXPECT_FALSE(in_arena(large));
  EXPECT_TRUE(in_arena(small));
  pool.release(large);
  pool.release(small);
}

TEST_F(PinnedPoolTest, MemoryIsReusedOnceTheDeviceHasFinished) {
  device::PinnedPool pool(context_, arena_);
  auto buffer = acquire(pool, 4096);
  const std::byte* const memory = buffer.memory;
  release_in_use(pool, std::move(buffer));
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_EQ(acquire(pool, 100).memory, memory);
}

TEST_F(PinnedPoolTest, MemoryThatIsNotReleasedIsKept) {
  {
    device::PinnedPool pool(context_, arena_);
    acquire(pool, 4096);
  }
  EXPECT_EQ(arena_->used(), 4096U);
}

TEST_F(PinnedPoolTest, WithoutAnArenaItComesFromTheDevicesLibrary) {
  device::PinnedPool pool(context_, nullptr);
  const auto buffer = acquire(pool, 100);
  EXPECT_NE(buffer.memory, nullptr);
  EXPECT_EQ(gpu_.pinned(), 0);
  pool.release(buffer);
}

TEST_F(PinnedPoolTest, AllocatesAndFreesOnTheHelper) {
  std::vector<std::function<void()>> queued;
  device::Context context(gpu_.api(0), 0,
                          {.run_on_helper = [&queued](std::function<void()> function) {
                            queued.push_back(std::move(function));
                          }});
  const auto run_on_helper = [&queued] {
    for (const auto& function : std::exchange(queued, {})) function();
  };
  {
    device::PinnedPool pool(context, arena_);
    EXPECT_FALSE(pool.acquire(100));
    EXPECT_FALSE(pool.acquire(5000)) << "one allocation at a time";
    EXPECT_EQ(queued.size(), 1U);
    run_on_helper();
    pool.release(acquire(pool, 100));
    EXPECT_FALSE(pool.acquire(5000));
    EXPECT_EQ(gpu_.counts(0).pinned_made, 1);
  }
  EXPECT_EQ(gpu_.counts(0).pinned_freed, 0);
  run_on_helper();
  EXPECT_EQ(gpu_.counts(0).pinned_made, 2);
  EXPECT_EQ(gpu_.counts(0).pinned_freed, 2) << "including the buffer that was never acquired";
  EXPECT_EQ(arena_->used(), 0U);
}

TEST_F(PinnedPoolTest, ReservedBuffersSufficeForPiecesUnderWayAndInUse) {
  device::PinnedPool pool(context_, arena_);
  constexpr std::size_t kUnderWay = 2;
  pool.reserve(kUnderWay + device::PinnedPool::kMaxInUse, 4096);
  EXPECT_EQ(gpu_.counts(0).pinned_made, 5);
  for (int round = 0; round < 20; ++round) {
    std::vector<device::PinnedPool::Buffer> acquired;
    while (acquired.size() < kUnderWay) {
      if (auto buffer = pool.acquire(4096)) {
        acquired.push_back(std::move(*buffer));
      } else {
        gpu_.run_all();
      }
    }
    for (auto& buffer : acquired) release_in_use(pool, std::move(buffer));
  }
  EXPECT_EQ(gpu_.counts(0).pinned_made, 5);
}

TEST_F(PinnedPoolTest, WaitsForALateDeviceWithoutFurtherAllocations) {
  bool go = false;
  FakeGpu::Item late;
  late.ready = [&go] { return go; };
  gpu_.enqueue(stream_.get(), std::move(late));
  device::PinnedPool pool(context_, arena_);
  std::vector<device::PinnedPool::Buffer> acquired;
  for (std::size_t i = 0; i < device::PinnedPool::kMaxInUse; ++i)
    acquired.push_back(acquire(pool, 100));
  for (auto& buffer : acquired) release_in_use(pool, std::move(buffer));
  for (int asked = 0; asked < 5; ++asked) EXPECT_FALSE(pool.acquire(100));
  EXPECT_EQ(gpu_.counts(0).pinned_made, 3);
  go = true;
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(pool.acquire(100));
}

class UnpinnablePoolTest : public PinnedPoolTest {
 protected:
  UnpinnablePoolTest() : PinnedPoolTest({.can_pin = false}) {}
};

TEST_F(UnpinnablePoolTest, MemoryThatCannotBePinnedReturnsToTheArena) {
  device::PinnedPool pool(context_, arena_);
  for (int i = 0; i < 2; ++i) {
    const auto buffer = acquire(pool, 4096);
    EXPECT_NE(buffer.memory, nullptr);
    EXPECT_FALSE(in_arena(buffer));
    EXPECT_EQ(arena_->used(), 0U);
    pool.release(buffer);
  }
}

}  // namespace
}  // namespace hvd::testing
