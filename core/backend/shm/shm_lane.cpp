#include "backend/shm/shm_lane.h"

#include <utility>

namespace hvd::shm {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "rounds are shared between processes");

Lane::Lane(const std::string& prefix, const ChannelSpec& spec, Peers& peers, const ShmTuning& tuning)
    : ranks_(spec.ranks),
      rank_(spec.set_rank),
      peers_(peers),
      tuning_(tuning),
      name_(prefix + "-" + std::to_string(spec.process_set)) {
  sources.resize(ranks_.size());
  if (rank_ == 0) adopt(Segment::create(name_, segment_bytes()));
}

std::size_t Lane::segment_bytes() const noexcept {
  const auto members = ranks_.size();
  return sizeof(Header) + members * sizeof(Party) + 2 * (members + 1) * tuning_.slot_bytes;
}

bool Lane::ready() {
  if (segment_) return true;
  auto found = Segment::attach(name_, segment_bytes());
  if (!found) return false;
  adopt(std::move(found));
  return true;
}

void Lane::adopt(std::unique_ptr<Segment> segment) noexcept {
  segment_ = std::move(segment);
  header_ = reinterpret_cast<Header*>(segment_->data());
  parties_ = reinterpret_cast<Party*>(segment_->data() + sizeof(Header));
  slots_ = segment_->data() + sizeof(Header) + ranks_.size() * sizeof(Party);
  // The last to arrive removes the name, so nothing is left behind from then on.
  if (header_->attached.fetch_add(1) + 1 == ranks_.size()) segment_->unlink();
}

std::byte* Lane::slot(std::uint64_t round, int member) noexcept {
  const std::size_t index = round % 2 * (ranks_.size() + 1) + static_cast<std::size_t>(member);
  return slots_ + index * tuning_.slot_bytes;
}

bool Lane::all_reached(std::atomic<std::uint64_t> Party::*stage, std::uint64_t rounds) noexcept {
  for (int member = 0; member < size(); ++member) {
    if (member != rank_ && (parties_[member].*stage).load(std::memory_order_acquire) < rounds) return false;
  }
  return true;
}

void Lane::ring_others() noexcept {
  for (int member = 0; member < size(); ++member) {
    if (member != rank_) peers_.ring(ranks_[static_cast<std::size_t>(member)]);
  }
}

}  // namespace hvd::shm
