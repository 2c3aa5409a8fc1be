// When a rank checks the other ranks of its host.
#include "engine/peers.h"

#include <gtest/gtest.h>

#include "support/local_job.h"

namespace hvd::testing {
namespace {

/// The control plane of a rank that is alone in its job.
class LonelyPlane final : public control::ControlPlane {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  void ring(int) noexcept override {}
  const Topology& topology() const noexcept override { return topology_; }
  void send(int, std::span<const std::byte>) override {}
  void send(std::span<const int>, std::span<const std::byte>) override {}
  std::optional<control::Message> poll() override { return std::nullopt; }
  bool busy() const noexcept override { return false; }
  bool rung_by_all() const noexcept override { return true; }
  bool quiet() const noexcept override { return true; }
  Doorbell& doorbell() noexcept override { return doorbell_; }
  ArrivalFlags* arrival_flags(int) noexcept override { return nullptr; }
  ArrivalFlags* remote_arrival_flags() noexcept override { return nullptr; }
  void heartbeat(TimePoint) noexcept override {}
  std::optional<control::PeerLoss> check_peers(TimePoint, Duration) override {
    return std::nullopt;
  }
  std::uint32_t endings() const noexcept override { return ended; }
  void accuse(int, std::string_view) noexcept override {}
  void farewell() noexcept override {}

  std::uint32_t ended = 0;

 private:
  const Topology topology_{.rank = 0, .size = 1};
  Doorbell doorbell_;
};

TEST(PeerWatchTest, AnEndedProcessIsHandledAtOnce) {
  VirtualClock clock;
  const runtime::RuntimeOptions options;
  LonelyPlane plane;
  observe::Counters counters;
  runtime::StepTime time(clock, options.peer_timeout / 4);
  runtime::PeerWatch watch(options, plane, counters, time);
  EXPECT_TRUE(watch.due(true));
  EXPECT_FALSE(watch.due(true)) << "no time has passed";
  plane.ended = 1;
  EXPECT_TRUE(watch.due(true));
  EXPECT_FALSE(watch.due(true)) << "once for each";
  plane.ended = 3;
  EXPECT_TRUE(watch.due(false));
}

}  // namespace
}  // namespace hvd::testing
