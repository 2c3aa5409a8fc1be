#pragma once

#include <cstddef>

#include "torch/support/cuda_device.h"

/// A simulated CUDA device in a LibTorch that has none, so that the adapter's own code runs with
/// tensors on a GPU: streams, events and memory are those of a FakeGpu (support/fake_gpu.h),
/// operators are computed by the CPU's kernels in the same memory. A program that links
/// fake_cuda.cpp has it, and hvd::init() finds it.
///
/// LibTorch's operators take part in the FakeGpu's bookkeeping: each is an access to its tensors in
/// the current stream. Memory that the device may still use, or not yet, is a fault, whatever
/// values came out. hvd's own queues run when somebody waits for them, no sooner than they must.
///
/// As in the caching allocator, memory that is freed is used again under the stream that it was
/// allocated under, at once, unless other streams were recorded as its users.
namespace hvd::testing {

/// How often the calling thread has waited for the device: tensors read by the host, streams and
/// events synchronised.
int fake_host_waits();

/// From now on there is no memory for tensors of this many bytes and more; 0: there is.
void refuse_fake_memory_from(std::size_t bytes);

/// The stream is being captured into a CUDA graph, as far as anybody can see who asks; operators
/// compute all the same.
class FakeCapture {
 public:
  explicit FakeCapture(const c10::Stream&);
  FakeCapture(const FakeCapture&) = delete;
  FakeCapture& operator=(const FakeCapture&) = delete;
  ~FakeCapture();

 private:
  const c10::Stream stream_;
};

/// What hvd has asked of the device.
struct HvdCalls {
  int synchronize = 0;
  int records = 0;
  int waits = 0;
  int launches = 0;
  int made = 0;  ///< memory that hvd has allocated by itself
};
HvdCalls hvd_calls();

/// How many of LibTorch's operators have run on the device, by any thread; each stands for a
/// launch.
int fake_operators();

}  // namespace hvd::testing
