// Compiled if LibTorch has CUDA and all headers that ProcessGroupNCCL.hpp includes were found
// (test/gpu/CMakeLists.txt).
#include "gpu/bench/nccl_group.h"

#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hvd::bench {

c10::intrusive_ptr<c10d::Backend> make_nccl_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size) {
  // Options contains an ncclConfig_t, whose layout differs between minor versions of NCCL's header.
  const std::uint64_t theirs = torch::cuda::nccl::version();
  const auto major = static_cast<int>(theirs >> 32);
  const auto minor = static_cast<int>((theirs >> 16) & 0xffff);
  if (major != NCCL_MAJOR || minor != NCCL_MINOR) {
    throw std::runtime_error("LibTorch was built with NCCL " + std::to_string(major) + "." +
                             std::to_string(minor) + ", this program with the header of " +
                             std::to_string(NCCL_MAJOR) + "." + std::to_string(NCCL_MINOR) +
                             "; configure with -DHVD_BENCH_NCCL_INCLUDE_DIR=, the folder of the "
                             "nccl.h that belongs to LibTorch");
  }
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size);
}

}  // namespace hvd::bench
