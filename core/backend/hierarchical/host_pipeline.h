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

using segment::chunk_of;
using segment::copy_bytes;
using segment::Range;
using segment::rounds_of;

/// Rounds whose results are in a host's segment at the same time.
inline constexpr std::uint64_t kResults = 4;

/// What a channel and its Works share.
struct ChannelContext {
  HostPlan plan;
  HierarchicalTuning tuning;
  segment::ChannelSegment segment;                     ///< of the members on this host
  std::shared_ptr<message::ChannelMessages> messages;  ///< peers are members of the whole set
  std::vector<const std::byte*> sources = {};          ///< for the kernels

  /// A Work was dropped before it completed, or will be. What messages were given of the segment
  /// stays mapped while the carrier may touch it.
  void abandon() noexcept {
    if (messages->abandon() == message::TakenBack::kNever) segment.keep_mapped();
  }
  ~ChannelContext() {
    if (!messages->settle()) segment.keep_mapped();
  }
};

/// A pipelined collective inside and between hosts: see run() for the phases. A member without a
/// share in a round passes reduce and settle at once. Who writes to a result's slot asks
/// result_free() first.
///
/// Messages are given slots and the messages' buffer only, never a tensor.
class HostPipeline : public message::MessageWork {
 public:
  HostPipeline(std::shared_ptr<ChannelContext>, const Collective&, std::span<const std::byte> in,
               std::span<std::byte> out);
  ~HostPipeline() override;

 protected:
  bool step() final;

  /// Once, before anything else: reserves memory and slots for requests.
  virtual void start() = 0;
  /// Receives what there is room for.
  virtual void post() = 0;
  virtual void fill(std::uint64_t round) = 0;
  /// False: not yet.
  virtual bool reduce(std::uint64_t round) = 0;
  virtual bool settle(std::uint64_t round) = 0;
  virtual void take(std::uint64_t round) = 0;
  virtual bool sent(std::uint64_t round) const noexcept = 0;

  ChannelContext& host() noexcept { return *host_; }
  const HostPlan& plan() const noexcept { return host_->plan; }
  message::RequestTable& requests() noexcept { return host_->messages->requests(); }
  bool idle(std::size_t slot) const noexcept { return host_->messages->requests().idle(slot); }
  std::size_t element() const noexcept { return size_of(collective_.dtype); }
  /// Rounds of this collective that this member has got through.
  std::uint64_t reduced() const noexcept { return pipeline_.done(segment::Phase::kReduce); }
  std::uint64_t settled() const noexcept { return pipeline_.done(segment::Phase::kSettle); }

  std::byte* input(std::uint64_t round, int index) noexcept {
    return host_->segment.input(pipeline_.number(round), static_cast<std::size_t>(index));
  }
  std::byte* result(std::uint64_t round) noexcept {
    return host_->segment.result(pipeline_.number(round));
  }
  /// All members of the host have filled their slots.
  bool inputs_here(std::uint64_t round) const noexcept;
  /// All members have released what the result's slot held kResults rounds ago.
  bool result_free(std::uint64_t round) const noexcept;

  void send(std::size_t slot, const std::byte* from, std::size_t bytes, int member) {
    if (bytes > 0) messages().send(slot, {from, bytes}, member, message::kHierarchicalBackendKind);
  }
  void receive(std::size_t slot, std::byte* to, std::size_t bytes, int member) {
    if (bytes > 0) messages().receive(slot, {to, bytes}, member, message::kHierarchicalBackendKind);
  }

  const Collective collective_;
  const std::span<const std::byte> in_;
  const std::span<std::byte> out_;
  std::uint64_t rounds_ = 0;  ///< of this collective; the same on every member of the set

 private:
  bool run(segment::Phase phase, std::uint64_t round);

  const std::shared_ptr<ChannelContext> host_;
  segment::Pipeline pipeline_;
  bool started_ = false;
};

/// hvd::Collective says what `in` and `out` hold for each kind; allreduce, broadcast and allgather
/// only.
std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext>, const Collective&,
                                std::span<const std::byte> in, std::span<std::byte> out);

std::unique_ptr<Work> make_chain_allreduce(std::shared_ptr<ChannelContext>, const Collective&,
                                           std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_exchange_allreduce(std::shared_ptr<ChannelContext>, const Collective&,
                                              std::span<const std::byte> in,
                                              std::span<std::byte> out);
std::unique_ptr<Work> make_allgather(std::shared_ptr<ChannelContext>, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_broadcast(std::shared_ptr<ChannelContext>, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::hierarchical
