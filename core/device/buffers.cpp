#include "device/buffers.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace hvd::device {
namespace {

constexpr std::size_t kMostFree = 2;
constexpr std::size_t kGranule = 64 << 10;

}  // namespace

BufferLease::BufferLease(BufferLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      memory_(std::exchange(other.memory_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)) {}

BufferLease& BufferLease::operator=(BufferLease&& other) noexcept {
  BufferLease moved(std::move(other));
  std::swap(pool_, moved.pool_);
  std::swap(memory_, moved.memory_);
  std::swap(size_, moved.size_);
  std::swap(capacity_, moved.capacity_);
  return *this;
}

void BufferLease::release(EventPtr after) {
  if (pool_ == nullptr) return;
  pool_->free_.push_back({memory_, capacity_, std::move(after)});
  pool_ = nullptr;
  memory_ = nullptr;
  size_ = capacity_ = 0;
}

BufferPool::BufferPool(Api& api, int device, Allocator allocator)
    : api_(api), device_(device), allocator_(std::move(allocator)) {}

// Whoever owns the pool has waited for the device, or given up on it; then what is still in use is
// left alone.
BufferPool::~BufferPool() {
  retired_.insert(retired_.end(), free_.begin(), free_.end());
  if (!retired_.empty()) free_what_is_done();
  if (retired_.empty()) return;
  HVD_LOG(kDebug) << retired_.size() << " device buffers are still in use and are not freed";
}

void BufferPool::free_what_is_done() noexcept {
  try {
    const DeviceGuard guard(api_, device_);
    std::erase_if(retired_, [this](const Buffer& buffer) {
      if (!reached(buffer.free_after)) return false;
      allocator_.release(buffer.memory);
      return true;
    });
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "a device buffer was not freed: "
                    << error.what();  // the device has failed, which others report
  }
}

BufferLease BufferPool::lease(std::size_t size, Stream stream) {
  if (!retired_.empty()) free_what_is_done();
  BufferLease lease;
  lease.pool_ = this;
  lease.size_ = size;
  // The first that fits, which is the one that was given back first: buffers take turns.
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [size](const Buffer& buffer) { return buffer.capacity >= size; });
  if (found != free_.end()) {
    lease.memory_ = found->memory;
    lease.capacity_ = found->capacity;
    if (found->free_after) api_.wait(stream, {found->free_after->native()});
    free_.erase(found);
    return lease;
  }
  if (free_.size() >= kMostFree) {
    const auto smallest =
        std::min_element(free_.begin(), free_.end(),
                         [](const Buffer& a, const Buffer& b) { return a.capacity < b.capacity; });
    retired_.push_back(std::move(*smallest));
    free_.erase(smallest);
  }
  lease.capacity_ = (std::max<std::size_t>(size, 1) + kGranule - 1) / kGranule * kGranule;
  lease.memory_ = allocator_.allocate(lease.capacity_);
  ++allocations_;
  return lease;
}

}  // namespace hvd::device
