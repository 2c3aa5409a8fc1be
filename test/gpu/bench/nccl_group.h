#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace hvd::bench {

/// Makes LibTorch's ProcessGroupNCCL, whose ranks meet in `store`.
/// @throws std::runtime_error with the reason if this build does not have it
c10::intrusive_ptr<c10d::Backend> make_nccl_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size);

}  // namespace hvd::bench
