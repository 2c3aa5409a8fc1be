#include "optimizer/finite_check.h"

#include <vector>

#include "hvd/torch/operations.h"

namespace hvd::libtorch {

void FiniteCheck::look_at(std::size_t parameter, const torch::Tensor& gradient) {
  if (found_ || !gradient.defined()) return;
  const torch::NoGradGuard no_grad;
  torch::Tensor values = gradient.detach();
  // Entries of one place add up, and may overflow.
  if (values.is_sparse()) values = values.coalesce().values();
  if (torch::isfinite(values).all().item<bool>()) return;
  found_ = {.parameter = parameter, .nan = torch::isnan(values).any().item<bool>()};
}

std::string FiniteCheck::difference(std::span<const ReducedParameter> parameters) const {
  const torch::Tensor own = torch::zeros({how_.process_set.size()}, torch::kInt64);
  if (found_) {
    own[how_.process_set.rank()] =
        2 * static_cast<std::int64_t>(found_->parameter) + (found_->nan ? 2 : 1);
  }
  const torch::Tensor all = allreduce(
      own, {.name = how_.scope + ".finite", .op = ReduceOp::kMax, .process_set = how_.process_set});
  const auto* const codes = all.const_data_ptr<std::int64_t>();
  const std::vector<int> ranks = how_.process_set.ranks();
  constexpr std::size_t kMost = 8;
  std::string text;
  std::size_t found = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (codes[r] == 0 || ++found > kMost) continue;
    const auto parameter = static_cast<std::size_t>((codes[r] - 1) / 2);
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(ranks[r]) +
            (codes[r] % 2 == 0 ? " nan" : " inf") + " in the gradient of '" +
            parameters[parameter].name() + "'";
  }
  if (found > kMost) text += ", and " + std::to_string(found - kMost) + " more ranks";
  return text;
}

}  // namespace hvd::libtorch
