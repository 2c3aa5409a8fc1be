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

/// Pieces of a collective that are copied or exchanged at the same time.
constexpr std::size_t kPiecesUnderWay = 3;

/// Resources that a channel shares with its Works.
struct Resources {
  Resources(std::unique_ptr<Channel> host_channel, std::shared_ptr<device::Context> context,
            const ChannelSpec& channel_spec, std::shared_ptr<SharedArena> arena,
            const StagingOptions& staging_options)
      : host(std::move(host_channel)),
        device(std::move(context)),
        spec(channel_spec),
        options(staging_options),
        down(*device),
        up(*device),
        pinned(*device, std::move(arena)) {
    if (options.allocates_in_advance)
      pinned.reserve(kPiecesUnderWay + device::PinnedPool::kMaxInUse, options.chunk_bytes);
  }

  const std::unique_ptr<Channel> host;
  const std::shared_ptr<device::Context> device;
  const ChannelSpec spec;
  const StagingOptions options;
  const device::OwnedStream down;  // copies to the host
  const device::OwnedStream up;    // copies to the device
  device::PinnedPool pinned;
};

/// Runs a collective through the host's memory, in pieces if it can be cut. Each piece passes
/// through these states:
///
///   waiting --pinned memory acquired, copy queued--> copying down --event reached--> on the host
///           --(in order)--> exchanged between the ranks --done--> copy up queued
class HostStagedWork final : public Work {
 public:
  HostStagedWork(std::shared_ptr<Resources> resources, const Collective& collective,
                 std::span<const std::byte> in, std::span<std::byte> out)
      : resources_(std::move(resources)), collective_(collective), in_(in), out_(out) {
    const device::DeviceGuard guard(resources_->device->api(), resources_->device->device());
    resources_->device->wait(resources_->down.get(), collective_.input_ready);
    resources_->device->wait(resources_->up.get(), collective_.input_ready);
    collective_.input_ready = nullptr;
    cut();
  }
  HostStagedWork(const HostStagedWork&) = delete;
  HostStagedWork& operator=(const HostStagedWork&) = delete;
  ~HostStagedWork() override = default;

  bool progress() override {
    const device::DeviceGuard guard(resources_->device->api(), resources_->device->device());
    moved_ = false;
    for (;;) {
      while (next_down_ < pieces_.size() && next_down_ < done_ + kPiecesUnderWay &&
             copy_down(pieces_[next_down_]))
        ++next_down_;
      if (done_ == next_down_ || !exchange(pieces_[done_])) break;
      copy_up(pieces_[done_++]);
      moved_ = true;
    }
    if (done_ < pieces_.size()) return false;
    if (!ready_) ready_ = resources_->device->events()->record(resources_->up.get());
    return true;
  }
  bool moved() const noexcept override { return moved_; }
  std::optional<ProgressCount> progress_count() const noexcept override {
    if (done_ == pieces_.size() || !pieces_[done_].work) return std::nullopt;
    return composite::progress_count_of(done_ + next_down_, pieces_[done_].work->progress_count());
  }
  EventPtr output_ready() const override { return ready_; }

 private:
  struct StagedPiece {
    std::span<const std::byte> in;  // on the device
    std::span<std::byte> out;
    std::int64_t count = 0;
    device::PinnedPool::Buffer host_in = {};
    device::PinnedPool::Buffer host_out = {};  // empty if the result is in host_in
    EventPtr down = {};
    std::unique_ptr<Work> work = {};
  };

  bool reads_input() const {
    return collective_.kind != OpKind::kBroadcast || collective_.root == resources_->spec.set_rank;
  }
  bool in_place() const {
    return (collective_.kind == OpKind::kAllreduce && collective_.op != ReduceOp::kAdasum) ||
           collective_.kind == OpKind::kBroadcast;
  }

  void cut() {
    if (!in_place()) return void(pieces_.push_back({in_, out_, collective_.count}));
    const std::size_t element = size_of(collective_.dtype);
    const std::size_t step =
        std::max<std::size_t>(resources_->options.chunk_bytes / element, 1) * element;
    for (std::size_t begin = 0; begin < out_.size(); begin += step) {
      const std::size_t bytes = std::min(step, out_.size() - begin);
      pieces_.push_back({reads_input() ? in_.subspan(begin, bytes) : in_.first(0),
                         out_.subspan(begin, bytes), static_cast<std::int64_t>(bytes / element)});
    }
  }

