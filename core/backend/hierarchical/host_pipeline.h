#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/hierarchical/hierarchical_backend.h"
#include "backend/hierarchical/host_plan.h"
#include "backend/hierarchical/host_segment.h"
#include "message/channel_messages.h"

namespace hvd::hierarchical {

/// What a channel and its Works share.
struct ChannelContext {
  HostPlan plan;
  HierarchicalTuning tuning;
  HostSegment segment;
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

/// A pipelined collective inside and between hosts, in rounds of five stages per member:
///
///   fill     copies its input of the round into its slot              once all have reduced what
///                                                                     it held kInputs rounds ago
///   reduce   a driver does what needs the host's inputs               when it can: reduce() says
///   settle   a driver's share of the result is in the result's slot   when it is: settle() says
///   take     copies the result out                                    once all have settled
///   release  the result's slot                                        once its messages from there
///                                                                     have gone: sent() says
///
/// A member without a share in a round passes reduce and settle at once. Who writes to a result's
/// slot asks result_free() first. The numbers of rounds go on from one collective to the next, so
/// nothing is ever reset.
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
  std::uint64_t reduced() const noexcept { return reduced_; }
  std::uint64_t settled() const noexcept { return settled_; }

  std::byte* input(std::uint64_t round, int index) noexcept {
    return host_->segment.input(base_ + round, index);
  }
  std::byte* result(std::uint64_t round) noexcept { return host_->segment.result(base_ + round); }
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
  bool advance();
  void reach(HostSegment::Stage, std::uint64_t rounds) noexcept;

  const std::shared_ptr<ChannelContext> host_;
  const std::uint64_t base_;
  bool started_ = false;
  bool awaited_ = false;  ///< others may wait for what this member has just done
  std::uint64_t filled_ = 0;
  std::uint64_t reduced_ = 0;
  std::uint64_t settled_ = 0;
  std::uint64_t taken_ = 0;
  std::uint64_t released_ = 0;
};

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

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
