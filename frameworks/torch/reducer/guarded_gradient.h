#pragma once

#include <c10/core/TensorImpl.h>
#include <torch/types.h>

#include <atomic>
#include <string>
#include <typeinfo>

namespace hvd::libtorch {

class ReducedParameter;

/// A dense gradient whose `data()` throws while it is guarded. LibTorch's clip_grad_norm_() and
/// clip_grad_value_() and the step() of some optimizers write through `data()`, which no version
/// counter records. Ordinary operations increase `_version()`.
///
/// The guard is thread-safe. Otherwise the same rules as for a tensor apply.
class GuardedGradient final : public c10::TensorImpl {
 public:
  GuardedGradient(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta type)
      : c10::TensorImpl(std::move(storage), keys, type) {}

  /// Makes another tensor of the same memory. Autograd does not relate the two, so that an
  /// optimizer may detach it in place.
  static torch::Tensor of(const torch::Tensor& memory);
  /// Null for any other tensor.
  static GuardedGradient* find(const torch::Tensor& gradient) {
    c10::TensorImpl* const tensor = gradient.unsafeGetTensorImpl();
    return typeid(*tensor) == typeid(GuardedGradient) ? static_cast<GuardedGradient*>(tensor)
                                                      : nullptr;
  }

  /// @param parameter must live until release()
  void guard(const ReducedParameter& parameter) noexcept {
    guarded_for_.store(&parameter, std::memory_order_release);
  }
  void release() noexcept { guarded_for_.store(nullptr, std::memory_order_release); }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;

 private:
  void refuse_while_guarded() const;

  std::atomic<const ReducedParameter*> guarded_for_ = nullptr;
};

/// The end of an error message: how to change a gradient between backward() and step().
/// @param wrapper name of the class that reduces gradients
std::string right_order(const std::string& wrapper);

}  // namespace hvd::libtorch
