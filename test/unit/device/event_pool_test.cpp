#include "device/event_pool.h"

#include <gtest/gtest.h>

#include "device/context.h"
#include "hvd/error.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

TEST(EventPoolTest, ARepeatedStepMakesNone) {
  FakeGpu gpu;
  device::Context context(gpu.api(0), 0);
  const device::OwnedStream stream(context);
  for (int step = 0; step < 100; ++step) {
    const EventPtr first = context.events()->record(stream.get());
    const EventPtr second = context.events()->record(stream.get());
    EXPECT_NE(first->native(), second->native());
    EXPECT_NE(first->native(), nullptr);
  }
  EXPECT_EQ(context.events()->made(), 2U);
  EXPECT_TRUE(gpu.run_all());
  EXPECT_TRUE(gpu.faults().empty()) << gpu.faults().front();
}

TEST(EventPoolTest, AnEventTellsWhenItIsReachedAndMayOutliveItsPool) {
  FakeGpu gpu;
  EventPtr event;
  {
    device::Context context(gpu.api(0), 0);
    const device::OwnedStream stream(context);
    event = context.events()->record(stream.get());
    gpu.run_all();
    EXPECT_TRUE(event->query());
  }
  EXPECT_TRUE(event->query());
  event.reset();
  EXPECT_TRUE(gpu.faults().empty());
}

TEST(EventPoolTest, AnEventOfNoDeviceIsRefused) {
  class HostEvent final : public Event {
   public:
    bool query() const override { return true; }
  };
  FakeGpu gpu;
  device::Context context(gpu.api(0), 0);
  const device::OwnedStream stream(context);
  const device::DeviceGuard guard(context.api(), 0);
  context.wait(stream.get(), nullptr);
  EXPECT_THROW(context.wait(stream.get(), std::make_shared<HostEvent>()), Error);
}

}  // namespace
}  // namespace hvd::testing
