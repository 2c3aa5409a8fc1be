#include "transport/control_plane.h"

#include <array>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::control {
namespace {

class SelfControlPlane final : public ControlPlane {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  const Topology& topology() const noexcept override { return topology_; }
  Doorbell& doorbell() noexcept override { return doorbell_; }
  void ring(int /*world_rank*/) noexcept override { doorbell_.ring(); }

  void send(int rank, std::span<const std::byte> /*message*/) override {
    throw Error(text("sending to rank ", rank, ": this job has one rank"));
  }
  void send(std::span<const int> ranks, std::span<const std::byte> message) override {
    for (const int rank : ranks) send(rank, message);
  }
  std::optional<Message> poll() override { return std::nullopt; }
  bool busy() const noexcept override { return false; }
  bool quiet() const noexcept override { return true; }
  bool rung_by_all() const noexcept override { return true; }

  ArrivalFlags* arrival_flags(int /*rank*/, int flag) noexcept override {
    return &arrival_flags_[static_cast<std::size_t>(flag)];
  }
  ArrivalFlags* remote_arrival_flags() noexcept override { return nullptr; }

  void heartbeat(TimePoint /*now*/) noexcept override {}
  std::optional<PeerLoss> check_peers(TimePoint /*now*/, Duration /*timeout*/) override {
    return std::nullopt;
  }
  void report_loss(int /*rank*/, std::string_view /*cause*/) noexcept override {}
  void farewell() noexcept override {}

 private:
  const Topology topology_ = make_topology(0, {"localhost"});
  Doorbell doorbell_;
  std::array<ArrivalFlags, kArrivalFlags> arrival_flags_{};
};

}  // namespace

std::unique_ptr<ControlPlane> make_self_control_plane() {
  return std::make_unique<SelfControlPlane>();
}

}  // namespace hvd::control
