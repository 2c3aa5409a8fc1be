#pragma once

#include <string>

#include "optimizer/gradient_transfer.h"

namespace hvd::libtorch {

/// A parameter whose gradient is reduced.
struct ReducedParameter {
  std::string name;   ///< as the user calls it
  std::string label;  ///< as ranks agree on it
  int group = -1;     ///< index of the user's group, or -1
  GradientTransfer transfer = {};

  const torch::Tensor& tensor() const noexcept { return transfer.parameter(); }
  /// It may get a gradient.
  bool active() const { return tensor().requires_grad(); }
};

}  // namespace hvd::libtorch
