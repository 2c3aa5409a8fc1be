#include "device/pinned_pool.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

PinnedPool::PinnedPool(Api& api, int device, std::shared_ptr<SharedArena> arena)
    : api_(api), device_(device), arena_(std::move(arena)), pins_(arena_ != nullptr) {}

PinnedPool::~PinnedPool() {
  try {
    const DeviceGuard guard(api_, device_);
    for (const Buffer& buffer : free_) {
      if (!buffer.free_after || buffer.free_after->query()) release(buffer);
    }
  } catch (const Error&) {  // the device has failed, and the process ends
  }
}

PinnedPool::Buffer PinnedPool::take(std::size_t bytes) {
  const auto usable = [bytes](const Buffer& buffer) {
    return buffer.capacity >= bytes && (!buffer.free_after || buffer.free_after->query());
  };
  const auto found = std::find_if(free_.begin(), free_.end(), usable);
  if (found != free_.end()) {
    Buffer buffer = std::move(*found);
    free_.erase(found);
    buffer.free_after = nullptr;
    return buffer;
  }
  const std::size_t capacity = std::max<std::size_t>((bytes + kPage - 1) / kPage * kPage, kPage);
  return {allocate(capacity), capacity};
}

std::byte* PinnedPool::allocate(std::size_t bytes) {
  std::byte* const memory = pins_ ? allocate_in_arena(bytes) : nullptr;
  return memory != nullptr ? memory : api_.allocate_pinned(bytes);
}

// Null: not this time, or never again. Ranks need not agree on it: what peers can reduce in place
// they find out for each collective.
std::byte* PinnedPool::allocate_in_arena(std::size_t bytes) {
  std::byte* memory = nullptr;
  try {
    memory = arena_->allocate(bytes);
    if (memory != nullptr) api_.pin(memory, bytes);
    return memory;
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const Error& error) {
    HVD_LOG(kDebug) << "staging in memory that the ranks of the host do not share: "
                    << error.what();
    pins_ = false;
    arena_->deallocate(memory, true);
    return nullptr;
  }
}

void PinnedPool::release(const Buffer& buffer) noexcept {
  if (!arena_ || !arena_->offset_of(buffer.memory, buffer.capacity))
    return api_.release_pinned(buffer.memory);
  api_.unpin(buffer.memory);
  arena_->deallocate(buffer.memory, true);
}

}  // namespace hvd::device
