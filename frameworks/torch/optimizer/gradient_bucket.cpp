#include "optimizer/gradient_bucket.h"

#include <c10/core/alignment.h>
#include <torch/types.h>

#include <cstring>
#include <utility>

#include "hvd/memory.h"
#include "optimizer/bucket_plan.h"
#include "optimizer/gradient_guard.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

static_assert(kGradientAlignment % c10::gAlignment == 0, "as aligned as a tensor of its own");

std::size_t room_for(const torch::Tensor& parameter) { return room_in_bucket(parameter.nbytes()); }

std::vector<std::int64_t> strides_for(const torch::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()), 1);
  for (std::size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * parameter.size(static_cast<std::int64_t>(d));
  return strides;
}

}  // namespace

GradientBucket::GradientBucket(std::string name, const GradientReduction& how,
                               std::span<const torch::Tensor> parameters) {
  std::size_t bytes = 0;
  for (const torch::Tensor& parameter : parameters) bytes += room_for(parameter);
  parameters.front().is_cuda() ? lay_out_on_gpu(parameters, bytes)
                               : lay_out_on_host(parameters, bytes);
  submission_ = reduction_in_place(std::move(name), how, view_of(all_));
  submission_.keep_alive = keep_alive({all_});
  submission_.alone = bytes >= kWorthACallOfItsOwn;
}

void GradientBucket::lay_out_on_host(std::span<const torch::Tensor> parameters, std::size_t bytes) {
  const std::shared_ptr<std::byte> memory = allocate_shared(bytes);
  std::size_t offset = 0;
  for (const torch::Tensor& parameter : parameters) {
    std::byte* const begin = memory.get() + offset;
    // What lies between the gradients is reduced with them. The rest is not touched: its pages are
    // taken when the gradients move in.
    std::memset(begin + parameter.nbytes(), 0, room_for(parameter) - parameter.nbytes());
    views_.push_back(GuardedGradient::of(torch::from_blob(
        begin, parameter.sizes(), strides_for(parameter), [memory](void*) {},
        parameter.options().requires_grad(false))));
    offset += room_for(parameter);
  }
  all_ = torch::from_blob(
      memory.get(), {static_cast<std::int64_t>(bytes / parameters.front().element_size())},
      [memory](void*) {}, parameters.front().options().requires_grad(false));
}

/// Views share the storage, so that LibTorch's allocator knows whose memory a stream uses.
void GradientBucket::lay_out_on_gpu(std::span<const torch::Tensor> parameters, std::size_t bytes) {
  const auto element = static_cast<std::int64_t>(parameters.front().element_size());
  all_ = torch::zeros({static_cast<std::int64_t>(bytes) / element},
                      parameters.front().options().requires_grad(false));
  std::int64_t offset = 0;
  for (const torch::Tensor& parameter : parameters) {
    torch::Tensor view = GuardedGradient::of(all_);
    view.unsafeGetTensorImpl()->set_sizes_and_strides(parameter.sizes(), strides_for(parameter),
                                                      offset);
    views_.push_back(std::move(view));
    offset += static_cast<std::int64_t>(room_for(parameter)) / element;
  }
}

}  // namespace hvd::libtorch
