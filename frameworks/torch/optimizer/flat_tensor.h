#pragma once

#include <torch/types.h>

#include <cstdint>

namespace hvd::libtorch {

/// Some elements of a tensor in the order of its memory, as one row: of the same memory, but no
/// view in the sense of autograd. @pre the tensor is dense and has no gaps
torch::Tensor flat_part(const torch::Tensor& tensor, std::int64_t begin, std::int64_t size);
/// All of them.
inline torch::Tensor flat(const torch::Tensor& tensor) {
  return flat_part(tensor, 0, tensor.numel());
}

/// `tensor`, if it is dense and has these strides, or a copy that is and has.
torch::Tensor with_strides(at::IntArrayRef strides, const torch::Tensor& tensor);
/// `tensor`, if it lies as `parameter` does in memory, or a copy that does; see strides_for().
torch::Tensor lying_as(const torch::Tensor& parameter, const torch::Tensor& tensor);

/// Copies `count` elements, counted in the order of memory. Neither tensor has gaps, and both have
/// one dtype and device. A few elements on the CPU cost no call of LibTorch.
void copy_elements(const torch::Tensor& from, std::int64_t from_begin, const torch::Tensor& to,
                   std::int64_t to_begin, std::int64_t count);

}  // namespace hvd::libtorch
