#include "device/helper_thread.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <vector>

#include "device/buffers.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

using device::HelperThread;

constexpr std::chrono::minutes kLong{1};

TEST(HelperThreadTest, RunsAllInOrderOnOneOtherThreadBeforeItEnds) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  {
    HelperThread helper(kLong);
    for (int i = 0; i < 100; ++i) {
      helper.run([&, i] {
        order.push_back(i);
        threads.push_back(std::this_thread::get_id());
      });
    }
  }
  ASSERT_EQ(order.size(), 100U);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(threads[static_cast<std::size_t>(i)], threads[0]);
  }
  EXPECT_NE(threads[0], std::this_thread::get_id());
}

TEST(HelperThreadTest, AFunctionThatDoesNotReturnIsLeftBehind) {
  const auto go = std::make_shared<std::promise<void>>();
  const auto ended = std::make_shared<std::promise<void>>();
  {
    HelperThread(std::chrono::milliseconds(1)).run([go, ended] {
      go->get_future().wait();
      ended->set_value();
    });
  }
  go->set_value();
  ended->get_future().wait();
}

TEST(HelperThreadTest, APoolGetsItsBuffersFromTheHelper) {
  FakeGpu gpu;
  const auto helper = std::make_shared<HelperThread>(kLong);
  {
    device::Context context(gpu.api(0), 0,
                            {.run_on_helper = [&helper](std::function<void()> function) {
                              helper->run(std::move(function));
                            }});
    const device::OwnedStream stream(context);
    std::promise<void> go;
    context.run_on_helper([&go] { go.get_future().wait(); });  // the device is slow
    device::BufferPool pool(context);
    const std::size_t sizes[] = {100, 200000};
    EXPECT_FALSE(pool.prepare(sizes));
    EXPECT_FALSE(pool.prepare(sizes)) << "without a second allocation";
    go.set_value();
    while (!pool.prepare(sizes)) std::this_thread::yield();
    EXPECT_EQ(pool.allocations(), 2U);
    const device::DeviceGuard guard(context.api(), 0);
    for (const std::size_t size : sizes) pool.lease(size, stream.get()).release(nullptr);
    EXPECT_TRUE(pool.prepare(sizes));
  }
  const std::size_t size = 1;
  device::Context context(gpu.api(1), 0,
                          {.run_on_helper = [&helper](std::function<void()> function) {
                            helper->run(std::move(function));
                          }});
  {
    device::BufferPool pool(context);
    pool.prepare({&size, 1});  // the pool is destroyed during the allocation
  }
  std::promise<void> all;
  helper->run([&all] { all.set_value(); });
  all.get_future().wait();
  EXPECT_EQ(gpu.counts(0).made, 2);
  EXPECT_EQ(gpu.counts(0).freed, 2);
  EXPECT_EQ(gpu.counts(1).made, gpu.counts(1).freed);
  EXPECT_EQ(gpu.counts(0).made_or_freed_by_maker + gpu.counts(1).made_or_freed_by_maker, 0);
  EXPECT_TRUE(gpu.faults().empty()) << gpu.faults().front();
}

}  // namespace
}  // namespace hvd::testing
