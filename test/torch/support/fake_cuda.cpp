#include "torch/support/fake_cuda.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "bootstrap/gpu.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

// Two devices, so that ranks 0 and 1 use different ones, and each has one that it does not use.
constexpr int kDevices = 2;

// hvd and LibTorch are two ranks of the FakeGpu.
constexpr int kHvd = 0;
constexpr int kLibTorch = 1;

thread_local int host_waits = 0;
std::atomic<int> operators = 0;
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kDevices> streams_of_thread = {};

/// The device and LibTorch's streams on it. Exists as long as the process, like autograd's threads.
class FakeCuda {
 public:
  static FakeCuda& instance() {
    static FakeCuda* const cuda = new FakeCuda;
    return *cuda;
  }

  FakeGpu& gpu() { return gpu_; }
  device::Api& api() { return *api_; }
  std::shared_ptr<device::Api> api_of_hvd() { return gpu_.api(kHvd); }

  /// Stream 0 of each device is its default stream; the others are numbered over all devices.
  device::Stream queue(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    device::Stream& queue = queues_[{stream.device_index(), stream.id()}];
    if (queue.handle == nullptr) {
      const device::DeviceGuard guard(*api_, stream.device_index());
      queue = api_->create_stream();
    }
    return queue;
  }
  c10::Stream new_stream(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, {c10::DeviceType::CUDA, device}, ++streams_);
  }

 private:
  FakeCuda() : gpu_({.seed = 7, .devices = kDevices}), api_(gpu_.api(kLibTorch)) {}

  FakeGpu gpu_;
  const std::shared_ptr<device::Api> api_;
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, device::Stream>
      queues_;                 // guarded by mutex_
  c10::StreamId streams_ = 0;  // guarded by mutex_
};

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, {c10::DeviceType::CUDA, device},
                     streams_of_thread.at(static_cast<std::size_t>(device)));
}

// --- Memory ---

class FakeAllocator final : public c10::Allocator {
 public:
  static FakeAllocator& instance() {
    static FakeAllocator* const allocator = new FakeAllocator;
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::DeviceType::CUDA, device_of_thread);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    TORCH_CHECK_WITH(OutOfMemoryError, refused_from == 0 || bytes < refused_from,
                     "the simulated GPU has no memory for ", bytes, " bytes");
    const std::lock_guard lock(mutex_);
    const Pool pool{current_stream(device_of_thread), (bytes + 511) / 512 * 512};
    std::vector<std::byte*>& free =
        free_[{pool.stream.device_index(), pool.stream.id(), pool.bytes}];
    std::byte* memory = nullptr;
    if (free.empty()) {
      memory = FakeCuda::instance().gpu().allocate(pool.bytes);
      blocks_.emplace(memory, Block{pool, false});
    } else {
      memory = free.back();
      free.pop_back();
    }
    return {memory, memory, &free_block, device};
  }
  std::atomic<std::size_t> refused_from = 0;

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  void record_stream(void* memory, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(static_cast<std::byte*>(memory));
    if (block != blocks_.end() && block->second.pool.stream != stream) block->second.others = true;
  }

 private:
  struct Pool {
    c10::Stream stream;
    std::size_t bytes;
  };
  struct Block {
    Pool pool;
    bool others;  // other streams have used it
  };

  static void free_block(void* context) {
    if (context != nullptr) instance().give_back(static_cast<std::byte*>(context));
  }
  void give_back(std::byte* memory) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(memory);
    FakeGpu& gpu = FakeCuda::instance().gpu();
    if (block->second.others) {  // the allocator would wait for those streams
      blocks_.erase(block);
      gpu.release(memory);
      return;
    }
    gpu.forget_seen(memory);
    const Pool& pool = block->second.pool;
    free_[{pool.stream.device_index(), pool.stream.id(), pool.bytes}].push_back(memory);
  }

  std::mutex mutex_;
  std::map<std::byte*, Block> blocks_;  // guarded by mutex_
  std::map<std::tuple<c10::DeviceIndex, c10::StreamId, std::size_t>, std::vector<std::byte*>>
      free_;  // guarded by mutex_
};

