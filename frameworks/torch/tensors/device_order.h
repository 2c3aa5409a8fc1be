#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <optional>
#include <span>

#include "hvd/collectives.h"
#include "hvd/status.h"

/// Orders hvd's work on a GPU and the program's by LibTorch's current streams, without a CUDA
/// header. For tensors on the CPU these functions have no effect and cost one comparison.
///
/// The current stream is the calling thread's, on this rank's GPU (hvd::gpu_index()).
namespace hvd::libtorch {

/// Lets submissions with tensors on the GPU begin after the work that is in the current stream now.
/// @throws UsageError when the stream is being captured into a CUDA graph
void begin_after_current_stream(std::span<Submission> submissions);
void begin_after_current_stream(Submission& submission);

/// Makes later work of the current stream wait for the results of the operation, without blocking
/// the host. No effect for an operation that has failed or has its results on the host. @pre done()
/// @throws as begin_after_current_stream()
void current_stream_waits(const Operation& operation);
void current_stream_waits(const EventPtr& event);

/// Records an event after the work that is in the current stream now.
/// @throws as begin_after_current_stream()
EventPtr record_current_stream();

/// Records that the current stream also uses a tensor of another stream, so that LibTorch's
/// allocator does not reuse its memory before both streams have finished with it.
void used_by_current_stream(const torch::Tensor& tensor);

/// Orders work of several streams on the same memory.
class StreamChain {
 public:
  /// Makes later work of the current stream wait for the work that is now in the stream of the
  /// previous call.
  void follow(const torch::Tensor& tensor);
  void reset() noexcept { last_.reset(); }

 private:
  std::optional<c10::Stream> last_;
};

/// The calling thread's current stream on the tensor's device; nullopt for the CPU.
std::optional<c10::Stream> current_stream_of(const torch::Tensor& tensor);

/// The device of the first of these tensors that is on a GPU; nullopt without one.
std::optional<c10::Device> gpu_of(at::TensorList tensors);

/// A stream of LibTorch's pool, for work beside the program's streams; nullopt without a GPU.
std::optional<c10::Stream> pool_stream_of(const std::optional<c10::Device>& gpu);

}  // namespace hvd::libtorch
