#include "device/probe.h"

#include <gmock/gmock.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "support/fake_gpu.h"
#include "unit/device/context_fixture.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A GPU whose calls fail, as after an illegal access, or do not return.
class BadApi final : public device::Api {
 public:
  explicit BadApi(bool hangs) : hangs_(hangs) {}
  /// Lets the calls that hang return.
  void end() { end_.store(true); }

  int device_count() noexcept override { return 1; }
  device::DeviceInfo info(int) override { return {}; }
  void enter(int) override {}
  void leave() noexcept override {}
  device::Stream create_stream() override { return {this}; }
  void destroy_stream(device::Stream) noexcept override {}
  device::EventHandle create_event() override { return {this}; }
  void destroy_event(device::EventHandle) noexcept override {}
  void record(device::EventHandle, device::Stream) override {
    while (hangs_ && !end_.load()) std::this_thread::sleep_for(milliseconds(1));
    if (!hangs_) throw Error("an illegal memory access was encountered");
  }
  void wait(device::Stream, device::EventHandle) override {}
  bool reached(device::EventHandle) override { return true; }
  bool capturing(device::Stream) override { return false; }
  void synchronize(device::Stream) override {}
  std::byte* allocate(std::size_t) override { return nullptr; }
  void release(std::byte*) noexcept override {}
  std::byte* allocate_pinned(std::size_t) override { return nullptr; }
  void release_pinned(std::byte*) noexcept override {}
  void pin(std::byte*, std::size_t) override {}
  void unpin(std::byte*) noexcept override {}
  void copy(std::byte*, const std::byte*, std::size_t, device::Direction, device::Stream) override {
  }
  void run(const device::CopyLaunch&, device::Stream) override {}
  void fill(std::byte*, std::size_t, std::size_t, std::uint64_t, device::Stream) override {}

 private:
  const bool hangs_;
  std::atomic<bool> end_ = false;
};

TEST(Probe, ADeviceThatWorksHasNoFailure) {
  FakeGpu gpu;
  const auto context = std::make_shared<device::Context>(gpu.api(0), 0);
  EXPECT_THAT(device::find_failure(context, std::chrono::seconds(10)), IsEmpty());
  EXPECT_THAT(device::find_failure(context, std::chrono::seconds(10)), IsEmpty());
  EXPECT_THAT(gpu.faults(), IsEmpty());
}

TEST(Probe, ABrokenContextIsFound) {
  const auto context = std::make_shared<device::Context>(std::make_shared<BadApi>(false), 0);
  EXPECT_THAT(device::find_failure(context, std::chrono::seconds(10)),
              HasSubstr("illegal memory access"));
  EXPECT_FALSE(context->api().given_up());
}

TEST(Probe, ADeviceThatDoesNotAnswerIsGivenUp) {
  const auto api = std::make_shared<BadApi>(true);
  const auto context = std::make_shared<device::Context>(api, 3);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(device::find_failure(context, milliseconds(50)), HasSubstr("device 3"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_TRUE(api->given_up());
  EXPECT_THAT(device::find_failure(context, std::chrono::seconds(10)), HasSubstr("given up"));
  api->end();
}

}  // namespace
}  // namespace hvd::testing
