#include "backend/staged/host_staged_channel.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "backend/composite/composite_work.h"
#include "device/pinned_pool.h"
#include "hvd/error.h"

namespace hvd::staged {
namespace {

/// Of a collective, between the device and the device.
constexpr std::size_t kPiecesUnderWay = 3;

/// What a channel and its works share.
struct Stage {
  Stage(std::unique_ptr<Channel> host_channel, std::shared_ptr<device::Context> on,
        const ChannelSpec& of, std::shared_ptr<SharedArena> arena, const StagingOptions& how)
      : host(std::move(host_channel)),
        device(std::move(on)),
        spec(of),
        options(how),
        down(*device),
        up(*device),
        pinned(*device, std::move(arena)) {
    if (options.makes_memory_beforehand)
      pinned.reserve(kPiecesUnderWay + device::PinnedPool::kMostInUse, options.chunk_bytes);
  }

  const std::unique_ptr<Channel> host;
  const std::shared_ptr<device::Context> device;
  const ChannelSpec spec;
  const StagingOptions options;
  const device::OwnedStream down;  // to the host
  const device::OwnedStream up;
  device::PinnedPool pinned;
};

/// A collective through the host's memory, in pieces if it can be cut. Per piece:
///
///   waiting --there is pinned memory: copy queued--> coming down --event reached--> down
///           --(in order)--> between the ranks --done--> copy up queued
class HostStagedWork final : public Work {
 public:
  HostStagedWork(std::shared_ptr<Stage> stage, const Collective& collective,
                 std::span<const std::byte> in, std::span<std::byte> out)
      : stage_(std::move(stage)), collective_(collective), in_(in), out_(out) {
    const device::DeviceGuard guard(stage_->device->api(), stage_->device->device());
    stage_->device->wait(stage_->down.get(), collective_.input_ready);
    stage_->device->wait(stage_->up.get(), collective_.input_ready);
    collective_.input_ready = nullptr;
    cut();
  }
  HostStagedWork(const HostStagedWork&) = delete;
  HostStagedWork& operator=(const HostStagedWork&) = delete;
  ~HostStagedWork() override = default;

  bool progress() override {
    const device::DeviceGuard guard(stage_->device->api(), stage_->device->device());
    moved_ = false;
    for (;;) {
      while (next_down_ < pieces_.size() && next_down_ < done_ + kPiecesUnderWay &&
             come_down(pieces_[next_down_]))
        ++next_down_;
      if (done_ == next_down_ || !between(pieces_[done_])) break;
      go_up(pieces_[done_++]);
      moved_ = true;
    }
    if (done_ < pieces_.size()) return false;
    if (!ready_) ready_ = stage_->device->events()->record(stage_->up.get());
    return true;
  }
  bool moved() const noexcept override { return moved_; }
  std::optional<Headway> headway() const noexcept override {
    if (done_ == pieces_.size() || !pieces_[done_].work) return std::nullopt;
    return composite::headway_of(done_ + next_down_, pieces_[done_].work->headway());
  }
  EventPtr output_ready() const override { return ready_; }

 private:
  struct Piece {
    std::span<const std::byte> in;  // on the device
    std::span<std::byte> out;
    std::int64_t count = 0;
    device::PinnedPool::Buffer host_in = {};
    device::PinnedPool::Buffer host_out = {};  // unless it is the same
    EventPtr down = {};
    std::unique_ptr<Work> work = {};
  };

  bool reads_input() const {
    return collective_.kind != OpKind::kBroadcast || collective_.root == stage_->spec.set_rank;
  }
  bool in_place() const {
    return (collective_.kind == OpKind::kAllreduce && collective_.op != ReduceOp::kAdasum) ||
           collective_.kind == OpKind::kBroadcast;
  }

