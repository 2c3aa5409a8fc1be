#include "optimizer/gradient_bucket.h"

#include <c10/core/alignment.h>
#include <torch/types.h>

#include <cstring>
#include <utility>

#include "hvd/memory.h"
#include "optimizer/bucket_plan.h"
#include "optimizer/gradient_guard.h"
#include "optimizer/shard_plan.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

static_assert(kGradientAlignment % c10::gAlignment == 0, "as aligned as a tensor of its own");

std::size_t room_for(const torch::Tensor& parameter) { return room_in_bucket(parameter.nbytes()); }

}  // namespace

GradientBucket::GradientBucket(std::string name, const GradientReduction& how,
                               std::span<const torch::Tensor> parameters) {
  const auto element = static_cast<std::int64_t>(parameters.front().element_size());
  std::size_t bytes = 0;
  for (const torch::Tensor& parameter : parameters) {
    first_.push_back(static_cast<std::int64_t>(bytes) / element);
    bytes += room_for(parameter);
  }
  TensorView all = view_of(parameters.front());
  all.data = nullptr;
  all.count = elements_ = static_cast<std::int64_t>(bytes) / element;
  all.shape = {all.count};
  // What a GPU packs, what is cast on its way and what a GradientHook reduces can only be reduced
  // as a whole.
  const bool scatters = how.sharded && how.compression == Compression::kNone && !how.hook &&
                        parameters.front().is_cpu();
  submission_ = scatters ? scatter_in_place(std::move(name), how, std::move(all))
                         : reduction_in_place(std::move(name), how, std::move(all));
  if (scatters)
    first_own_row_ = rows_at(elements_, how.process_set.size(), how.process_set.rank()).begin;
  submission_.alone = bytes >= kWorthACallOfItsOwn;
  parameters.front().is_cuda() ? begin_gathering() : lay_out(parameters, bytes);
}

void GradientBucket::lay_out(std::span<const torch::Tensor> parameters, std::size_t bytes) {
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
  flat_ = torch::from_blob(
      memory.get(), {elements_}, [memory](void*) {},
      parameters.front().options().requires_grad(false));
  submission_.input.data = submission_.output.data = memory.get();
  submission_.output.data += first_own_row_ * parameters.front().element_size();
  submission_.keep_alive = memory;
}

void GradientBucket::begin_gathering() {
  gathered_ = std::make_shared<Gathered>();
  gathered_->parts.reserve(first_.size());
  gathered_->gradients.reserve(first_.size());
  submission_.keep_alive = gathered_;
}

void GradientBucket::add(const torch::Tensor& gradient) {
  TensorPart part{nullptr, first_[gathered_->parts.size()], 0};
  if (gradient.defined()) {
    part.data = static_cast<std::byte*>(gradient.mutable_data_ptr());
    part.count = gradient.numel();
    gathered_->gradients.push_back(gradient);
  }
  gathered_->parts.push_back(part);
  submission_.parts = gathered_->parts;
}

void GradientBucket::let_go(bool done) {
  submission_.parts = {};
  if (!done) return begin_gathering();
  gathered_->parts.clear();
  gathered_->gradients.clear();
}

}  // namespace hvd::libtorch
