#include "optimizer/flat_tensor.h"

#include <cstddef>
#include <cstring>

#include "optimizer/gradient_reduction.h"

namespace hvd::libtorch {
namespace {

/// LibTorch copies more than this with several threads.
constexpr std::int64_t kFewBytes = std::int64_t{128} << 10;

}  // namespace

torch::Tensor flat_part(const torch::Tensor& tensor, std::int64_t begin, std::int64_t size) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(tensor.is_non_overlapping_and_dense());
  torch::Tensor row = torch::empty({0}, tensor.options().requires_grad(false));
  row.set_(tensor.storage(), tensor.storage_offset() + begin, {size}, {1});
  return row;
}

torch::Tensor with_strides(at::IntArrayRef strides, const torch::Tensor& tensor) {
  if (tensor.layout() == torch::kStrided && tensor.strides() == strides && !tensor.is_neg() &&
      !tensor.is_conj())
    return tensor;
  return torch::empty_strided(tensor.sizes(), strides, tensor.options().layout(torch::kStrided))
      .copy_(tensor.layout() == torch::kStrided ? tensor : tensor.to_dense());
}

torch::Tensor lying_as(const torch::Tensor& parameter, const torch::Tensor& tensor) {
  return with_strides(strides_for(parameter), tensor);
}

void copy_elements(const torch::Tensor& from, std::int64_t from_begin, const torch::Tensor& to,
                   std::int64_t to_begin, std::int64_t count) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(from.scalar_type() == to.scalar_type());
  const auto size = static_cast<std::int64_t>(from.element_size());
  if (!from.is_cpu() || !to.is_cpu() || count * size > kFewBytes) {
    flat_part(to, to_begin, count).copy_(flat_part(from, from_begin, count));
    return;
  }
  if (count == 0) return;
  std::memcpy(static_cast<std::byte*>(to.mutable_data_ptr()) + to_begin * size,
              static_cast<const std::byte*>(from.const_data_ptr()) + from_begin * size,
              static_cast<std::size_t>(count * size));
}

}  // namespace hvd::libtorch
