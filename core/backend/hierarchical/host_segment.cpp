#include "backend/hierarchical/host_segment.h"

#include <utility>

#include "base/kept_memory.h"

namespace hvd::hierarchical {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "rounds are shared between processes");

HostSegment::HostSegment(std::string name, std::vector<int> local, int index,
                         std::size_t slot_bytes, Peers& peers)
    : name_(std::move(name)),
      local_(std::move(local)),
      index_(index),
      slot_bytes_(slot_bytes),
      peers_(peers) {
  if (index_ != 0) return;
  const std::size_t size = bytes(local_.size(), slot_bytes_);
  adopt(local_.size() == 1 ? SharedSegment::unshared(size) : SharedSegment::create(name_, size));
  ring_others();
}

std::size_t HostSegment::bytes(std::size_t members, std::size_t slot_bytes) noexcept {
  return sizeof(Header) + members * sizeof(MemberState) +
         (kInputs * members + kResults) * slot_bytes;
}

void HostSegment::adopt(std::unique_ptr<SharedSegment> segment) noexcept {
  segment_ = std::move(segment);
  header_ = reinterpret_cast<Header*>(segment_->data());
  member_states_ = reinterpret_cast<MemberState*>(segment_->data() + sizeof(Header));
  slots_ = segment_->data() + sizeof(Header) + local_.size() * sizeof(MemberState);
  // The last to arrive removes the name, so nothing is left behind from then on.
  if (header_->attached.fetch_add(1) + 1 == local_.size()) segment_->unlink();
}

bool HostSegment::ready() {
  if (ready_) return true;
  if (!segment_) {
    auto found = SharedSegment::attach(name_, bytes(local_.size(), slot_bytes_));
    if (!found) return false;
    adopt(std::move(found));
    ring_others();
  }
  return ready_ = header_->attached.load() == local_.size();
}

std::byte* HostSegment::input(std::uint64_t round, int index) noexcept {
  return slots_ + (round % kInputs * local_.size() + static_cast<std::size_t>(index)) * slot_bytes_;
}

std::byte* HostSegment::result(std::uint64_t round) noexcept {
  return slots_ + (kInputs * local_.size() + round % kResults) * slot_bytes_;
}

bool HostSegment::others_reached(Stage stage, std::uint64_t rounds) const noexcept {
  for (int other = 0; other < static_cast<int>(local_.size()); ++other) {
    if (other != index_ && (member_states_[other].*stage).load(std::memory_order_seq_cst) < rounds)
      return false;
  }
  return true;
}

void HostSegment::ring_others() noexcept {
  for (std::size_t other = 0; other < local_.size(); ++other) {
    if (static_cast<int>(other) != index_) peers_.ring(local_[other]);
  }
}

void HostSegment::keep_mapped() noexcept {
  if (!segment_) return;
  segment_->unlink();
  keep_until_exit(std::shared_ptr<const SharedSegment>(std::move(segment_)));
}

}  // namespace hvd::hierarchical
