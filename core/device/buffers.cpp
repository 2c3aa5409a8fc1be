#include "device/buffers.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "base/process_exit.h"

namespace hvd::device {
namespace {

/// Two buffers, so that one batch is packed while another is reduced.
constexpr std::size_t kBuffers = 2;
constexpr std::size_t kGranule = 64 << 10;

std::size_t capacity_for(std::size_t size) {
  return (std::max<std::size_t>(size, 1) + kGranule - 1) / kGranule * kGranule;
}

}  // namespace

std::size_t fusion_buffer_bytes(std::int64_t fusion_threshold) noexcept {
  constexpr std::size_t kPage = 2 << 20;  // page of the device; ncclMemAlloc rounds up to it
  const auto bytes = static_cast<std::size_t>(fusion_threshold);
  return (bytes + bytes / 16 + kPage - 1) / kPage * kPage;
}

BufferLease::BufferLease(BufferLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      memory_(std::move(other.memory_)),
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

BufferLease::~BufferLease() {
  if (memory_) keep_until_exit(std::move(memory_));
}

void BufferLease::release(EventPtr after) {
  if (pool_ == nullptr) return;
  pool_->free_.push_back({std::move(memory_), capacity_, std::move(after)});
  pool_ = nullptr;
  memory_ = nullptr;
  size_ = capacity_ = 0;
}

BufferPool::BufferPool(Context& context) : context_(context) {}

// The owner of the pool has waited for the device or given up on it. If it gave up, buffers in use
// stay allocated.
BufferPool::~BufferPool() {
  std::ranges::move(free_, std::back_inserter(retired_));
  std::ranges::move(prepared_, std::back_inserter(retired_));
  if (!retired_.empty()) free_retired();
  if (retired_.empty()) return;
  HVD_LOG(kDebug) << retired_.size() << " device buffers are still in use and are not freed";
  for (Buffer& buffer : retired_) keep_until_exit(std::move(buffer.memory));
}

void BufferPool::free_retired() noexcept {
  try {
    const DeviceGuard guard(context_.api(), context_.device());
    std::vector<std::shared_ptr<std::byte>> done;
    std::erase_if(retired_, [&done](Buffer& buffer) {
      if (!reached(buffer.free_after)) return false;
      done.push_back(std::move(buffer.memory));
      return true;
    });
    if (!done.empty()) context_.run_on_helper([done = std::move(done)]() mutable { done.clear(); });
  } catch (const std::exception& error) {
    // The device has failed; its operations report that.
    HVD_LOG(kDebug) << "a device buffer was not freed: " << error.what();
  }
}

void BufferPool::reserve(std::size_t size) {
  HVD_EXPECT(!allocation_ && free_.empty() && prepared_.empty(), "no buffer was requested yet");
  begin_allocation(std::vector<std::size_t>(kBuffers, capacity_for(size)), false);
}

bool BufferPool::prepare(std::span<const std::size_t> sizes) {
  if (!retired_.empty()) free_retired();
  std::ranges::move(prepared_, std::inserter(free_, free_.begin()));
  prepared_.clear();
  if (!collect_allocated()) return false;
  // Serve the largest request first. Each request gets the buffer that was released first among
  // those that fit, so that the buffers are used in turn.
  wanted_.assign(sizes.begin(), sizes.end());
  std::ranges::sort(wanted_, std::greater<>());
  std::vector<std::size_t> missing;
  for (const std::size_t size : wanted_) {
    const auto found = std::ranges::find_if(
        free_, [size](const Buffer& buffer) { return buffer.capacity >= size; });
    if (found == free_.end()) {
      missing.push_back(capacity_for(size));
      continue;
    }
    prepared_.push_back(std::move(*found));
    prepared_.back().prepared_for = size;
    free_.erase(found);
  }
  if (missing.empty()) return true;
  begin_allocation(std::move(missing), true);
  return allocation_->done.load(std::memory_order_acquire) && prepare(sizes);
}

/// Returns false while buffers are being allocated.
bool BufferPool::collect_allocated() {
  if (!allocation_) return true;
  if (!allocation_->done.load(std::memory_order_acquire)) return false;
  const auto finished = std::exchange(allocation_, nullptr);
  if (finished->error) {
    if (needs_allocation_) std::rethrow_exception(finished->error);
    HVD_LOG(kDebug) << "the device has no memory for buffers of the fusion threshold; buffers are "
                       "allocated when they are needed, as large as needed";
  }
  allocations_ += finished->resources.size();
  std::ranges::move(finished->resources, std::back_inserter(free_));
  return true;
}

void BufferPool::begin_allocation(std::vector<std::size_t> capacities, bool needed) {
  for (std::size_t i = 0; i < capacities.size(); ++i) retire_smallest();
  needs_allocation_ = needed;
  allocation_ = context_.allocate_on_helper<Buffer>(
      [source = context_.memory(),
       capacities = std::move(capacities)](std::vector<Buffer>& buffers) {
        for (const std::size_t bytes : capacities) {
          OwnedMemory block = source->allocate(bytes);
          buffers.push_back({std::move(block.memory), bytes, std::move(block.usable_after)});
        }
      });
}

/// Retires the smallest buffer, because the new request is larger.
void BufferPool::retire_smallest() {
  if (free_.size() < kBuffers) return;
  const auto smallest = std::ranges::min_element(free_, {}, &Buffer::capacity);
  retired_.push_back(std::move(*smallest));
  free_.erase(smallest);
}

BufferLease BufferPool::lease(std::size_t size, Stream stream) {
  const auto found = std::ranges::find(prepared_, size, &Buffer::prepared_for);
  HVD_EXPECT(found != prepared_.end(), "prepare() has returned true for this size");
  BufferLease lease;
  lease.pool_ = this;
  lease.size_ = size;
  lease.memory_ = std::move(found->memory);
  lease.capacity_ = found->capacity;
  if (found->free_after) context_.api().wait(stream, {found->free_after->native()});
  prepared_.erase(found);
  return lease;
}

std::span<std::byte> BufferRing::acquire(std::span<const std::span<std::byte>> buffers,
                                         std::size_t size, Stream stream) {
  HVD_EXPECT(!acquired_, "the buffer acquired before has been released");
  HVD_EXPECT(free_after_.empty() || buffers.empty() || free_after_.size() == buffers.size(),
             "the buffers are always the same");
  if (!fits(buffers, size)) return {};
  free_after_.resize(buffers.size());
  if (free_after_[next_]) api_.wait(stream, {free_after_[next_]->native()});
  acquired_ = true;
  return buffers[next_].first(size);
}

void BufferRing::release(EventPtr after) {
  free_after_[next_] = std::move(after);
  next_ = (next_ + 1) % free_after_.size();
  acquired_ = false;
}

bool BufferRing::idle() const {
  return !acquired_ && std::all_of(free_after_.begin(), free_after_.end(),
                                   [](const EventPtr& event) { return reached(event); });
}

}  // namespace hvd::device
