#include "optimizer/unscaler.h"

namespace hvd::libtorch {

void Unscaler::uses(torch::Device device) {
  if (device.is_cuda()) device_ = device;
}

void Unscaler::add(const torch::Tensor& values) {
  if (!values.is_cuda()) {
    finite_ = finite_ && torch::isfinite(values).all().item<bool>();
    values.mul_(factor_);
  } else if (values.scalar_type() == torch::kFloat32 || values.scalar_type() == torch::kFloat16) {
    together_[values.scalar_type()].push_back(values);
  } else {
    alone_.push_back(values);
  }
}

torch::Tensor Unscaler::run() {
  const auto options = torch::TensorOptions().dtype(torch::kFloat32).device(device_);
  torch::Tensor found = torch::full({1}, finite_ ? 0.0F : 1.0F, options);
  for (auto& [type, values] : together_) {
    at::_amp_foreach_non_finite_check_and_unscale_(values, found,
                                                   torch::full({1}, factor_, options));
  }
  for (const torch::Tensor& values : alone_) {
    found = torch::maximum(found, torch::isfinite(values).logical_not().any().to(torch::kFloat32));
    values.mul_(factor_);
  }
  return found;
}

}  // namespace hvd::libtorch
