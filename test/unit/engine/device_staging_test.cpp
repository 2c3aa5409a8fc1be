// Tests how a batch is packed for a collective on a device and unpacked again, in cases that
// successful jobs do not cover.
#include "engine/device_staging.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "support/batches.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

using runtime::Batch;
using runtime::DeviceStaging;
using runtime::Staged;

/// A channel that has the given buffers; it may have no buffers.
class BufferedChannel final : public Channel {
 public:
  explicit BufferedChannel(std::vector<std::span<std::byte>> buffers)
      : buffers_(std::move(buffers)) {}
  std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte>,
                               std::span<std::byte>) override {
    return nullptr;
  }
  void abort() noexcept override {}
  std::span<const std::span<std::byte>> fusion_buffers() const noexcept override {
    return buffers_;
  }
  void release_fusion_buffers() noexcept override { ++given_back; }
  int given_back = 0;

 private:
  const std::vector<std::span<std::byte>> buffers_;
};

class DeviceStagingTest : public ::testing::Test {
 protected:
  DeviceStagingTest() : context_(gpu_.api(0), 0), kernels_(context_) {}

  /// Two tensors of four floats, in place.
  Batch fused() {
    std::vector<wire::Request> requests;
    std::vector<runtime::OperationPtr> operations;
    for (const char* const name : {"a", "b"}) {
      requests.push_back(float_request(name, 4));
      requests.back().device = DeviceType::kCuda;
      operations.push_back(float_state(requests.back(), shape_));
      TensorView& view = operations.back()->submission.input;
      view.data = gpu_.allocate(4 * sizeof(float));
      view.device = {DeviceType::kCuda, 0};
      operations.back()->submission.output = view;
    }
    return Batch(agreed_batch(requests, 2), std::move(operations), 0);
  }
  static const Staged& stage(DeviceStaging& staging, const Batch& batch) {
    EXPECT_TRUE(staging.ready(batch));
    return staging.stage(batch);
  }
  /// The collective, which the device begins when go_ is set.
  EventPtr reduce(const Staged& staged) {
    const device::DeviceGuard guard(context_.api(), 0);
    context_.wait(kernels_.get(), staged.collective.input_ready);
    FakeGpu::Item kernel;
    kernel.name = "allreduce";
    kernel.ranges = {{staged.out.data(), staged.out.size(), true}};
    kernel.ready = [this] { return go_; };
    gpu_.enqueue(kernels_.get(), std::move(kernel));
    return context_.events()->record(kernels_.get());
  }
  void expect_no_faults() {
    for (const std::string& fault : gpu_.faults()) ADD_FAILURE() << fault;
  }

  FakeGpu gpu_;
  device::Context context_;
  const device::OwnedStream kernels_;
  std::vector<float> shape_ = std::vector<float>(4);
  bool go_ = false;
};

TEST_F(DeviceStagingTest, TheCallersMayReadOnceTheDeviceHasUnpacked) {
  BufferedChannel channel({});
  DeviceStaging staging(context_, channel, true, 0);
  const Batch batch = fused();
  const EventPtr reduced = reduce(stage(staging, batch));
  const EventPtr ready = staging.unstage(batch, reduced);
  EXPECT_FALSE(gpu_.run_all()) << "the collective has not begun";
  EXPECT_FALSE(ready->query());
  const int launches = gpu_.counts(0).launches;
  EXPECT_EQ(launches, 2) << "one to pack and one to unpack, both queued by now";
  go_ = true;
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(ready->query());
  expect_no_faults();
}

TEST_F(DeviceStagingTest, BatchesFollowEachOtherInTheSameBuffersWithoutARace) {
  for (const bool own : {false, true}) {
    go_ = false;
    std::vector<std::span<std::byte>> buffers;
    if (own) buffers = {{gpu_.allocate(64), 64}};
    BufferedChannel channel(buffers);
    {
      DeviceStaging staging(context_, channel, true, 0);
      const Batch first = fused();
      const Batch second = fused();
      const Staged& staged = stage(staging, first);
      const std::byte* const buffer = staged.out.data();
      staging.unstage(first, reduce(staged));
      EXPECT_EQ(stage(staging, second).out.data(), buffer);
      go_ = true;
      staging.unstage(second, reduce(staged));
      EXPECT_TRUE(gpu_.run_all());
    }
    EXPECT_EQ(channel.given_back, 1);
  }
  expect_no_faults();
}

TEST_F(DeviceStagingTest, AbandonedBuffersStayAllocated) {
  for (const bool own : {false, true}) {
    std::vector<std::span<std::byte>> buffers;
    if (own) buffers = {{gpu_.allocate(64), 64}};
    BufferedChannel channel(buffers);
    std::optional<DeviceStaging> staging(std::in_place, context_, channel, true, 0);
    const Batch batch = fused();
    reduce(stage(*staging, batch));
    staging->abandon();
    staging.reset();
    EXPECT_EQ(channel.given_back, own ? 0 : 1) << "those that the device may still write to";
  }
  go_ = true;
  EXPECT_TRUE(gpu_.run_all());
  expect_no_faults();
}

TEST_F(DeviceStagingTest, AChannelsBuffersThatTheDeviceStillUsesAreNotGivenBack) {
  for (const bool ends : {false, true}) {
    BufferedChannel channel({{gpu_.allocate(64), 64}});
    {
      DeviceStaging staging(context_, channel, true, 0);
      const Batch batch = fused();
      go_ = ends;
      staging.unstage(batch, reduce(stage(staging, batch)));
      EXPECT_EQ(gpu_.run_all(), ends);
    }
    EXPECT_EQ(channel.given_back, ends ? 1 : 0);
    go_ = true;
    EXPECT_TRUE(gpu_.run_all());
  }
}

TEST_F(DeviceStagingTest, OneEventStandsBehindTwo) {
  BufferedChannel channel({});
  DeviceStaging staging(context_, channel, true, 0);
  EXPECT_EQ(staging.after_both(nullptr, nullptr), nullptr);
  const device::OwnedStream streams[] = {device::OwnedStream(context_),
                                         device::OwnedStream(context_)};
  for (const int late : {0, 1}) {
    bool go[] = {false, false};
    EventPtr events[2];
    for (const int i : {0, 1}) {
      const device::DeviceGuard guard(context_.api(), 0);
      FakeGpu::Item item;
      item.ready = [&go, i] { return go[i]; };
      gpu_.enqueue(streams[i].get(), std::move(item));
      events[i] = context_.events()->record(streams[i].get());
    }
    EXPECT_EQ(staging.after_both(events[0], nullptr), events[0]);
    EXPECT_EQ(staging.after_both(nullptr, events[1]), events[1]);
    const EventPtr both = staging.after_both(events[0], events[1]);
    go[1 - late] = true;
    gpu_.run_all();
    EXPECT_FALSE(both->query());
    go[late] = true;
    EXPECT_TRUE(gpu_.run_all());
    EXPECT_TRUE(both->query());
  }
}

}  // namespace
}  // namespace hvd::testing