// --- Streams and events ---

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, device_of_thread}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no ", device);
    device_of_thread = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : device_of_thread);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return FakeCuda::instance().new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return FakeCuda::instance().new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams_of_thread.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return FakeCuda::instance().queue(stream).handle;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    const device::Stream queue = FakeCuda::instance().queue(stream);
    const device::DeviceGuard guard(api(), stream.device_index());
    if (*event == nullptr) *event = api().create_event().handle;
    api().record({*event}, queue);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const device::Stream queue = FakeCuda::instance().queue(stream);
    const device::DeviceGuard guard(api(), stream.device_index());
    api().wait(queue, {event});
  }
  bool queryEvent(void* event) const override {
    const device::DeviceGuard guard(api(), device_of_thread);
    return event == nullptr || api().reached({event});
  }
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) return;
    const device::DeviceGuard guard(api(), device);
    api().destroy_event({event});
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++host_waits;
    FakeCuda::instance().gpu().run_through(FakeCuda::instance().queue(stream),
                                           {"synchronize", {}, {}, {}});
  }
  void synchronizeEvent(void* event) const override {
    ++host_waits;
    while (!queryEvent(event)) {
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    FakeAllocator::instance().record_stream(memory.get_context(), stream);
  }

 private:
  static device::Api& api() { return FakeCuda::instance().api(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

/// Registers the device with autograd, so that it handles streams.
struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return {c10::DeviceType::CUDA, device_of_thread};
  }
};

// --- Operators ---

/// One call of an operator. Converts CUDA tensors among the arguments to CPU tensors in the same
/// memory, and the results back.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const std::size_t first = stack_.size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      writes_ = alias != nullptr && alias->isWrite();
      take(stack_[first + i]);
    }
    count_host_wait();
    const device::Stream queue = FakeCuda::instance().queue(
        current_stream(device_.has_index() ? device_.index() : device_of_thread));
    FakeGpu& gpu = FakeCuda::instance().gpu();
    gpu.run_through(queue, {op_.operator_name().name, std::move(ranges_), {}, {}});
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    ranges_.clear();
    writes_ = true;
    for (const auto& [alias, original] : written_) copy_size_back(alias, original);
    for (std::size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i)
      give_back(stack_[i]);
    if (!ranges_.empty())
      gpu.run_through(queue, {op_.operator_name().name + "'s result", std::move(ranges_), {}, {}});
  }

 private:
  void take(c10::IValue& value) {
    if (value.isTensor()) {
      value = on_host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_host(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(on_host(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = value.toDevice();
      value = c10::Device(c10::kCPU);
    }
  }

  at::Tensor on_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host_written_ = host_written_ || writes_;
      return tensor;
    }
    device_ = tensor.device();
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    auto known = storages_.find(storage);
    if (known == storages_.end()) {
      const c10::Storage alias(c10::Storage::use_byte_size_t(), storage->nbytes(),
                               c10::DataPtr(storage->mutable_data(), c10::kCPU),
                               c10::GetCPUAllocator(), /*resizable=*/true);
      known = storages_.emplace(storage, alias).first;
    }
    at::Tensor alias = like(tensor, known->second, c10::DispatchKey::CPU);
    originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
    if (writes_) written_.emplace_back(alias, tensor);
    record_access(tensor);
    return alias;
  }

  static at::Tensor like(const at::Tensor& tensor, const c10::Storage& storage,
                         c10::DispatchKey key) {
    at::Tensor other = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(key), tensor.dtype());
    other.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                       tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      other.unsafeGetTensorImpl()->set_wrapped_number(true);
    return other;
  }

  void record_access(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    ranges_.push_back({begin, static_cast<std::size_t>(last + 1) * tensor.element_size(), writes_});
  }

  /// Counts a wait if the host reads results of the device.
  void count_host_wait() const {
    static const std::set<std::string> reading = {"aten::_local_scalar_dense", "aten::equal",
                                                  "aten::nonzero", "aten::is_nonzero"};
    if (reading.count(op_.operator_name().name) > 0 || host_written_) ++host_waits;
  }

  /// Copies the size of a written tensor, which the kernel may have resized.
  void copy_size_back(const at::Tensor& alias, const at::Tensor& original) {
    if (alias.const_data_ptr() != original.const_data_ptr()) {
      c10::StorageImpl* const storage = original.storage().unsafeGetStorageImpl();
      const std::size_t bytes = alias.storage().nbytes();
      storage->set_data_ptr_noswap(copied(alias));
      storage->set_nbytes(bytes);
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                            alias.storage_offset());
      record_access(original);
    } else if (alias.sizes() != original.sizes() || alias.strides() != original.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                            alias.storage_offset());
    }
  }

  c10::DataPtr copied(const at::Tensor& tensor) const {
    const c10::DeviceGuard guard(device_);
    c10::DataPtr memory = FakeAllocator::instance().allocate(tensor.storage().nbytes());
    if (tensor.storage().nbytes() > 0)
      std::memcpy(memory.get(), tensor.storage().data(), tensor.storage().nbytes());
    return memory;
  }

  void give_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = on_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(on_device(tensor));
      value = list;
    }
  }

  at::Tensor on_device(const at::Tensor& tensor) {
    if (!tensor.defined() || host_written_) return tensor;
    const auto same = originals_.find(tensor.unsafeGetTensorImpl());
    if (same != originals_.end()) return same->second;
    for (const auto& [original, alias] : storages_) {
      if (alias.unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl()) continue;
      return like(tensor,
                  c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(original)),
                  c10::DispatchKey::CUDA);
    }
    const c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                               copied(tensor), &FakeAllocator::instance(), true);
    at::Tensor result = like(tensor, storage, c10::DispatchKey::CUDA);
    record_access(result);
    return result;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  c10::Device device_{c10::DeviceType::CUDA, device_of_thread};
  bool writes_ = false;        // the current argument is written
  bool host_written_ = false;  // the result is on the CPU
  std::vector<FakeGpu::Range> ranges_;
  std::map<c10::StorageImpl*, c10::Storage> storages_;
  std::map<c10::TensorImpl*, at::Tensor> originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++operators;
  HostCall(op, *stack).run();
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &FakeAllocator::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &FakeAllocator::instance(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(type));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, std::int64_t offset,
                        at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

