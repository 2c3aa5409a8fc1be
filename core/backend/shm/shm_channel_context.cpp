#include "backend/shm/shm_channel_context.h"

#include <utility>

namespace hvd::shm {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "rounds are shared between processes");

ChannelContext::ChannelContext(const std::string& prefix, const ChannelSpec& spec, Peers& peers,
                               std::shared_ptr<PeerArenas> arenas, const ShmTuning& tuning)
    : ranks_(spec.ranks),
      rank_(spec.set_rank),
      peers_(peers),
      tuning_(tuning),
      name_(prefix + "-" + std::to_string(spec.process_set) +
            (spec.instance > 0 ? "." + std::to_string(spec.instance) : "")),
      arenas_(std::move(arenas)) {
  sources.resize(ranks_.size());
  destinations.resize(ranks_.size());
  if (rank_ != 0) return;
  adopt(SharedSegment::create(name_, segment_bytes()));
  ring_others();
}

std::size_t ChannelContext::segment_bytes(std::size_t members, const ShmTuning& tuning) noexcept {
  return sizeof(Header) + members * sizeof(MemberState) + 2 * (members + 1) * tuning.slot_bytes;
}

bool ChannelContext::ready() {
  if (ready_) return true;
  if (!segment_) {
    auto found = SharedSegment::attach(name_, segment_bytes());
    if (!found) return false;
    adopt(std::move(found));
    ring_others();
  }
  if (header_->attached.load() < ranks_.size()) return false;
  own().reaches_all = map_arenas();
  return ready_ = true;
}

bool ChannelContext::map_arenas() {
  for (int member = 0; member < size(); ++member) {
    mapped_.push_back(arenas_->map(member_state(member).arena));
    if (!mapped_.back()) return false;
  }
  return true;
}

bool ChannelContext::arenas_shared() noexcept {
  if (arenas_shared_) return true;
  for (int member = 0; member < size(); ++member) {
    if (!member_state(member).reaches_all) return false;
  }
  return arenas_shared_ = true;
}

void ChannelContext::adopt(std::unique_ptr<SharedSegment> segment) noexcept {
  segment_ = std::move(segment);
  header_ = reinterpret_cast<Header*>(segment_->data());
  member_states_ = reinterpret_cast<MemberState*>(segment_->data() + sizeof(Header));
  slots_ = segment_->data() + sizeof(Header) + ranks_.size() * sizeof(MemberState);
  own().arena = arenas_->own_address();
  // The last to arrive removes the name, so nothing is left behind from then on.
  if (header_->attached.fetch_add(1) + 1 == ranks_.size()) segment_->unlink();
}

std::byte* ChannelContext::slot(std::uint64_t round, int member) noexcept {
  const std::size_t index = round % 2 * (ranks_.size() + 1) + static_cast<std::size_t>(member);
  return slots_ + index * tuning_.slot_bytes;
}

bool ChannelContext::all_reached(std::atomic<std::uint64_t> MemberState::*stage,
                                 std::uint64_t rounds) noexcept {
  for (int member = 0; member < size(); ++member) {
    if (member != rank_ && (member_states_[member].*stage).load(std::memory_order_seq_cst) < rounds)
      return false;
  }
  return true;
}

bool ChannelContext::any_reached(std::atomic<std::uint64_t> MemberState::*stage,
                                 std::uint64_t rounds) noexcept {
  for (int member = 0; member < size(); ++member) {
    if (member != rank_ &&
        (member_states_[member].*stage).load(std::memory_order_seq_cst) >= rounds)
      return true;
  }
  return false;
}

void ChannelContext::ring_others() noexcept {
  for (int member = 0; member < size(); ++member) {
    if (member != rank_) peers_.ring(ranks_[static_cast<std::size_t>(member)]);
  }
}

}  // namespace hvd::shm
