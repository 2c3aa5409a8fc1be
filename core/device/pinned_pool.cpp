#include "device/pinned_pool.h"

#include <algorithm>
#include <atomic>
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

/// Allocates and frees the memory. Used in run_aside(), one call at a time, where it may outlive
/// the pool.
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
      HVD_LOG(kDebug) << "pinned memory was not freed: "
                      << error.what();  // the device has failed, which others report
    }
  }

 private:
  // Returns null if the arena has no room or cannot be pinned. Ranks need not agree on it: each
  // collective determines which tensors its members can reduce in place.
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

/// Buffers being made; the pool reads them once `done` is set.
struct PinnedPool::Making {
  explicit Making(bool is_needed) : needed(is_needed) {}
  const bool needed;
  std::atomic<bool> done{false};
  std::vector<Buffer> buffers = {};
  std::exception_ptr error = nullptr;
};

PinnedPool::PinnedPool(Context& context, std::shared_ptr<SharedArena> arena)
    : context_(context),
      source_(std::make_shared<Source>(context.shared_api(), context.device(), std::move(arena))) {}

PinnedPool::~PinnedPool() {
  try {
    const DeviceGuard guard(context_.api(), context_.device());
    std::erase_if(free_, [](const Buffer& buffer) { return !reached(buffer.free_after); });
    context_.run_aside(
        [source = source_, making = std::move(making_), buffers = std::move(free_)]() noexcept {
          source->release(buffers);
          if (making) source->release(making->buffers);  // the request before it is obsolete
        });
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "pinned memory was not freed: " << error.what();
  }
}

void PinnedPool::reserve(std::size_t count, std::size_t bytes) {
  HVD_EXPECT(!making_ && free_.empty(), "nothing was asked for yet");
  make(count, bytes, false);
}

std::optional<PinnedPool::Buffer> PinnedPool::take(std::size_t bytes) {
  if (auto found = find(bytes)) return found;
  if (!making_) {
    const auto fits = [bytes](const Buffer& buffer) { return buffer.capacity >= bytes; };
    if (std::ranges::count_if(free_, fits) >= static_cast<std::ptrdiff_t>(kMostInUse))
      return std::nullopt;
    make(1, bytes, true);
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

/// Moves the buffers that have been made to the free list.
void PinnedPool::collect() {
  if (!making_ || !making_->done.load(std::memory_order_acquire)) return;
  const std::shared_ptr<Making> made = std::exchange(making_, nullptr);
  std::ranges::move(made->buffers, std::back_inserter(free_));
  if (!made->error) return;
  if (made->needed) std::rethrow_exception(made->error);
  HVD_LOG(kDebug) << "there is no memory that can be pinned beforehand; it is made when needed";
}

void PinnedPool::make(std::size_t count, std::size_t bytes, bool needed) {
  making_ = std::make_shared<Making>(needed);
  const std::size_t capacity = std::max<std::size_t>((bytes + kPage - 1) / kPage * kPage, kPage);
  context_.run_aside([source = source_, making = making_, count, capacity]() noexcept {
    try {
      for (std::size_t i = 0; i < count; ++i)
        making->buffers.push_back({source->allocate(capacity), capacity});
    } catch (...) {
      making->error = std::current_exception();
    }
    making->done.store(true, std::memory_order_release);
  });
}

}  // namespace hvd::device
