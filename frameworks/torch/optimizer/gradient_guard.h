#pragma once

#include <c10/core/TensorImpl.h>
#include <torch/types.h>

#include <atomic>
#include <string>

namespace hvd::libtorch {

/// Whose gradient is guarded, for messages.
struct GuardedParameter {
  std::string name = {};
  const char* wrapper = "DistributedOptimizer";  ///< the class that reduces it
};

/// A dense gradient that does not let `data()` take it while guarded. That is how LibTorch's
/// clip_grad_norm_() and clip_grad_value_() and the step() of some optimizers reach it, and what
/// they write there no version counter shows; an ordinary operation counts up `_version()`.
///
/// Thread-safe as far as the guard goes; otherwise as a tensor.
class GuardedGradient final : public c10::TensorImpl {
 public:
  GuardedGradient(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta type)
      : c10::TensorImpl(std::move(storage), keys, type) {}

  /// Another tensor of the same memory, in no relation to it that autograd knows of, so that an
  /// optimizer may detach it in place.
  static torch::Tensor of(const torch::Tensor& memory);
  /// Null for a tensor that is none.
  static GuardedGradient* find(const torch::Tensor& gradient) {
    return dynamic_cast<GuardedGradient*>(gradient.unsafeGetTensorImpl());
  }

  /// @param parameter must live until release()
  void guard(const GuardedParameter& parameter) noexcept { guarded_for_.store(&parameter); }
  void release() noexcept { guarded_for_.store(nullptr); }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;

 private:
  void refuse_while_guarded() const;

  std::atomic<const GuardedParameter*> guarded_for_ = nullptr;
};

/// What to do instead of touching a gradient between backward() and step(): the end of an error
/// message. @param wrapper the class that reduces gradients
std::string right_order(const std::string& wrapper);

}  // namespace hvd::libtorch
