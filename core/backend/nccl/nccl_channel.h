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

/// A communicator on its way and in use.
///
///   meeting    --the id has come over the host's channel--> joining
///   joining    --health() settled--> allocating
///   allocating --there is memory for registered buffers, or none--> agreeing
///   agreeing   --all have voted--> ready, or --all want windows--> opening
///   opening    --each one settled--> confirming
///   confirming --all have voted--> ready
///   any but ready --too late, or an error--> a throw      any --abort()--> aborted
class NcclChannel final : public Channel {
 public:
  /// @param stream, teardown of all communicators of the device
  NcclChannel(std::shared_ptr<Library>, std::shared_ptr<device::Context>,
              std::shared_ptr<const device::OwnedStream> stream,
              std::shared_ptr<CommTeardown> teardown, const ChannelSpec&,
              std::unique_ptr<Channel> host, const NcclOptions&, const Clock&);
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;
  /// Waits for the peers, for no longer than finalize_timeout: they end theirs too. What NCCL frees
  /// then it frees on another thread.
  ~NcclChannel() override;

  bool ready() override;
  std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte> in,
                               std::span<std::byte> out) override;
  void check_health() override;
  /// Of all communicators of the device, and only begins it: see Note [An abort that cannot hang].
  void abort() noexcept override;
  void wait_for_abort() noexcept override;
  Channel* host() noexcept override { return host_.get(); }
  std::span<const std::span<std::byte>> fusion_buffers() const noexcept override {
    return fusion_buffers_;
  }
  void give_back_fusion_buffers() noexcept override;

  // --- for its works ---
  Library& library() noexcept { return *library_; }
  device::Context& device() noexcept { return *device_; }
  device::Stream stream() const noexcept { return stream_->get(); }
  Comm comm() const noexcept { return comm_; }
  int rank() const noexcept { return spec_.set_rank; }
  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  device::BufferPool& buffers() noexcept { return buffers_; }
  /// Whether the last call on the communicator is over. @throws PeerLostError, Error
  bool settled();

 private:
  enum class State {
    kMeeting,
    kJoining,
    kAllocating,
    kAgreeing,
    kOpening,
    kConfirming,
    kReady,
    kAborted
  };
  using Votes = std::array<std::int64_t, 3>;
  void meet();
  /// Has memory for the fusion buffers made beside this thread.
  void make_buffers();
  /// Registers what this rank can, and asks the others.
  void propose();
  void agree();
  /// Of all ranks' votes the least, when meeting_ has ended.
  void vote(const Votes&);
  bool voted();
  void open_windows();
  void confirm_windows();
  void close_windows() noexcept;
  bool register_buffers();
  void deregister_buffers() noexcept;
  [[noreturn]] void fail(const Health&) const;
  std::string who() const;

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
  /// What goes over the host's channel, kept for as long as that may write to it.
  struct Notes {
    UniqueId id;
    Votes votes;
    std::array<void*, 2> windows =
        {};  ///< of the first fusion buffers; NCCL writes them while the channel is opening
  };
  std::shared_ptr<Notes> notes_;
  std::unique_ptr<Work> meeting_;  // the broadcast of the id, and later the votes
  State state_ = State::kMeeting;
  Comm comm_;
  struct Making;
  std::shared_ptr<Making> making_;  // null: no memory is on its way
  std::vector<std::shared_ptr<std::byte>> fusion_memory_;
  std::vector<std::span<std::byte>> fusion_buffers_;  // the same
  std::vector<void*> registrations_;                  // of the first of them
  std::size_t windows_begun_ = 0;
};

/// Puts the collective into the stream; progress() is true once it is there.
std::unique_ptr<Work> make_work(NcclChannel&, const Collective&, std::span<const std::byte> in,
                                std::span<std::byte> out);

}  // namespace hvd::nccl