  void cut() {
    if (!in_place()) return void(pieces_.push_back({in_, out_, collective_.count}));
    const std::size_t element = size_of(collective_.dtype);
    const std::size_t step =
        std::max<std::size_t>(stage_->options.chunk_bytes / element, 1) * element;
    for (std::size_t begin = 0; begin < out_.size(); begin += step) {
      const std::size_t bytes = std::min(step, out_.size() - begin);
      pieces_.push_back({reads_input() ? in_.subspan(begin, bytes) : in_.first(0),
                         out_.subspan(begin, bytes), static_cast<std::int64_t>(bytes / element)});
    }
  }

  bool take(device::PinnedPool::Buffer& buffer, std::size_t bytes) {
    if (buffer.memory == nullptr)
      buffer = stage_->pinned.take(bytes).value_or(device::PinnedPool::Buffer{});
    return buffer.memory != nullptr;
  }

  /// False: there is no memory yet.
  bool come_down(Piece& piece) {
    device::Api& api = stage_->device->api();
    if (!take(piece.host_in, in_place() ? piece.out.size() : piece.in.size())) return false;
    if (!in_place() && !take(piece.host_out, piece.out.size())) return false;
    if (!reads_input() || piece.in.empty()) return true;
    api.copy(piece.host_in.memory, piece.in.data(), piece.in.size(), device::Direction::kToHost,
             stage_->down.get());
    piece.down = stage_->device->events()->record(stage_->down.get());
    return true;
  }

  /// True when the ranks have exchanged the piece.
  bool between(Piece& piece) {
    if (!piece.work) {
      if (piece.down && !piece.down->query()) return false;
      piece.work = launch(piece);
    }
    if (piece.work->progress()) return true;
    moved_ = moved_ || piece.work->moved();
    return false;
  }

  std::unique_ptr<Work> launch(Piece& piece) {
    Collective collective = collective_;
    if (in_place()) collective.count = piece.count;
    const std::span<std::byte> in{piece.host_in.memory,
                                  in_place() ? piece.out.size() : piece.in.size()};
    const std::span<std::byte> out =
        in_place() ? in : std::span<std::byte>{piece.host_out.memory, piece.out.size()};
    if (collective.op != ReduceOp::kAdasum || collective.kind != OpKind::kAllreduce)
      return stage_->host->launch(collective, in, out);
    const composite::Launch host =
        [stage = stage_](const Collective& part, std::span<const std::byte> from,
                         std::span<std::byte> to) { return stage->host->launch(part, from, to); };
    return composite::make_adasum(host, collective, stage_->spec, in, out);
  }

  void go_up(Piece& piece) {
    piece.work.reset();
    device::PinnedPool::Buffer& source = in_place() ? piece.host_in : piece.host_out;
    if (!piece.out.empty()) {
      stage_->device->api().copy(piece.out.data(), source.memory, piece.out.size(),
                                 device::Direction::kToDevice, stage_->up.get());
      source.free_after = stage_->device->events()->record(stage_->up.get());
    }
    stage_->pinned.give_back(std::move(piece.host_in));
    if (piece.host_out.memory != nullptr) stage_->pinned.give_back(std::move(piece.host_out));
  }

  const std::shared_ptr<Stage> stage_;
  Collective collective_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  std::vector<Piece> pieces_;
  std::size_t next_down_ = 0;
  std::size_t done_ = 0;
  bool moved_ = false;
  EventPtr ready_;
};

class HostStagedChannel final : public Channel {
 public:
  explicit HostStagedChannel(std::shared_ptr<Stage> stage) : stage_(std::move(stage)) {}
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    return std::make_unique<HostStagedWork>(stage_, collective, in, out);
  }
  void abort() noexcept override { stage_->host->abort(); }
  Channel* host() noexcept override { return stage_->host.get(); }

 private:
  const std::shared_ptr<Stage> stage_;
};

}  // namespace

std::unique_ptr<Channel> make_host_staged_channel(std::unique_ptr<Channel> host,
                                                  std::shared_ptr<device::Context> device,
                                                  const ChannelSpec& spec,
                                                  std::shared_ptr<SharedArena> arena,
                                                  const StagingOptions& options) {
  return std::make_unique<HostStagedChannel>(
      std::make_shared<Stage>(std::move(host), std::move(device), spec, std::move(arena), options));
}

}  // namespace hvd::staged
