#include "transport/control_plane.h"

#include <deque>
#include <utility>

namespace hvd::control {
namespace {

class SelfControlPlane final : public ControlPlane {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  const Topology& topology() const noexcept override { return topology_; }
  Doorbell& doorbell() noexcept override { return doorbell_; }
  void ring(int /*world_rank*/) noexcept override { doorbell_.ring(); }

  void report(std::span<const std::byte> message) override { send(0, message); }
  void publish(std::span<const std::byte> message) override { send(0, message); }
  void send(int /*rank*/, std::span<const std::byte> message) override {
    queue_.push_back({0, {message.begin(), message.end()}});
    doorbell_.ring();
  }
  void send(std::span<const int> /*ranks*/, std::span<const std::byte> /*message*/) override {}
  std::optional<Message> poll() override {
    if (queue_.empty()) return std::nullopt;
    Message message = std::move(queue_.front());
    queue_.pop_front();
    return message;
  }
  bool busy() const noexcept override { return !queue_.empty(); }
  bool quiet() const noexcept override { return queue_.empty(); }
  bool rung_by_all() const noexcept override { return true; }

  ArrivalFlags* arrival_flags(int /*rank*/) noexcept override { return &arrival_flags_; }
  ArrivalFlags* remote_arrival_flags() noexcept override { return nullptr; }

  void heartbeat(TimePoint /*now*/) noexcept override {}
  std::optional<PeerLoss> check_peers(TimePoint /*now*/, Duration /*timeout*/) override {
    return std::nullopt;
  }
  void accuse(int /*rank*/, std::string_view /*cause*/) noexcept override {}
  void farewell() noexcept override {}

 private:
  const Topology topology_ = make_topology(0, {"localhost"});
  std::deque<Message> queue_;
  Doorbell doorbell_;
  ArrivalFlags arrival_flags_{};
};

}  // namespace

std::unique_ptr<ControlPlane> make_self_control_plane() {
  return std::make_unique<SelfControlPlane>();
}

}  // namespace hvd::control
