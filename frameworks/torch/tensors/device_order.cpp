#include "tensors/device_order.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <utility>

#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::libtorch {
namespace {

c10::impl::VirtualGuardImpl gpus() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

c10::Stream current_stream() {
  return gpus().getStream(
      {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu_index().value_or(0))});
}

/// Records an event for a submission. An error's text names the operation, because backward() may
/// throw the error to a caller that has not submitted the operation.
EventPtr record_for(const Submission& submission) {
  try {
    return record_current_stream();
  } catch (const UsageError& error) {
    throw UsageError(std::string(to_string(submission.kind())) +
                     (submission.name.empty() ? " (unnamed)" : " '" + submission.name + "'") +
                     ": " + error.what());
  }
}

}  // namespace

EventPtr record_current_stream() { return record_event(current_stream().native_handle()); }

void begin_after_current_stream(std::span<Submission> submissions) {
  EventPtr point;  // shared by all submissions
  for (Submission& submission : submissions) {
    if (submission.input.device.type == DeviceType::kCpu) continue;
    if (!point) point = record_for(submission);
    submission.input_ready = point;
  }
}

void begin_after_current_stream(Submission& submission) {
  begin_after_current_stream({&submission, 1});
}

void current_stream_waits(const EventPtr& event) {
  // After shutdown the GPUs have finished all work of the job.
  if (event && is_initialized()) wait_for_event(current_stream().native_handle(), event);
}

void current_stream_waits(const Operation& operation) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(operation.done());
  current_stream_waits(operation.output_ready());
}

void used_by_current_stream(const torch::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return;
  if (tensor.is_sparse()) {
    used_by_current_stream(tensor._indices());
    used_by_current_stream(tensor._values());
  } else {
    gpus().recordDataPtrOnStream(tensor.storage().data_ptr(), *current_stream_of(tensor));
  }
}

std::optional<c10::Stream> current_stream_of(const torch::Tensor& tensor) {
  if (!tensor.is_cuda()) return std::nullopt;
  return gpus().getStream(tensor.device());
}

std::optional<c10::Device> gpu_of(at::TensorList tensors) {
  for (const torch::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.is_cuda()) return tensor.device();
  }
  return std::nullopt;
}

std::optional<c10::Stream> pool_stream_of(const std::optional<c10::Device>& gpu) {
  if (!gpu) return std::nullopt;
  return gpus().getStreamFromGlobalPool(*gpu);
}

void StreamChain::follow(const torch::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const std::optional<c10::Stream> last = std::exchange(last_, current_stream_of(tensor));
  if (last && *last != *last_)
    wait_for_event(last_->native_handle(), record_event(last->native_handle()));
}

}  // namespace hvd::libtorch
