#include "backend/hierarchical/host_pipeline.h"

#include <cstring>
#include <utility>

namespace hvd::hierarchical {

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

HostPipeline::HostPipeline(std::shared_ptr<ChannelContext> host, const Collective& collective,
                           std::span<const std::byte> in, std::span<std::byte> out)
    : MessageWork(host->messages),
      collective_(collective),
      in_(in),
      out_(out),
      host_(std::move(host)),
      base_(host_->segment.next_round) {}

HostPipeline::~HostPipeline() {
  if (requests().in_flight() > 0) host_->abandon();
}

bool HostPipeline::inputs_here(std::uint64_t round) const noexcept {
  return filled_ > round &&
         host_->segment.others_reached(&HostSegment::MemberState::filled, base_ + round + 1);
}

bool HostPipeline::result_free(std::uint64_t round) const noexcept {
  constexpr std::uint64_t kResults = HostSegment::kResults;
  if (released_ + kResults <= round) return false;
  const std::uint64_t absolute = base_ + round;
  return absolute < kResults || host_->segment.others_reached(&HostSegment::MemberState::released,
                                                              absolute + 1 - kResults);
}

// Tells the host's others how far this member has got. All that they wait for is that every member
// has got as far, so only the last one to do so has anybody to wake. Every access is sequentially
// consistent: of two that are last at the same time one sees the other, and either this member sees
// that it is the last, or the others see what it has done before they sleep.
void HostPipeline::reach(HostSegment::Stage stage, std::uint64_t rounds) noexcept {
  host_->segment.reach(stage, base_ + rounds);
  awaited_ = awaited_ || host_->segment.others_reached(stage, base_ + rounds);
}

// The last stage first: it frees what the others wait for.
bool HostPipeline::advance() {
  using MemberState = HostSegment::MemberState;
  constexpr std::uint64_t kInputs = HostSegment::kInputs;
  post();
  if (released_ < taken_ && sent(released_)) {
    reach(&MemberState::released, ++released_);
    return true;
  }
  if (taken_ < settled_ &&
      host_->segment.others_reached(&MemberState::settled, base_ + taken_ + 1)) {
    take(taken_++);
    return true;
  }
  if (settled_ < reduced_ && settle(settled_)) {
    reach(&MemberState::settled, ++settled_);
    return true;
  }
  if (reduced_ < filled_ && reduce(reduced_)) {
    reach(&MemberState::reduced, ++reduced_);
    return true;
  }
  if (filled_ == rounds_ || filled_ == reduced_ + kInputs) return false;
  const std::uint64_t absolute = base_ + filled_;
  if (absolute >= kInputs &&
      !host_->segment.others_reached(&MemberState::reduced, absolute + 1 - kInputs))
    return false;
  fill(filled_);
  reach(&MemberState::filled, ++filled_);
  return true;
}

bool HostPipeline::step() {
  if (!host_->segment.ready()) return false;
  if (!std::exchange(started_, true)) start();
  static_cast<void>(messages().test());
  while (advance()) messages().keep_going();
  if (std::exchange(awaited_, false)) host_->segment.ring_others();
  // The buffer, too, is used again by the next collective.
  const bool done = released_ == rounds_ && requests().in_flight() == 0;
  if (done) host_->segment.next_round = base_ + rounds_;
  return done;
}

std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext> host, const Collective& collective,
                                std::span<const std::byte> in, std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kBroadcast:
      return make_broadcast(std::move(host), collective, in, out);
    case OpKind::kAllgather:
      return make_allgather(std::move(host), collective, in, out);
    default:
      break;
  }
  std::size_t members = 0;
  for (const auto& local : host->plan.hosts) members += local.size();
  const bool small = in.size() * members <= host->tuning.small_bytes;
  return small ? make_exchange_allreduce(std::move(host), collective, in, out)
               : make_chain_allreduce(std::move(host), collective, in, out);
}

}  // namespace hvd::hierarchical
