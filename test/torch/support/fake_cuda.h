#pragma once

#include <cstddef>

#include "torch/support/cuda_device.h"

/// A simulated CUDA device for a LibTorch without one, so that the adapter's code runs with tensors
/// on a GPU. Streams, events and memory are those of a FakeGpu (support/fake_gpu.h), and the CPU's
/// kernels compute operators in the same memory. Programs that link fake_cuda.cpp have the device,
/// and hvd::init() finds it.
///
/// The FakeGpu records each of LibTorch's operators as an access to its tensors in the current
/// stream. An access to memory that the device may still use, or may not use yet, is a fault, even
/// if the values are right. hvd's own queues run as late as possible, when a thread waits for them.
///
/// As in the caching allocator, freed memory is reused immediately on the stream that it was
/// allocated on, unless other streams were recorded as its users.
namespace hvd::testing {

/// The number of times that the calling thread has waited for the device: reads by the host, and
/// synchronisations of streams and events.
int fake_host_waits();

/// Makes allocations of at least this many bytes fail from now on; 0: all succeed.
void refuse_fake_memory_from(std::size_t bytes);

/// Reports the stream as being captured into a CUDA graph. Operators still compute.
class FakeCapture {
 public:
  explicit FakeCapture(const c10::Stream&);
  FakeCapture(const FakeCapture&) = delete;
  FakeCapture& operator=(const FakeCapture&) = delete;
  ~FakeCapture();

 private:
  const c10::Stream stream_;
};

/// The numbers of hvd's calls to the device.
struct HvdCalls {
  int synchronize = 0;
  int records = 0;
  int waits = 0;
  int launches = 0;
  int made = 0;  ///< memory that hvd has allocated by itself
};
HvdCalls hvd_calls();

/// The number of LibTorch's operators that have run on the device, in any thread. Each counts as
/// one launch.
int fake_operators();

}  // namespace hvd::testing
