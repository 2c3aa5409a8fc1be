#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/nccl/comm_teardown.h"
#include "backend/nccl/library.h"
#include "backend/nccl/nccl_backend.h"
#include "base/clock.h"
#include "device/buffers.h"
#include "device/context.h"

namespace hvd::nccl {

/// A channel with its own communicator, which passes through these states:
///
///   exchanging id --the id has arrived over the host's channel--> joining
///   joining       --health() has settled--> allocating
///   allocating    --registered buffers are allocated, or there are none--> voting
///   voting        --all ranks have voted--> ready
///   any but ready --deadline or error--> throws      any --abort()--> aborted
class NcclChannel final : public Channel {
 public:
  /// @param stream shared by all communicators of the device
  /// @param teardown shared by all communicators of the device
  NcclChannel(std::shared_ptr<Library>, std::shared_ptr<device::Context>,
              std::shared_ptr<const device::OwnedStream> stream,
              std::shared_ptr<CommTeardown> teardown, const ChannelSpec&,
              std::unique_ptr<Channel> host, const NcclOptions&, const Clock&);
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;
  /// Waits at most NcclOptions::finalize_timeout for the peers, which end their communicators too.
  /// NCCL then frees its memory on another thread.
  ~NcclChannel() override;

  bool ready() override;
  std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte> in,
                               std::span<std::byte> out) override;
  void check_health() override;
  /// Begins to abort all communicators of the device. See Note [An abort that cannot hang].
  void abort() noexcept override;
  void wait_for_abort() noexcept override;
  Channel* host() noexcept override { return host_.get(); }
  std::span<const std::span<std::byte>> fusion_buffers() const noexcept override {
    return fusion_buffers_;
  }
  void release_fusion_buffers() noexcept override;

  // --- for the channel's Works ---
  Library& library() noexcept { return *library_; }
  device::Context& device() noexcept { return *device_; }
  device::Stream stream() const noexcept { return stream_->get(); }
  Comm comm() const noexcept { return comm_; }
  int rank() const noexcept { return spec_.set_rank; }
  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  device::BufferPool& buffers() noexcept { return buffers_; }
  /// Whether the last call on the communicator is complete. @throws PeerLostError, Error
  bool settled();

 private:
  enum class ChannelPhase { kExchangingId, kJoining, kAllocating, kVoting, kReady, kAborted };
  void exchange_id();
  /// Begins to allocate the fusion buffers on another thread.
  void allocate_fusion_buffers();
  /// Registers this rank's fusion buffers and begins the vote.
  void begin_vote();
  void finish_vote();
  bool wait_until_settled(TimePoint limit);
  bool register_buffers();
  void deregister_buffers() noexcept;
  [[noreturn]] void fail(const Health&) const;
  /// Describes this communicator in error and log texts.
  std::string description() const;

  const std::shared_ptr<Library> library_;
  const std::shared_ptr<device::Context> device_;
  const std::shared_ptr<const device::OwnedStream> stream_;
  const std::shared_ptr<CommTeardown> teardown_;
  const ChannelSpec spec_;
  const NcclOptions options_;
  const Clock& clock_;
  const TimePoint deadline_;
  const std::unique_ptr<Channel> host_;
  device::BufferPool buffers_;
  /// Memory that the host's channel may write to. After an abort it is kept until process end.
  struct Exchanged {
    UniqueId id;
    std::array<std::int64_t, 2> votes;
  };
  std::shared_ptr<Exchanged> exchanged_;
  std::unique_ptr<Work> exchange_;  // the broadcast of the id, later the vote
  ChannelPhase phase_ = ChannelPhase::kExchangingId;
  Comm comm_;
  // null: no allocation under way
  std::shared_ptr<device::HelperAllocation<std::shared_ptr<std::byte>>> allocation_;
  std::vector<std::shared_ptr<std::byte>> fusion_memory_;
  std::vector<std::span<std::byte>> fusion_buffers_;  // views of fusion_memory_
  std::vector<void*> registrations_;                  // of the first fusion_buffers_, one each
};

/// Queues the collective in the channel's stream. progress() returns true once it is queued.
std::unique_ptr<Work> make_work(NcclChannel&, const Collective&, std::span<const std::byte> in,
                                std::span<std::byte> out);

}  // namespace hvd::nccl
