#include "optimizer/used_flags.h"

#include "hvd/torch/operations.h"

namespace hvd::libtorch {

const Submission& UsedFlags::prepare(const GradientReduction& how, const torch::Tensor& like,
                                     std::size_t count,
                                     const std::function<bool(std::size_t)>& used, std::size_t room,
                                     const std::function<void(std::span<float>)>& fill) {
  const torch::NoGradGuard no_grad;
  const auto own = is_supported(like.scalar_type()) ? like.scalar_type() : torch::kFloat32;
  const auto dtype = type_to_cast_to(own, how.compression).value_or(own);
  count_ = count;
  read_ = false;
  if (!flags_.defined() || flags_.scalar_type() != dtype ||
      values_.numel() != static_cast<std::int64_t>(count + room)) {
    values_ = torch::zeros({static_cast<std::int64_t>(count + room)}, torch::kFloat32);
    flags_ = values_.to(dtype);
    GradientReduction reduction = how;
    if (how.op == ReduceOp::kAdasum) reduction.op = ReduceOp::kSum;
    submission_ = reduction_in_place(how.scope + ".used", reduction, flags_);
  }
  auto* const values = values_.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < count; ++i) values[i] = used(i) ? 1.0F : 0.0F;
  if (room > 0) fill({values + count, room});
  if (!flags_.is_same(values_)) flags_.copy_(values_);
  return submission_;
}

void UsedFlags::read() {
  read_ = true;
  const torch::NoGradGuard no_grad;
  if (!flags_.is_same(values_)) values_.copy_(flags_);
}

std::span<const float> UsedFlags::room() const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(read_);
  return {values_.const_data_ptr<float>() + count_,
          static_cast<std::size_t>(values_.numel()) - count_};
}

}  // namespace hvd::libtorch
