#include "engine/fusion_buffer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/process_exit.h"

namespace hvd::runtime {
namespace {

constexpr std::size_t kMostFree = 2;

}  // namespace

FusionLease::FusionLease(FusionLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      memory_(std::move(other.memory_)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)) {}

FusionLease& FusionLease::operator=(FusionLease&& other) noexcept {
  FusionLease moved(std::move(other));
  std::swap(pool_, moved.pool_);
  std::swap(memory_, moved.memory_);
  std::swap(size_, moved.size_);
  std::swap(capacity_, moved.capacity_);
  return *this;
}

FusionLease::~FusionLease() {
  if (memory_) pool_->give_back({std::move(memory_), capacity_});
}

void FusionLease::abandon() noexcept {
  if (!memory_) return;
  keep_until_exit(std::shared_ptr<const void>(std::move(memory_)));
  pool_ = nullptr;
  size_ = capacity_ = 0;
}

FusionLease FusionBufferPool::lease(std::size_t size) {
  FusionLease lease;
  lease.pool_ = this;
  // The smallest that fits; otherwise the largest makes room for one that does.
  auto best = free_.end();
  for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
    if (buffer->capacity >= size && (best == free_.end() || buffer->capacity < best->capacity))
      best = buffer;
  }
  if (best != free_.end()) {
    lease.memory_ = std::move(best->memory);
    lease.capacity_ = best->capacity;
    free_.erase(best);
  } else {
    if (free_.size() == kMostFree) free_.pop_back();
    lease.memory_ = allocate_shared(arena_, std::max<std::size_t>(size, 64), true);
    lease.capacity_ = std::max<std::size_t>(size, 64);
  }
  lease.size_ = size;
  return lease;
}

void FusionBufferPool::trim(std::size_t largest) noexcept {
  std::erase_if(free_, [largest](const Buffer& buffer) { return buffer.capacity > largest; });
}

void FusionBufferPool::give_back(Buffer buffer) noexcept {
  // The larger buffers are the ones worth keeping.
  const auto place = std::find_if(free_.begin(), free_.end(),
                                  [&](const Buffer& b) { return b.capacity < buffer.capacity; });
  free_.insert(place, std::move(buffer));
  if (free_.size() > kMostFree) free_.pop_back();
}

}  // namespace hvd::runtime
