#include "device/buffers.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "base/process_exit.h"

namespace hvd::device {
namespace {

/// One batch is packed while another is reduced.
constexpr std::size_t kTurns = 2;
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

/// Buffers being made. The pool reads them once `done` is set. If the pool has been destroyed, the
/// thread that made them frees them.
struct BufferPool::Making {
  explicit Making(bool is_needed) : needed(is_needed) {}
  const bool needed;  // a batch waits for them
  std::atomic<bool> done{false};
  std::vector<Buffer> buffers = {};
  std::exception_ptr error = nullptr;
};

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

// The owner of the pool has waited for the device or given up on it. In the second case buffers in
// use are left allocated.
BufferPool::~BufferPool() {
  std::ranges::move(free_, std::back_inserter(retired_));
  std::ranges::move(prepared_, std::back_inserter(retired_));
  if (!retired_.empty()) free_what_is_done();
  if (retired_.empty()) return;
  HVD_LOG(kDebug) << retired_.size() << " device buffers are still in use and are not freed";
  for (Buffer& buffer : retired_) keep_until_exit(std::move(buffer.memory));
}

void BufferPool::free_what_is_done() noexcept {
  try {
    const DeviceGuard guard(context_.api(), context_.device());
    std::vector<std::shared_ptr<std::byte>> done;
    std::erase_if(retired_, [&done](Buffer& buffer) {
      if (!reached(buffer.free_after)) return false;
      done.push_back(std::move(buffer.memory));
      return true;
    });
    if (!done.empty()) context_.run_aside([done = std::move(done)]() mutable { done.clear(); });
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "a device buffer was not freed: "
                    << error.what();  // the device has failed, which others report
  }
}

void BufferPool::reserve(std::size_t size) {
  HVD_EXPECT(!making_ && free_.empty() && prepared_.empty(), "nothing was asked for yet");
  make(std::vector<std::size_t>(kTurns, capacity_for(size)), false);
}

bool BufferPool::prepare(std::span<const std::size_t> sizes) {
  if (!retired_.empty()) free_what_is_done();
  std::ranges::move(prepared_, std::inserter(free_, free_.begin()));
  prepared_.clear();
  if (!take_what_was_made()) return false;
  // The largest first, and for each the first buffer that fits, which was returned first: buffers
  // take turns.
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
  make(std::move(missing), true);
  return making_->done.load(std::memory_order_acquire) && prepare(sizes);
}

/// Returns false while the buffers are being made.
bool BufferPool::take_what_was_made() {
  if (!making_) return true;
  if (!making_->done.load(std::memory_order_acquire)) return false;
  const std::shared_ptr<Making> made = std::exchange(making_, nullptr);
  if (made->error) {
    if (made->needed) std::rethrow_exception(made->error);
    HVD_LOG(kDebug) << "there is no memory on the device for buffers of the fusion threshold; they "
                       "are made when they are needed, as large as needed";
  }
  allocations_ += made->buffers.size();
  std::ranges::move(made->buffers, std::back_inserter(free_));
  return true;
}

void BufferPool::make(std::vector<std::size_t> capacities, bool needed) {
  for (std::size_t i = 0; i < capacities.size(); ++i) retire_for_one_more();
  making_ = std::make_shared<Making>(needed);
  context_.run_aside([source = context_.memory(), making = making_,
                      capacities = std::move(capacities)]() noexcept {
    try {
      for (const std::size_t bytes : capacities) {
        OwnedMemory made = source->allocate(bytes);
        making->buffers.push_back({std::move(made.memory), bytes, std::move(made.usable_after)});
      }
    } catch (...) {
      making->error = std::current_exception();
    }
    making->done.store(true, std::memory_order_release);
  });
}

/// Retires the smallest buffer, because the new request is larger.
void BufferPool::retire_for_one_more() {
  if (free_.size() < kTurns) return;
  const auto smallest = std::ranges::min_element(free_, {}, &Buffer::capacity);
  retired_.push_back(std::move(*smallest));
  free_.erase(smallest);
}

BufferLease BufferPool::lease(std::size_t size, Stream stream) {
  const auto found = std::ranges::find(prepared_, size, &Buffer::prepared_for);
  HVD_EXPECT(found != prepared_.end(), "prepare() was true for this size");
  BufferLease lease;
  lease.pool_ = this;
  lease.size_ = size;
  lease.memory_ = std::move(found->memory);
  lease.capacity_ = found->capacity;
  if (found->free_after) context_.api().wait(stream, {found->free_after->native()});
  prepared_.erase(found);
  return lease;
}

}  // namespace hvd::device
