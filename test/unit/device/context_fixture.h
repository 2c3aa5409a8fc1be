#pragma once

#include <gtest/gtest.h>

#include "device/context.h"
#include "support/fake_gpu.h"

namespace hvd::testing {

/// A simulated GPU that is current, with two streams. Checks at the end of a test that no work is
/// left and no fault was found.
class ContextFixture : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_TRUE(gpu_.run_all());
    EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  }
  /// Writes the buffer in one stream and reads it in the other.
  /// @return the event after which the buffer is free
  EventPtr use(std::span<std::byte> buffer) {
    context_.api().fill(buffer.data(), buffer.size(), 1, 3, in_.get());
    context_.wait(out_.get(), context_.events()->record(in_.get()));
    context_.api().copy(result_, buffer.data(), buffer.size(), device::Direction::kOnDevice,
                        out_.get());
    return context_.events()->record(out_.get());
  }

  FakeGpu gpu_;
  device::Context context_{gpu_.api(0), 0};
  device::OwnedStream in_{context_};
  device::OwnedStream out_{context_};
  device::DeviceGuard guard_{context_.api(), 0};
  std::byte* const result_ = gpu_.allocate(1 << 20);
};

}  // namespace hvd::testing
