// The simulated GPU must detect the errors that it exists to detect.
#include "support/fake_gpu.h"

#include <gtest/gtest.h>

#include <cstring>

namespace hvd::testing {
namespace {

class FakeGpuTest : public ::testing::Test {
 protected:
  FakeGpuTest()
      : api_(gpu_.api(0)),
        guard_(*api_, 0),
        a_(api_->create_stream()),
        b_(api_->create_stream()),
        memory_(gpu_.allocate(1024)) {}

  FakeGpu gpu_;
  std::shared_ptr<device::Api> api_;
  device::DeviceGuard guard_;
  device::Stream a_;
  device::Stream b_;
  std::byte* memory_;
};

TEST_F(FakeGpuTest, WorkThatWaitsForAnEventIsInOrder) {
  const device::EventHandle event = api_->create_event();
  api_->fill(memory_, 256, 4, 7, a_);
  api_->record(event, a_);
  EXPECT_FALSE(gpu_.faults().size() > 0);
  api_->wait(b_, event);
  api_->copy(memory_ + 512, memory_, 512, device::Direction::kOnDevice, b_);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(gpu_.faults().empty());
  std::uint32_t value = 0;
  std::memcpy(&value, memory_ + 512, sizeof value);
  EXPECT_EQ(value, 7U);
}

TEST_F(FakeGpuTest, AMissingWaitIsARace) {
  api_->fill(memory_, 256, 4, 7, a_);
  api_->copy(memory_ + 512, memory_ + 256, 16, device::Direction::kOnDevice, b_);
  ASSERT_FALSE(gpu_.faults().empty());
  EXPECT_NE(gpu_.faults().front().find("reads what 'fill' on queue 0 writes"), std::string::npos)
      << gpu_.faults().front();
}

TEST_F(FakeGpuTest, AnEventRecordedTooEarlyDoesNotHelp) {
  const device::EventHandle event = api_->create_event();
  api_->record(event, a_);
  api_->fill(memory_, 256, 4, 7, a_);
  api_->wait(b_, event);
  api_->copy(memory_ + 512, memory_, 16, device::Direction::kOnDevice, b_);
  EXPECT_FALSE(gpu_.faults().empty());
}

TEST_F(FakeGpuTest, OverwritingMemoryThatIsReadIsARace) {
  api_->copy(memory_ + 512, memory_, 16, device::Direction::kOnDevice, a_);
  api_->fill(memory_, 4, 4, 7, b_);
  EXPECT_FALSE(gpu_.faults().empty());
}

TEST_F(FakeGpuTest, AnEventRecordedAgainOrdersBothPositions) {
  const device::EventHandle event = api_->create_event();
  const device::Stream c = api_->create_stream();
  api_->fill(memory_, 4, 4, 7, a_);
  api_->record(event, a_);
  api_->wait(b_, event);
  api_->copy(memory_ + 512, memory_, 16, device::Direction::kOnDevice, b_);
  api_->record(event, c);  // reached at once, which does not affect b
  gpu_.run_through(c, {"work", {}, {}, {}});
  EXPECT_TRUE(api_->reached(event));
  gpu_.run_through(b_, {"work", {}, {}, {}});
  std::uint32_t value = 0;
  std::memcpy(&value, memory_ + 512, sizeof value);
  EXPECT_EQ(value, 7U);
  EXPECT_TRUE(gpu_.drain_faults().empty());
}

TEST_F(FakeGpuTest, RunsThroughAQueueAndNotFurther) {
  api_->fill(memory_, 1, 4, 1, a_);
  const device::EventHandle event = api_->create_event();
  api_->record(event, a_);
  api_->fill(memory_, 1, 4, 2, a_);
  api_->wait(b_, event);
  gpu_.run_through(b_, {"work", {}, {}, {}});
  std::uint32_t value = 0;
  std::memcpy(&value, memory_, sizeof value);
  EXPECT_EQ(value, 1U);
}

TEST_F(FakeGpuTest, MemoryWithANewOwnerNeedsNoOrderOnceTheHostHasSeenTheEnd) {
  const device::EventHandle event = api_->create_event();
  api_->fill(memory_, 4, 4, 7, a_);
  gpu_.forget_seen(memory_);
  api_->fill(memory_, 4, 4, 8, b_);
  EXPECT_EQ(gpu_.drain_faults().size(), 1U);
  api_->record(event, b_);
  EXPECT_TRUE(gpu_.run_all());
  EXPECT_TRUE(api_->reached(event));
  gpu_.forget_seen(memory_);
  gpu_.run_through(a_, {"work", {{memory_, 16, true}}, {}, {}});
  EXPECT_EQ(gpu_.drain_faults().size(), 0U);
}

TEST_F(FakeGpuTest, HostMemoryAndFreedMemoryAreFaults) {
  std::byte own[16] = {};
  api_->copy(memory_, own, 16, device::Direction::kToDevice, a_);
  EXPECT_EQ(gpu_.faults().size(), 1U);
  std::byte* const freed = api_->allocate(64);
  api_->fill(freed, 16, 4, 7, a_);
  api_->release(freed);
  EXPECT_EQ(gpu_.faults().size(), 2U);
  api_->fill(freed, 16, 4, 7, a_);
  EXPECT_EQ(gpu_.faults().size(), 3U);
}

TEST(FakeGpuGuardTest, CallsWithoutTheDeviceAreFaults) {
  FakeGpu gpu;
  const auto api = gpu.api(0);
  api->create_stream();
  EXPECT_EQ(gpu.faults().size(), 1U);
}

}  // namespace
}  // namespace hvd::testing
