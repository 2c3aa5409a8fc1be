#include "device/buffer_ring.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"

namespace hvd::device {

std::span<std::byte> BufferRing::take(std::span<const std::span<std::byte>> buffers,
                                      std::size_t size, Stream stream) {
  HVD_EXPECT(!taken_, "the last buffer has been released");
  HVD_EXPECT(free_after_.empty() || buffers.empty() || free_after_.size() == buffers.size(),
             "there are always the same buffers");
  if (!fits(buffers, size)) return {};
  free_after_.resize(buffers.size());
  if (free_after_[next_]) api_.wait(stream, {free_after_[next_]->native()});
  taken_ = true;
  return buffers[next_].first(size);
}

void BufferRing::release(EventPtr after) {
  free_after_[next_] = std::move(after);
  next_ = (next_ + 1) % free_after_.size();
  taken_ = false;
}

bool BufferRing::idle() const {
  return !taken_ && std::all_of(free_after_.begin(), free_after_.end(), [](const EventPtr& event) {
    return event == nullptr || event->query();
  });
}

}  // namespace hvd::device
