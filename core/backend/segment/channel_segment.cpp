#include "backend/segment/channel_segment.h"

#include <utility>

#include "backend/segment/ranges.h"
#include "base/process_exit.h"
#include "base/text.h"
#include "kernels/streaming.h"

namespace hvd::segment {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share the counters");

namespace {

/// A measurement needs two clock reads per access to a counter, so not every round is measured.
constexpr std::uint64_t kRoundsPerMeasurement = 4;

}  // namespace

ChannelSegment::ChannelSegment(SegmentMembers members, const BufferLayout& layout, Peers& peers,
                               const InfoBytes& info)
    : name_(std::move(members.name)),
      ranks_(std::move(members.ranks)),
      member_(members.member),
      layout_(layout),
      peers_(peers),
      initial_info_(info) {
  if (member_ != 0) return;
  adopt(size() == 1 ? SharedSegment::unshared(bytes()) : SharedSegment::create(name_, bytes()));
  ring_others();
}

std::size_t ChannelSegment::bytes(std::size_t members, const BufferLayout& layout) noexcept {
  return sizeof(Header) + members * sizeof(MemberState) +
         (kInputs * members + layout.results) * layout.buffer_bytes;
}

std::string ChannelSegment::suffix(const ChannelSpec& spec) {
  return text("-", spec.process_set, spec.instance > 0 ? text(".", spec.instance) : "");
}

void ChannelSegment::adopt(std::unique_ptr<SharedSegment> segment) noexcept {
  segment_ = std::move(segment);
  header_ = reinterpret_cast<Header*>(segment_->data());
  states_ = reinterpret_cast<MemberState*>(segment_->data() + sizeof(Header));
  buffers_ = segment_->data() + sizeof(Header) + size() * sizeof(MemberState);
  states_[member_].info = initial_info_;
  // The last member to attach removes the name, so that no file is left behind.
  if (header_->attached.fetch_add(1) + 1 == size()) segment_->unlink();
}

bool ChannelSegment::ready() {
  if (ready_) return true;
  if (!segment_) {
    auto found = SharedSegment::attach(name_, bytes());
    if (!found) return false;
    adopt(std::move(found));
    ring_others();
  }
  ready_ = header_->attached.load() == size();
  // The last member has removed the name already. On the creator this call releases the lock.
  if (ready_) segment_->unlink();
  return ready_;
}

bool ChannelSegment::all_reached(Counter counter, std::uint64_t rounds) noexcept {
  HVD_EXPECT(ready_, "all members have mapped it");
  const bool measure = rounds % kRoundsPerMeasurement == 0;
  for (std::size_t member = 0; member < size(); ++member) {
    const std::atomic<std::uint64_t>& value = states_[member].*counter;
    const std::uint64_t reached = measure && member != member_
                                      ? distance_.load(value)
                                      : value.load(std::memory_order_seq_cst);
    if (reached < rounds) return false;
  }
  return true;
}

void ChannelSegment::measure_distance() noexcept {
  HVD_EXPECT(ready_, "all members have mapped it");
  if (size() > 1) distance_.load(states_[(member_ + 1) % size()].released);
}

void ChannelSegment::write(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (!streams(bytes)) return copy_bytes(to, from, bytes);
  kernels::copy_streaming(to, from, bytes);
  kernels::streaming_fence();
}

bool ChannelSegment::other_reached(Counter counter, std::uint64_t rounds) const noexcept {
  HVD_EXPECT(ready_, "all members have mapped it");
  for (std::size_t member = 0; member < size(); ++member) {
    if (member != member_ && (states_[member].*counter).load(std::memory_order_seq_cst) >= rounds)
      return true;
  }
  return false;
}

void ChannelSegment::ring_others() noexcept {
  for (std::size_t member = 0; member < size(); ++member) {
    if (member != member_) peers_.ring(ranks_[member]);
  }
}

void ChannelSegment::keep_mapped() noexcept {
  if (!segment_) return;
  segment_->unlink();
  keep_until_exit(std::shared_ptr<const SharedSegment>(std::move(segment_)));
}

}  // namespace hvd::segment
