#include "device/marks.h"

#include <gtest/gtest.h>

#include "device/context.h"
#include "hvd/error.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

TEST(MarksTest, ARepeatedStepMakesNone) {
  FakeGpu gpu;
  device::Context context(gpu.api(0), 0);
  const device::OwnedStream stream(context);
  for (int step = 0; step < 100; ++step) {
    const EventPtr first = context.marks()->record(stream.get());
    const EventPtr second = context.marks()->record(stream.get());
    EXPECT_NE(first->native(), second->native());
    EXPECT_NE(first->native(), nullptr);
  }
  EXPECT_EQ(context.marks()->made(), 2U);
  EXPECT_TRUE(gpu.run_all());
  EXPECT_TRUE(gpu.faults().empty()) << gpu.faults().front();
}

TEST(MarksTest, AnEventTellsWhenItIsReachedAndMayOutliveItsPool) {
  FakeGpu gpu;
  EventPtr event;
  {
    device::Context context(gpu.api(0), 0);
    const device::OwnedStream stream(context);
    event = context.marks()->record(stream.get());
    gpu.run_all();
    EXPECT_TRUE(event->query());
  }
  EXPECT_TRUE(event->query());
  event.reset();
  EXPECT_TRUE(gpu.faults().empty());
}

TEST(MarksTest, AnEventOfNoDeviceIsRefused) {
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