  bool acquire(device::PinnedPool::Buffer& buffer, std::size_t bytes) {
    if (buffer.memory == nullptr)
      buffer = resources_->pinned.acquire(bytes).value_or(device::PinnedPool::Buffer{});
    return buffer.memory != nullptr;
  }

  /// Returns false if there is no pinned memory yet.
  bool copy_down(StagedPiece& piece) {
    device::Api& api = resources_->device->api();
    if (!acquire(piece.host_in, in_place() ? piece.out.size() : piece.in.size())) return false;
    if (!in_place() && !acquire(piece.host_out, piece.out.size())) return false;
    if (!reads_input() || piece.in.empty()) return true;
    api.copy(piece.host_in.memory, piece.in.data(), piece.in.size(), device::Direction::kToHost,
             resources_->down.get());
    piece.down = resources_->device->events()->record(resources_->down.get());
    return true;
  }

  /// Returns true when the ranks have exchanged the piece.
  bool exchange(StagedPiece& piece) {
    if (!piece.work) {
      if (piece.down && !piece.down->query()) return false;
      piece.work = launch(piece);
    }
    if (piece.work->progress()) return true;
    moved_ = moved_ || piece.work->moved();
    return false;
  }

  std::unique_ptr<Work> launch(StagedPiece& piece) {
    Collective collective = collective_;
    if (in_place()) collective.count = piece.count;
    const std::span<std::byte> in{piece.host_in.memory,
                                  in_place() ? piece.out.size() : piece.in.size()};
    const std::span<std::byte> out =
        in_place() ? in : std::span<std::byte>{piece.host_out.memory, piece.out.size()};
    if (collective.op != ReduceOp::kAdasum || collective.kind != OpKind::kAllreduce)
      return resources_->host->launch(collective, in, out);
    const composite::Launch host = [resources = resources_](const Collective& part,
                                                            std::span<const std::byte> from,
                                                            std::span<std::byte> to) {
      return resources->host->launch(part, from, to);
    };
    return composite::make_adasum(host, collective, resources_->spec, in, out);
  }

  void copy_up(StagedPiece& piece) {
    piece.work.reset();
    device::PinnedPool::Buffer& source = in_place() ? piece.host_in : piece.host_out;
    if (!piece.out.empty()) {
      resources_->device->api().copy(piece.out.data(), source.memory, piece.out.size(),
                                     device::Direction::kToDevice, resources_->up.get());
      source.free_after = resources_->device->events()->record(resources_->up.get());
    }
    resources_->pinned.release(std::move(piece.host_in));
    if (piece.host_out.memory != nullptr) resources_->pinned.release(std::move(piece.host_out));
  }

  const std::shared_ptr<Resources> resources_;
  Collective collective_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  std::vector<StagedPiece> pieces_;
  std::size_t next_down_ = 0;
  std::size_t done_ = 0;
  bool moved_ = false;
  EventPtr ready_;
};

class HostStagedChannel final : public Channel {
 public:
  explicit HostStagedChannel(std::shared_ptr<Resources> resources)
      : resources_(std::move(resources)) {}
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    return std::make_unique<HostStagedWork>(resources_, collective, in, out);
  }
  void abort() noexcept override { resources_->host->abort(); }
  Channel* host() noexcept override { return resources_->host.get(); }

 private:
  const std::shared_ptr<Resources> resources_;
};

}  // namespace

std::unique_ptr<Channel> make_host_staged_channel(std::unique_ptr<Channel> host,
                                                  std::shared_ptr<device::Context> device,
                                                  const ChannelSpec& spec,
                                                  std::shared_ptr<SharedArena> arena,
                                                  const StagingOptions& options) {
  return std::make_unique<HostStagedChannel>(std::make_shared<Resources>(
      std::move(host), std::move(device), spec, std::move(arena), options));
}

}  // namespace hvd::staged
