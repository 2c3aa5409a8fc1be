#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/hierarchical/hierarchical_backend.h"
#include "backend/hierarchical/host_plan.h"
#include "backend/segment/channel_segment.h"
#include "backend/segment/pipeline.h"
#include "backend/segment/ranges.h"
#include "transport/channel_messages.h"

namespace hvd::hierarchical {

using segment::copy_bytes;
using segment::Range;
using segment::round_part;
using segment::rounds_of;

/// The number of result buffers in a host's segment.
inline constexpr std::uint64_t kResults = 4;

/// State that a channel shares with its Works.
struct HostChannelState {
  HostPlan plan;
  HierarchicalTuning tuning;
  segment::ChannelSegment segment;                     ///< of the members on this host
  std::shared_ptr<message::ChannelMessages> messages;  ///< peers are members of the whole set
  std::vector<const std::byte*> sources = {};          ///< for the kernels

  /// Ends the channel because a Work was dropped before it completed, or will be. The segment stays
  /// mapped while the carrier may access it.
  void abandon() noexcept {
    if (messages->abandon() == message::MemoryRelease::kNever) segment.keep_mapped();
  }
  ~HostChannelState() {
    if (!messages->settle()) segment.keep_mapped();
  }
};

/// A pipelined collective inside and between hosts. See run() for the phases. A member that has no
/// share in a round passes reduce and settle at once. A subclass checks result_free() before it
/// writes to a result buffer.
///
/// Messages read and write the segment's buffers and the channel's message buffer, never a tensor.
class HostPipeline : public message::MessageWork {
 public:
  HostPipeline(std::shared_ptr<HostChannelState>, const Collective&, std::span<const std::byte> in,
               std::span<std::byte> out);
  ~HostPipeline() override;

 protected:
  bool step() final;

  /// Called once, first. Reserves memory and entries of the request table.
  virtual void start() = 0;
  /// Starts the receives whose buffers are free.
  virtual void post() = 0;
  virtual void fill(std::uint64_t round) = 0;
  /// reduce() and settle() return false if the round cannot continue yet.
  virtual bool reduce(std::uint64_t round) = 0;
  virtual bool settle(std::uint64_t round) = 0;
  virtual void copy_out(std::uint64_t round) = 0;
  /// Whether the messages that this member has sent from the result buffer have completed.
  virtual bool sent(std::uint64_t round) const noexcept = 0;

  HostChannelState& host() noexcept { return *host_; }
  const HostPlan& plan() const noexcept { return host_->plan; }
  message::RequestTable& requests() noexcept { return host_->messages->requests(); }
  bool idle(std::size_t request) const noexcept {
    return host_->messages->requests().idle(request);
  }
  std::size_t element() const noexcept { return size_of(collective_.dtype); }
  /// The number of rounds of this collective that this member has reduced, or settled.
  std::uint64_t reduced() const noexcept { return pipeline_.done(segment::RoundPhase::kReduce); }
  std::uint64_t settled() const noexcept { return pipeline_.done(segment::RoundPhase::kSettle); }

  std::byte* input_buffer(std::uint64_t round, int index) noexcept {
    return host_->segment.input(pipeline_.number(round), static_cast<std::size_t>(index));
  }
  std::byte* result_buffer(std::uint64_t round) noexcept {
    return host_->segment.result(pipeline_.number(round));
  }
  /// Whether all members of the host have filled their input buffers.
  bool inputs_filled(std::uint64_t round) const noexcept;
  /// Whether all members of the host have released the round that used the same result buffer
  /// before.
  bool result_free(std::uint64_t round) const noexcept;

  void send(std::size_t request, const std::byte* from, std::size_t bytes, int member) {
    if (bytes > 0)
      messages().send(request, {from, bytes}, member, message::kHierarchicalBackendKind);
  }
  void receive(std::size_t request, std::byte* to, std::size_t bytes, int member) {
    if (bytes > 0)
      messages().receive(request, {to, bytes}, member, message::kHierarchicalBackendKind);
  }

  const Collective collective_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  std::uint64_t rounds_ = 0;  ///< of this collective, on every member of the set

 private:
  bool run(segment::RoundPhase phase, std::uint64_t round);

  const std::shared_ptr<HostChannelState> host_;
  segment::Pipeline pipeline_;
  bool started_ = false;
};

/// For allreduce, broadcast and allgather. See hvd::Collective for the contents of `in` and `out`.
std::unique_ptr<Work> make_work(std::shared_ptr<HostChannelState>, const Collective&,
                                std::span<const std::byte> in, std::span<std::byte> out);

std::unique_ptr<Work> make_chain_allreduce(std::shared_ptr<HostChannelState>, const Collective&,
                                           std::span<const std::byte> in, std::span<std::byte> out);
/// An allgather, or a small allreduce.
std::unique_ptr<Work> make_direct_exchange(std::shared_ptr<HostChannelState>, const Collective&,
                                           std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_broadcast(std::shared_ptr<HostChannelState>, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::hierarchical
