#pragma once

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {

/// The elements of a contiguous tensor as a vector, of a dtype that the core supports: the
/// tensor's, or bytes. Shares its memory.
torch::Tensor elements_of(const torch::Tensor& contiguous);

/// Tensors of one dtype and any shapes and strides, whose elements form one vector, one tensor
/// after the other. If the tensors are adjacent in memory, the vector is that memory.
class Pieces {
 public:
  /// @param packs whether to copy the tensors' elements into new memory, for an input
  /// @throws UsageError for no tensors, different dtypes or devices, and as check_writable()
  Pieces(std::vector<at::Tensor> tensors, bool packs, const Label& label);

  const torch::Tensor& whole() const noexcept { return whole_; }
  /// The vector as one row for each tensor. @throws UsageError unless the tensors have one size
  torch::Tensor rows() const;
  bool equal_sizes() const noexcept;
  /// The elements of each tensor, in elements of whole().
  const std::vector<std::int64_t>& counts() const noexcept { return counts_; }
  /// Whether the vector has separate memory.
  bool apart() const noexcept { return apart_; }
  /// Copies the vector to the tensors, unless it is their memory.
  void copy_back() const;

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<std::int64_t> counts_;
  torch::Tensor whole_;
  bool apart_ = false;
  std::string label_;
};

}  // namespace hvd::libtorch
