#include "optimizer/gradient_guard.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "hvd/error.h"

namespace hvd::libtorch {

torch::Tensor GuardedGradient::of(const torch::Tensor& memory) {
  torch::Tensor gradient = at::detail::make_tensor<GuardedGradient>(
      c10::Storage(memory.storage()), memory.key_set(), memory.dtype());
  gradient.unsafeGetTensorImpl()->set_sizes_and_strides(memory.sizes(), memory.strides(),
                                                        memory.storage_offset());
  return gradient;
}

c10::intrusive_ptr<c10::TensorImpl> GuardedGradient::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_metadata_change) const {
  refuse_while_guarded();
  return TensorImpl::shallow_copy_and_detach(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> GuardedGradient::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_metadata_change) const {
  refuse_while_guarded();
  return TensorImpl::shallow_copy_and_detach(std::move(version), allow_metadata_change);
}

void GuardedGradient::refuse_while_guarded() const {
  const GuardedParameter* const parameter = guarded_for_.load();
  if (parameter == nullptr) return;
  // An operator's copy, such as detach()'s in Module::zero_grad(), below autograd. What is done
  // with that is seen in the version.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) return;
  throw UsageError(
      std::string(parameter->wrapper) + ": the gradient of '" + parameter->name +
      "' was asked for its data() between backward() and step(), while it is being reduced over "
      "the ranks "
      "(clip_grad_norm_() and clip_grad_value_() do so, and the step() of a wrapped optimizer); " +
      right_order(parameter->wrapper));
}

std::string right_order(const std::string& wrapper) {
  return "expected backward(); then synchronize(), or the clip_grad_norm_() or clip_grad_value_() "
         "of the " +
         wrapper + ", after which gradients are final; then the step() of the " + wrapper;
}

}  // namespace hvd::libtorch
