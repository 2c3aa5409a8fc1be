#include "data/vector_functions.h"

#include <ATen/ATen.h>

#include <mutex>

namespace hvd::libtorch {
namespace {

using VectorFunction = at::Tensor (*)(const at::Tensor&);

// What ATen/cpu/vml.h gives to MKL.
constexpr VectorFunction kFunctions[] = {
    at::acos, at::asin, at::atan,  at::cos, at::erf,  at::erfc, at::erfinv, at::exp,
    at::log,  at::log2, at::log10, at::sin, at::sqrt, at::tan,  at::tanh,   at::trunc};

void call_all() {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor value = at::full({1}, 0.5, at::TensorOptions(at::kCPU).dtype(type));
    for (const VectorFunction function : kFunctions) function(value);
  }
}

}  // namespace

void settle_vector_functions() {
  static std::once_flag once;
  std::call_once(once, call_all);
}

}  // namespace hvd::libtorch
