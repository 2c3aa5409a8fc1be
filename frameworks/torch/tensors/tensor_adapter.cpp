#include "tensors/tensor_adapter.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <utility>

#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "tensors/device_order.h"

namespace hvd {
namespace libtorch {
namespace {

std::optional<DataType> to_data_type(torch::ScalarType type) {
  static constexpr std::pair<torch::ScalarType, DataType> kTypes[] = {
      {torch::kUInt8, DataType::kUInt8},     {torch::kInt8, DataType::kInt8},
      {torch::kInt16, DataType::kInt16},     {torch::kInt32, DataType::kInt32},
      {torch::kInt64, DataType::kInt64},     {torch::kBool, DataType::kBool},
      {torch::kFloat16, DataType::kFloat16}, {torch::kBFloat16, DataType::kBFloat16},
      {torch::kFloat32, DataType::kFloat32}, {torch::kFloat64, DataType::kFloat64}};
  for (const auto& [own, known] : kTypes) {
    if (own == type) return known;
  }
  return std::nullopt;
}

/// Checks that the device is this rank's GPU. The core would check it only after the adapter has
/// allocated memory.
void check_gpu(const torch::Device& device, const Label& label) {
  const std::string what = label.str() + ": the tensor is on " + device.str();
  if (!device.is_cuda())
    throw UsageError(what + "; expected one on the CPU or a CUDA device; move it with cpu()");
  const std::optional<int> own = gpu_index();
  if (!own) {
    throw UsageError(what + (cuda_built()
                                 ? ", but hvd has found no GPU in this process (hvdrun "
                                   "--check-build gives the reason); move it with cpu()"
                                 : ", but this build of hvd has no CUDA (HVD_WITH_CUDA=OFF); "
                                   "rebuild hvd with it, or move the tensor with cpu()"));
  }
  if (device.index() == *own) return;
  throw UsageError(what + "; expected cuda:" + std::to_string(*own) +
                   ", the GPU that this rank works with (its local rank modulo the GPUs it sees, "
                   "or HVD_DEVICE); move it with to(hvd::device())");
}

}  // namespace

std::string Label::str() const {
  std::string text(operation);
  return name.empty() ? text + " (unnamed)" : text + " '" + std::string(name) + "'";
}

bool is_supported(torch::ScalarType type) noexcept { return to_data_type(type).has_value(); }

DataType data_type_of(const torch::Tensor& tensor, const Label& label) {
  const auto type = to_data_type(tensor.scalar_type());
  if (!type) {
    throw UsageError(
        label.str() + ": dtype " + c10::toString(tensor.scalar_type()) +
        " is not supported; expected uint8, int8, int16, int32, int64, bool, float16, bfloat16, "
        "float32 or float64; convert the tensor with to()");
  }
  return *type;
}

void check_tensor(const torch::Tensor& tensor, const Label& label, Elements elements) {
  if (!tensor.defined()) {
    throw UsageError(label.str() + ": the tensor is undefined; expected one with data");
  }
  if (tensor.layout() != torch::kStrided) {
    throw UsageError(label.str() + ": expected a dense tensor, got layout " +
                     c10::str(tensor.layout()) + "; convert it with to_dense()");
  }
  if (!tensor.is_cpu()) check_gpu(tensor.device(), label);
  if (elements != Elements::kSupported && tensor.is_complex()) return;
  if (elements == Elements::kMovable && !tensor.is_quantized()) return;
  data_type_of(tensor, label);
}

void check_writable(const torch::Tensor& tensor, const Label& label, Elements elements) {
  check_tensor(tensor, label, elements);
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw UsageError(
        label.str() +
        ": an in-place result cannot be written into a tensor whose elements share memory (an "
        "expanded one); use contiguous() or clone()");
  }
}

torch::Tensor packed(const torch::Tensor& tensor) {
  if (!tensor.requires_grad() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg())
    return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

TensorView view_of(const torch::Tensor& tensor) {
  TensorView view{
      .data = static_cast<std::byte*>(tensor.data_ptr()),
      .count = tensor.numel(),
      .dtype = DataType::kUInt8,
      .device = tensor.is_cuda() ? Device{DeviceType::kCuda, tensor.device().index()} : Device{},
      .shape = {tensor.sizes().begin(), tensor.sizes().end()}};
  const auto known = to_data_type(tensor.is_complex() ? c10::toRealValueType(tensor.scalar_type())
                                                      : tensor.scalar_type());
  view.dtype = known.value_or(DataType::kUInt8);
  const std::int64_t parts =
      tensor.is_complex() ? 2 : (known ? 1 : static_cast<std::int64_t>(tensor.element_size()));
  if (parts == 1) return view;
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape.push_back(parts);
  view.shape = shape;
  view.count *= parts;
  return view;
}

std::optional<torch::ScalarType> wire_type(torch::ScalarType type, Compression compression) {
  if (compression == Compression::kNone || (type != torch::kFloat32 && type != torch::kFloat64))
    return std::nullopt;
  return compression == Compression::kFloat16 ? torch::kFloat16 : torch::kBFloat16;
}

std::optional<torch::ScalarType> type_to_cast_to(torch::ScalarType type, Compression compression) {
  if (type == torch::kFloat32) return std::nullopt;
  return wire_type(type, compression);
}

Compression compression_in_core(torch::ScalarType type, Compression compression) noexcept {
  return type == torch::kFloat32 ? compression : Compression::kNone;
}

void mark_written(const torch::Tensor& tensor) {
  // Inference tensors have no version.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

Handle start(OperationTask task, Progress progress) {
  std::vector<Submission> submissions;
  submissions.push_back(std::move(task.submission));
  std::vector<std::function<torch::Tensor()>> finish;
  finish.push_back(std::move(task.finish));
  return start(std::move(submissions), std::move(finish), progress);
}

Handle start(std::vector<Submission> submissions,
             std::vector<std::function<torch::Tensor()>> finish, Progress progress) {
  begin_after_current_stream(submissions);
  std::vector<Operation> operations;
  if (!submissions.empty()) operations = submit_all(std::move(submissions), progress);
  return Handle(std::make_shared<PendingResult>(std::move(operations), std::move(finish)));
}

void make_group(const std::string& name, std::span<Submission> members) {
  for (std::size_t i = 0; i < members.size(); ++i) {
    members[i].group = name;
    members[i].group_size = static_cast<int>(members.size());
    members[i].group_index = static_cast<int>(i);
  }
}

Handle start_group(const std::string& name, std::vector<OperationTask> tasks, Progress progress) {
  std::vector<Submission> submissions;
  std::vector<std::function<torch::Tensor()>> finish;
  submissions.reserve(tasks.size());
  finish.reserve(tasks.size());
  for (OperationTask& task : tasks) {
    submissions.push_back(std::move(task.submission));
    finish.push_back(std::move(task.finish));
  }
  make_group(name, submissions);
  return start(std::move(submissions), std::move(finish), progress);
}

PendingResult::PendingResult(std::vector<Operation> operations,
                             std::vector<std::function<torch::Tensor()>> finish)
    : operations_(std::move(operations)), results_(Results{.finish = std::move(finish)}) {}

bool PendingResult::done() const noexcept {
  for (const Operation& operation : operations_) {
    if (!operation.done()) return false;
  }
  return true;
}

bool PendingResult::wait_for(std::chrono::nanoseconds timeout) const {
  if (operations_.size() == 1) return operations_[0].wait_for(timeout);
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::hours kLongest(24 * 365);  // a much longer time overflows the clock
  const auto until = Clock::now() + std::min<std::chrono::nanoseconds>(timeout, kLongest);
  for (const Operation& operation : operations_) {
    if (!operation.wait_for(until - Clock::now())) return false;
  }
  return true;
}

std::string PendingResult::describe_wait(std::chrono::nanoseconds limit) const {
  for (const Operation& operation : operations_) {
    if (!operation.done()) return operation.describe_wait(limit);
  }
  return {};
}

std::vector<torch::Tensor> PendingResult::wait() {
  // Waits for all operations before it throws the first error, so that the tensors of a group are
  // no longer in use when wait() returns.
  for (const Operation& operation : operations_) wait_with_check(operation);
  for (const Operation& operation : operations_) operation.status().raise_if_error();
  return results_.withLock([this](Results& results) {
    if (!results.finished) finish(results);
    if (results.error) std::rethrow_exception(results.error);
    current_stream_waits(results.on_device);
    for (const torch::Tensor& result : results.tensors) used_by_current_stream(result);
    return results.tensors;
  });
}

bool PendingResult::on_device() const {
  return std::any_of(operations_.begin(), operations_.end(), [](const Operation& operation) {
    return operation.output_ready() != nullptr;
  });
}

void PendingResult::finish(Results& results) const {
  const torch::NoGradGuard no_grad;
  for (const Operation& operation : operations_) current_stream_waits(operation);
  results.finished = true;
  try {
    std::vector<torch::Tensor> tensors;
    tensors.reserve(results.finish.size());
    for (const auto& finish : results.finish) tensors.push_back(finish());
    results.tensors = std::move(tensors);
  } catch (...) {
    results.error = std::current_exception();
  }
  results.finish.clear();
  if (on_device()) results.on_device = record_current_stream();
}

}  // namespace libtorch

bool Handle::done() const noexcept { return result_ && result_->done(); }

bool Handle::wait_for(std::chrono::nanoseconds timeout) const {
  if (!result_) {
    throw UsageError(
        "Handle::wait_for() on an empty handle; expected one that an operation returned");
  }
  return result_->wait_for(timeout);
}

std::string Handle::describe_wait(std::chrono::nanoseconds limit) const {
  if (!result_) {
    throw UsageError(
        "Handle::describe_wait() on an empty handle; expected one that an operation returned");
  }
  return result_->describe_wait(limit);
}

torch::Tensor Handle::wait() const {
  const std::vector<torch::Tensor> results = wait_all();
  if (results.size() != 1) {
    throw UsageError("Handle::wait(): expected one result, got " + std::to_string(results.size()) +
                     "; use wait_all() on a group or an alltoall");
  }
  return results.front();
}

std::vector<torch::Tensor> Handle::wait_all() const {
  if (!result_)
    throw UsageError("Handle::wait() on an empty handle; expected one that an operation returned");
  return result_->wait();
}

}  // namespace hvd
