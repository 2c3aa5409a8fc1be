#include "tensors/allocators.h"

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/memory.h"

namespace hvd::libtorch {
namespace {

/// Translates an error of LibTorch into one of hvd, without a backtrace.
template <class Function>
auto without_backtrace(const Function& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

// LibTorch initialises its allocator with its first operation on a GPU. If a program has only
// wrapped memory from its own cudaMalloc in tensors, there was no such operation, and the allocator
// would refuse to allocate.
c10::Allocator* initialised_allocator() {
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CUDA);
  auto* const caching = dynamic_cast<c10::DeviceAllocator*>(allocator);
  if (caching != nullptr && !caching->initialized())
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return allocator;
}

// The allocator manages memory per stream: an allocation belongs to the current stream. A stream of
// LibTorch's pool is used here, because on the default stream hvd would have to wait for all
// computations of the program, and could not record an event during a graph's capture. While hvd is
// initialised, it allocates from one thread and for one device, so the stream stays the same and
// freed memory is reused.
DeviceBlock allocate_block(int index, std::size_t bytes) {
  return without_backtrace([&]() -> DeviceBlock {
    c10::Allocator* const allocator = initialised_allocator();
    if (allocator == nullptr) return {};
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    thread_local const c10::Stream stream =
        c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(device);
    const c10::StreamGuard guard(stream);
    const auto owner = std::make_shared<c10::DataPtr>(allocator->allocate(bytes));
    return DeviceBlock{{owner, static_cast<std::byte*>(owner->get())}, stream.native_handle()};
  });
}

void empty_allocators_cache(int) {
  auto* const allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
  if (allocator != nullptr) without_backtrace([&] { allocator->emptyCache(); });
}

[[maybe_unused]] const bool given_to_hvd = [] {
  use_device_memory(device_memory());
  return true;
}();

}  // namespace

DeviceMemory device_memory() {
  return {.allocate = &allocate_block, .empty_cache = &empty_allocators_cache};
}

namespace {

/// The sizes of the gradients that are expected now, in ascending order; a size that several
/// objects expect is there several times. Thread-safe. Never destroyed, since tensors may be made
/// by static destructors.
class ExpectedSizes {
 public:
  static ExpectedSizes& instance() {
    static auto* const sizes = new ExpectedSizes;
    return *sizes;
  }
  bool contain(std::size_t bytes) const {
    const auto now = now_.load(std::memory_order_acquire);
    return now && std::binary_search(now->begin(), now->end(), bytes);
  }
  void add(std::span<const std::size_t> sizes) {
    change([sizes](Sizes& all) { all.insert(all.end(), sizes.begin(), sizes.end()); });
  }
  /// @return whether no sizes are left
  bool remove(std::span<const std::size_t> sizes) {
    return change([sizes](Sizes& all) {
      for (const std::size_t size : sizes) all.erase(std::find(all.begin(), all.end(), size));
    });
  }

 private:
  using Sizes = std::vector<std::size_t>;

  bool change(const std::function<void(Sizes&)>& apply) {
    const std::lock_guard lock(mutex_);
    const auto before = now_.load(std::memory_order_acquire);
    Sizes sizes = before ? *before : Sizes();
    apply(sizes);
    std::sort(sizes.begin(), sizes.end());
    const bool none = sizes.empty();
    now_.store(none ? nullptr : std::make_shared<const Sizes>(std::move(sizes)),
               std::memory_order_release);
    return none;
  }

  std::mutex mutex_;
  std::atomic<std::shared_ptr<const Sizes>> now_;
};

/// The allocator of the process when the library was loaded.
c10::Allocator& ordinary() {
  static c10::Allocator* const allocator = c10::GetCPUAllocator();
  return *allocator;
}

void release(void* data) {
  if (!free_shared_block(data)) ordinary().raw_deleter()(data);
}

/// Allocates large tensors in shared memory, whose pages remain mapped when they are freed: all of
/// them, or the gradients that are expected. Other tensors, and those that do not fit in shared
/// memory, come from the former allocator, which also throws when there is no memory. As in
/// LibTorch's allocator, the context of a tensor's memory is its address. Thread-safe.
class SharedAllocator final : public c10::Allocator {
 public:
  explicit SharedAllocator(bool takes_all) : takes_all_(takes_all) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    std::byte* const data = takes(bytes) ? allocate_shared_block(bytes) : nullptr;
    if (data == nullptr) return ordinary().allocate(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return ordinary().raw_deleter() == nullptr ? nullptr : &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool takes_all() const noexcept { return takes_all_; }

 private:
  bool takes(std::size_t bytes) const {
    if (takes_all_) return bytes >= kSmallest;
    // The number of a backward pass is -1 in threads that run none.
    return bytes >= kSmallestShared && torch::autograd::get_current_graph_task_id() >= 0 &&
           ExpectedSizes::instance().contain(bytes);
  }

  /// The smallest tensor that is shared if all large ones are.
  static constexpr std::size_t kSmallest = std::size_t{64} << 10;
  const bool takes_all_;
};

/// Null if no tensor may be shared. Set before the first tensor is made, since no other thread uses
/// LibTorch then, and since tensors of another allocator are not shared.
const SharedAllocator* const installed = []() -> const SharedAllocator* {
  const std::optional<bool> all = shared_allocator_setting();
  if (all == false) return nullptr;
  if (all && !has_shared_memory()) {
    TORCH_WARN(
        "HVD_SHM_ALLOCATOR=1 has no effect: this process cannot get shared "
        "memory (HVD_LOG_LEVEL=debug logs the reason)");
    return nullptr;
  }
  ordinary();
  // Never destroyed, since tensors may be freed after all other objects.
  auto* const allocator = new SharedAllocator(all.value_or(false));
  // With priority 0 the program can still install its own allocator, for which 0 is the default
  // priority.
  c10::SetCPUAllocator(allocator, all.value_or(false) ? 1 : 0);
  return allocator;
}();

bool can_share_gradients() {
  if (installed == nullptr || c10::GetCPUAllocator() != installed) return false;
  if (has_shared_memory()) return true;
  TORCH_WARN_ONCE(
      "hvd: this process cannot get shared memory for gradients, so they are copied to be reduced "
      "(HVD_LOG_LEVEL=debug logs the reason)");
  return false;
}

}  // namespace

SharedGradients::SharedGradients(std::vector<std::size_t> sizes) : sizes_(std::move(sizes)) {
  std::erase_if(sizes_, [](std::size_t bytes) { return bytes < kSmallestShared; });
  active_ = !sizes_.empty() && can_share_gradients();
  if (!active_ || installed->takes_all()) sizes_.clear();
  if (!sizes_.empty()) ExpectedSizes::instance().add(sizes_);
}

SharedGradients::SharedGradients(SharedGradients&& other) noexcept
    : sizes_(std::exchange(other.sizes_, {})), active_(std::exchange(other.active_, false)) {}

SharedGradients& SharedGradients::operator=(SharedGradients&& other) noexcept {
  std::swap(sizes_, other.sizes_);
  std::swap(active_, other.active_);
  return *this;
}

SharedGradients::~SharedGradients() {
  if (!sizes_.empty() && ExpectedSizes::instance().remove(sizes_)) return_shared_pages();
}

}  // namespace hvd::libtorch
