#include "device/pinned_pool.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

/// Allocates and frees the memory, one call at a time, in run_on_helper(). May outlive the pool.
class PinnedPool::Source {
 public:
  Source(std::shared_ptr<Api> api, int device, std::shared_ptr<SharedArena> arena)
      : api_(std::move(api)), device_(device), arena_(std::move(arena)), pins_(arena_ != nullptr) {}

  std::byte* allocate(std::size_t bytes) {
    const DeviceGuard guard(*api_, device_);
    std::byte* const memory = pins_ ? allocate_in_arena(bytes) : nullptr;
    return memory != nullptr ? memory : api_->allocate_pinned(bytes);
  }

  void release(const std::vector<Buffer>& buffers) noexcept {
    try {
      const DeviceGuard guard(*api_, device_);
      for (const Buffer& buffer : buffers) release(buffer);
    } catch (const std::exception& error) {
      // The device has failed; its operations report that.
      HVD_LOG(kDebug) << "pinned memory was not freed: " << error.what();
    }
  }

 private:
  // Returns null if the arena has no room or cannot be pinned. The result may differ between ranks:
  // each collective determines which tensors its members can reduce in place.
  std::byte* allocate_in_arena(std::size_t bytes) {
    std::byte* memory = nullptr;
    try {
      memory = arena_->allocate(bytes);
      if (memory != nullptr) api_->pin(memory, bytes);
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

  void release(const Buffer& buffer) noexcept {
    if (!arena_ || !arena_->offset_of(buffer.memory, buffer.capacity))
      return api_->release_pinned(buffer.memory);
    api_->unpin(buffer.memory);
    arena_->deallocate(buffer.memory, true);
  }

  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<SharedArena> arena_;
  bool pins_;  // false once the system has refused to pin
};

PinnedPool::PinnedPool(Context& context, std::shared_ptr<SharedArena> arena)
    : context_(context),
      source_(std::make_shared<Source>(context.shared_api(), context.device(), std::move(arena))) {}

PinnedPool::~PinnedPool() {
  try {
    const DeviceGuard guard(context_.api(), context_.device());
    std::erase_if(free_, [](const Buffer& buffer) { return !reached(buffer.free_after); });
    context_.run_on_helper([source = source_, allocation = std::move(allocation_),
                            buffers = std::move(free_)]() noexcept {
      source->release(buffers);
      if (allocation)
        source->release(allocation->resources);  // the helper has finished the allocation by then
    });
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "pinned memory was not freed: " << error.what();
  }
}

void PinnedPool::reserve(std::size_t count, std::size_t bytes) {
  HVD_EXPECT(!allocation_ && free_.empty(), "no buffer was requested yet");
  begin_allocation(count, bytes, false);
}

std::optional<PinnedPool::Buffer> PinnedPool::acquire(std::size_t bytes) {
  if (auto found = find(bytes)) return found;
  if (!allocation_) {
    const auto fits = [bytes](const Buffer& buffer) { return buffer.capacity >= bytes; };
    if (std::ranges::count_if(free_, fits) >= static_cast<std::ptrdiff_t>(kMaxInUse))
      return std::nullopt;
    begin_allocation(1, bytes, true);
  }
  collect();
  return find(bytes);
}

std::optional<PinnedPool::Buffer> PinnedPool::find(std::size_t bytes) {
  const auto found = std::ranges::find_if(free_, [bytes](const Buffer& buffer) {
    return buffer.capacity >= bytes && reached(buffer.free_after);
  });
  if (found == free_.end()) return std::nullopt;
  Buffer buffer = std::move(*found);
  free_.erase(found);
  buffer.free_after = nullptr;
  return buffer;
}

/// Moves finished buffers to the free list.
void PinnedPool::collect() {
  if (!allocation_ || !allocation_->done.load(std::memory_order_acquire)) return;
  const auto finished = std::exchange(allocation_, nullptr);
  std::ranges::move(finished->resources, std::back_inserter(free_));
  if (!finished->error) return;
  if (needs_allocation_) std::rethrow_exception(finished->error);
  HVD_LOG(kDebug) << "no memory could be pinned in advance; it is pinned when it is needed";
}

void PinnedPool::begin_allocation(std::size_t count, std::size_t bytes, bool needed) {
  needs_allocation_ = needed;
  const std::size_t capacity = std::max<std::size_t>((bytes + kPage - 1) / kPage * kPage, kPage);
  allocation_ = context_.allocate_on_helper<Buffer>(
      [source = source_, count, capacity](std::vector<Buffer>& buffers) {
        for (std::size_t i = 0; i < count; ++i)
          buffers.push_back({source->allocate(capacity), capacity});
      });
}

}  // namespace hvd::device
