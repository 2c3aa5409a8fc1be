#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>

// The parts of CUDA's headers that core/device/cuda/kernels.cu uses, for a C++ compiler. A launch
// runs the kernel at once, thread by thread.
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;

struct dim3 {
  dim3(unsigned width = 1) : x(width) {}  // as in CUDA, not explicit
  unsigned x;
};
inline thread_local dim3 threadIdx;
inline thread_local dim3 blockIdx;
inline thread_local dim3 gridDim;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  cudaStream_t stream;
};

namespace hvd::testing {

struct KernelLaunch {
  unsigned blocks;
  unsigned threads;
  /// Runs one thread of the kernel to its end. No kernel of hvd waits for other threads.
  std::function<void(unsigned block, unsigned thread)> run;
};
/// Called for each launch.
inline std::function<void(const KernelLaunch&)> on_launch;

}  // namespace hvd::testing

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const std::type_identity_t<Parameters>&... arguments) {
  const unsigned blocks = config->gridDim.x;
  const unsigned threads = config->blockDim.x;
  if (blocks == 0 || blocks > 0x7fffffffU || threads == 0 || threads > 1024)
    return cudaErrorInvalidConfiguration;
  hvd::testing::on_launch({blocks, threads, [&](unsigned block, unsigned thread) {
                             gridDim = dim3(blocks);
                             blockIdx = dim3(block);
                             threadIdx = dim3(thread);
                             kernel(arguments...);
                           }});
  return cudaSuccess;
}