/// The gradient of the input of a batch norm with given sums, for which the CPU has no kernel.
at::Tensor batch_norm_backward_elemt(const at::Tensor& gradient, const at::Tensor& input,
                                     const at::Tensor& mean, const at::Tensor& invstd,
                                     const std::optional<at::Tensor>& weight,
                                     const at::Tensor& sum_dy, const at::Tensor& sum_dy_xmu,
                                     const at::Tensor& count) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = input.size(1);
  const auto of = [&](const at::Tensor& values) { return values.reshape(shape); };
  const at::Tensor total = count.sum();
  const at::Tensor slope = invstd * invstd * sum_dy_xmu / total;
  return ((gradient - of(sum_dy / total) - (input - of(mean)) * of(slope)) * of(invstd * *weight))
      .to(input.scalar_type());
}

[[maybe_unused]] const bool installed = [] {
  runtime::use_device_api(FakeCuda::instance().api_of_hvd());
  c10::SetAllocator(c10::DeviceType::CUDA, &FakeAllocator::instance());
  return true;
}();

}  // namespace

int cuda_devices() { return kDevices; }
std::vector<std::string> take_cuda_faults() { return FakeCuda::instance().gpu().drain_faults(); }
int fake_host_waits() { return host_waits; }
void refuse_fake_memory_from(std::size_t bytes) { FakeAllocator::instance().refused_from = bytes; }
HvdCalls hvd_calls() {
  const FakeGpuCounts counts = FakeCuda::instance().gpu().counts(kHvd);
  return {.synchronize = counts.synchronize,
          .records = counts.records,
          .waits = counts.waits,
          .launches = counts.launches,
          .made = counts.made};
}
int fake_operators() { return operators; }
FakeCapture::FakeCapture(const c10::Stream& stream) : stream_(stream) {
  FakeCuda::instance().gpu().begin_capture(FakeCuda::instance().queue(stream_), kLibTorch);
}
FakeCapture::~FakeCapture() {
  FakeCuda::instance().gpu().end_capture(FakeCuda::instance().queue(stream_));
}
c10::Stream other_cuda_stream(c10::DeviceIndex device) {
  return FakeCuda::instance().new_stream(device);
}

}  // namespace hvd::testing

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, hvd::testing::FakeHooks)
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&hvd::testing::run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // Operators with a CPU kernel use it instead of LibTorch's composition of other operators, so
  // that results have the same bits as on the CPU.
  static const std::set<std::string> own = {"empty.memory_format", "empty_strided",
                                            "set_.source_Storage_storage_offset", "copy_"};
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto handle = c10::Dispatcher::singleton().findOp(op);
    if (op.name.rfind("aten::", 0) != 0 || !handle ||
        !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    const std::string name =
        op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
    if (own.count(name) == 0)
      library.impl(name.c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&hvd::testing::run_on_host>());
  }
  library.impl("empty.memory_format", &hvd::testing::empty);
  library.impl("empty_strided", &hvd::testing::empty_strided);
  library.impl("set_.source_Storage_storage_offset", &hvd::testing::set_storage);
  library.impl("batch_norm_backward_elemt", &hvd::testing::batch_norm_backward_elemt);
  // copy_ would look for a CUDA kernel without the dispatcher.
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&hvd::testing::run_on_host>());
}
