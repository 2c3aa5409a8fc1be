#include "optimizer/flat_tensor.h"

#include "optimizer/gradient_reduction.h"

namespace hvd::libtorch {

torch::Tensor flat_part(const torch::Tensor& tensor, std::int64_t begin, std::int64_t size) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(tensor.is_non_overlapping_and_dense());
  torch::Tensor row = torch::empty({0}, tensor.options().requires_grad(false));
  row.set_(tensor.storage(), tensor.storage_offset() + begin, {size}, {1});
  return row;
}

torch::Tensor lying_as(const torch::Tensor& parameter, const torch::Tensor& tensor) {
  const std::vector<std::int64_t> strides = strides_for(parameter);
  if (tensor.layout() == torch::kStrided && tensor.strides() == strides && !tensor.is_neg() &&
      !tensor.is_conj())
    return tensor;
  return torch::empty_strided(parameter.sizes(), strides, tensor.options().layout(torch::kStrided))
      .copy_(tensor.layout() == torch::kStrided ? tensor : tensor.to_dense());
}

}  // namespace hvd::libtorch
