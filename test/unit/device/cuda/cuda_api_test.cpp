// Checks the calls of core/device/cuda for those rules of CUDA that need no device. test/gpu runs
// the calls on a device.
#include "device/cuda/cuda_api.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <thread>

#include "device/context.h"
#include "device/cuda/kernels.h"
#include "hvd/error.h"
#include "unit/device/cuda/fake_cudart.h"

namespace hvd::device {

// Replaces kernels.cu, which has its own test. A launch returns the last error.
cudaError_t launch_copy(const CopyLaunch&, int, cudaStream_t) { return cudaGetLastError(); }
cudaError_t launch_fill(std::byte*, std::size_t, std::size_t, std::uint64_t, int, cudaStream_t) {
  return cudaGetLastError();
}

}  // namespace hvd::device

namespace hvd::testing {
namespace {

using device::DeviceGuard;

class CudaApiTest : public ::testing::Test {
 protected:
  template <class Change>
  void set(const Change& change) {
    const std::lock_guard lock(fake_cudart().mutex);
    change(fake_cudart());
  }
  /// Calls every function that needs a current device.
  void call_everything() {
    const DeviceGuard guard(*api_, 1);
    const device::Stream stream = api_->create_stream();
    const device::EventHandle event = api_->create_event();
    std::byte* const memory = api_->allocate(64);
    std::byte* const pinned = api_->allocate_pinned(64);
    api_->pin(pinned, 64);
    api_->unpin(pinned);
    api_->copy(memory, pinned, 64, device::Direction::kToDevice, stream);
    api_->run({}, stream);
    api_->fill(memory, 1, 1, 0, stream);
    api_->record(event, stream);
    api_->wait(stream, event);
    api_->reached(event);
    api_->capturing(stream);
    api_->synchronize(stream);
    api_->release_pinned(pinned);
    api_->release(memory);
    api_->destroy_event(event);
    api_->destroy_stream(stream);
  }
  void TearDown() override {
    set([](FakeCudart& fake) {
      EXPECT_EQ(fake.spoiled_by, std::vector<std::string>());
      EXPECT_EQ(fake.without_context, std::vector<std::string>());
      fake.capture_under_way = false;
      fake.spoiled_by.clear();
      fake.without_context.clear();
      fake.event_query = fake.is_capturing = fake.free = fake.last_error = 0;
    });
    EXPECT_EQ(fake_context_depth(), 0U);
    EXPECT_EQ(fake_capture_mode(), 0);
  }

  const std::shared_ptr<device::Api> api_ = device::make_cuda_api();
};

TEST_F(CudaApiTest, KeepsCapturesOfOtherThreadsValid) {
  set([](FakeCudart& fake) { fake.capture_under_way = true; });
  call_everything();
  std::thread([this] { call_everything(); }).join();
}

TEST_F(CudaApiTest, EventsMayBeQueriedDuringACapture) {
  const auto context = std::make_shared<device::Context>(api_, 0);
  const EventPtr event = context->events()->record({});
  set([](FakeCudart& fake) { fake.capture_under_way = true; });
  EXPECT_TRUE(event->query());
}

TEST_F(CudaApiTest, GuardsNestAndRestoreTheThread) {
  {
    const DeviceGuard outer(*api_, 0);
    EXPECT_EQ(fake_capture_mode(), 2);
    {
      const DeviceGuard inner(*api_, 1);
      EXPECT_EQ(fake_context_depth(), 2U);
    }
    EXPECT_EQ(fake_capture_mode(), 2);
    EXPECT_EQ(fake_context_depth(), 1U);
  }
  EXPECT_THROW(api_->enter(7), Error);
}

TEST_F(CudaApiTest, CreatesNoContextOfAnotherDevice) {
  set([](FakeCudart& fake) { fake.retained.clear(); });
  EXPECT_EQ(api_->device_count(), 2);
  EXPECT_EQ(api_->info(1).bus_id, "0000:1b:00.0");
  device::describe_cuda();
  set([](FakeCudart& fake) { EXPECT_TRUE(fake.retained.empty()); });
  const auto fresh = device::make_cuda_api();
  { const DeviceGuard guard(*fresh, 1); }
  set([](FakeCudart& fake) { EXPECT_EQ(fake.retained, std::set<int>{1}); });
}

TEST_F(CudaApiTest, AnEventThatIsNotReachedIsNoError) {
  const DeviceGuard guard(*api_, 0);
  const device::EventHandle event = api_->create_event();
  set([](FakeCudart& fake) { fake.event_query = cudaErrorNotReady; });
  EXPECT_FALSE(api_->reached(event));
  EXPECT_NO_THROW(api_->run({}, {}));  // reports no earlier error
  set([](FakeCudart& fake) { fake.event_query = cudaErrorIllegalAddress; });
  EXPECT_THROW(api_->reached(event), Error);
  EXPECT_NO_THROW(api_->run({}, {}));
}

TEST_F(CudaApiTest, AFailedFreeIsNotTheNextLaunchsError) {
  const DeviceGuard guard(*api_, 0);
  set([](FakeCudart& fake) { fake.free = cudaErrorCudartUnloading; });
  api_->release(api_->allocate(1));
  EXPECT_NO_THROW(api_->run({}, {}));
  api_->release_pinned(api_->allocate_pinned(1));
  EXPECT_NO_THROW(api_->run({}, {}));
  std::byte memory{};
  api_->pin(&memory, 1);
  api_->unpin(&memory);
  EXPECT_NO_THROW(api_->run({}, {}));
  api_->destroy_event(api_->create_event());
  EXPECT_NO_THROW(api_->run({}, {}));
  api_->destroy_stream(api_->create_stream());
  EXPECT_NO_THROW(api_->run({}, {}));
}

TEST_F(CudaApiTest, TheDefaultStreamIsCapturedWithStreamsThatSynchroniseWithIt) {
  const DeviceGuard guard(*api_, 0);
  EXPECT_FALSE(api_->capturing({}));
  set([](FakeCudart& fake) { fake.is_capturing = 1; });
  EXPECT_TRUE(api_->capturing({}));
  set([](FakeCudart& fake) { fake.is_capturing = cudaErrorStreamCaptureImplicit; });
  EXPECT_TRUE(api_->capturing({}));
  EXPECT_NO_THROW(api_->run({}, {}));
}

}  // namespace
}  // namespace hvd::testing
