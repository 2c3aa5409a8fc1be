#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace hvd::bench {

/// LibTorch's ProcessGroupNCCL of one rank.
/// @throws std::runtime_error that says why there is none
c10::intrusive_ptr<c10d::Backend> make_nccl_group();

}  // namespace hvd::bench
