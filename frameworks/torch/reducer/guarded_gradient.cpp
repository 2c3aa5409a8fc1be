// The members of GuardedGradient.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <utility>

#include "hvd/error.h"
#include "reducer/reduced_parameter.h"

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
  const ReducedParameter* const parameter = guarded_for_.load();
  if (parameter == nullptr) return;
  // An operator may make a copy below autograd, as detach() in Module::zero_grad() does, since
  // writes to it increase the version.
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) return;
  throw UsageError(
      std::string(parameter->wrapper()) + ": data() of the gradient of '" + parameter->name() +
      "' was called between backward() and step(), while the ranks reduce it "
      "(clip_grad_norm_(), clip_grad_value_() and the step() of a wrapped optimizer call it); " +
      right_order(parameter->wrapper()));
}

std::string right_order(const std::string& wrapper) {
  return "expected backward(); then synchronize(), or the clip_grad_norm_() or clip_grad_value_() "
         "of the " +
         wrapper + ", after which gradients are final; then the step() of the " + wrapper;
}

}  // namespace hvd::libtorch
