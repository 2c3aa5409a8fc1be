#pragma once

#include <c10/core/Stream.h>
#include <torch/types.h>

#include <optional>
#include <span>

#include "hvd/collectives.h"
#include "hvd/status.h"

/// The order between hvd's work on a GPU and the program's: LibTorch's current streams, without a
/// header of CUDA. For tensors on the CPU all of this does nothing and costs a comparison.
///
/// Whatever is said of a current stream is about the calling thread's, on this rank's GPU
/// (hvd::gpu_index()).
namespace hvd::libtorch {

/// Submissions with tensors on the GPU begin when it has done what has been put into the current
/// stream so far.
/// @throws UsageError when the stream is being captured into a CUDA graph.
void begin_after_current_stream(std::span<Submission> submissions);
void begin_after_current_stream(Submission& submission);

/// What is put into the current stream from now on finds the results of the operation. Does not
/// wait on the host. Nothing to do for one that failed or has its results on the host. @pre done()
/// @throws as begin_after_current_stream()
void current_stream_waits(const Operation& operation);
void current_stream_waits(const EventPtr& event);

/// The point that the current stream has come to. @throws as begin_after_current_stream()
EventPtr record_current_stream();

/// The memory of a tensor that was made under one stream is now read or written under the current
/// one as well: LibTorch's allocator must not use it again before both are done with it.
void used_by_current_stream(const torch::Tensor& tensor);

/// Work on the same memory that comes from several streams, one after the other.
class StreamChain {
 public:
  /// What is put into the current stream from now on comes after everything that was put into the
  /// stream of the last call.
  void follow(const torch::Tensor& tensor);
  void reset() noexcept { last_.reset(); }

 private:
  std::optional<c10::Stream> last_;
};

/// The calling thread's current stream on the tensor's device; nothing for the CPU.
std::optional<c10::Stream> current_stream_of(const torch::Tensor& tensor);

}  // namespace hvd::libtorch
