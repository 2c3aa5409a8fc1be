#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd::libtorch {

/// Hooks that run when autograd accumulates a gradient. Keeps the accumulators, and so the hooks,
/// alive.
///
/// Not thread-safe. The functions are called on autograd's threads; an exception in them ends
/// backward(). Older LibTorch cannot remove a hook that runs after the accumulation, so `after` may
/// be called even after this object was destroyed.
class GradientHooks {
 public:
  /// The accumulation that follows Before.
  enum class Next {
    kAdd,   ///< autograd adds the gradient to `.grad`
    kDrop,  ///< the gradient is dropped
    kTaken  ///< Before has set `.grad`, so that After is not called
  };
  /// Called after autograd has added to `.grad`, with the number of the parameter and the summands,
  /// which autograd still holds.
  using After = std::function<void(std::size_t, const torch::autograd::variable_list&)>;
  /// Called before autograd adds to `.grad`, with the number of the parameter and the summands.
  using Before = std::function<Next(std::size_t, const torch::autograd::variable_list&)>;
  /// See set_gradient_error_handler(). May be null.
  static std::atomic<void (*)()> error_handler;

  explicit GradientHooks(const std::vector<torch::Tensor>& parameters);
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks() { remove(); }

  /// Hooks parameters that require grad and have no (live) hook. Call again after requires_grad or
  /// a dtype may have changed. @param after may be empty
  void install(Before before, After after);
  /// Whether all parameters that require grad have their hooks.
  bool complete() const;
  /// Like complete(), but faster: does not detect hooks that were lost with a replaced accumulator.
  bool complete_so_far() const;
  void remove() noexcept;
  /// Whether no other hook runs when this hooked parameter's gradient is accumulated.
  bool alone(std::size_t parameter) const;

 private:
  // The pointer type differs between LibTorch versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(torch::Tensor()));
  struct Hooked {
    torch::Tensor parameter;
    // Tensors refer to their accumulator weakly. Without this reference it would be destroyed with
    // the hooks.
    Accumulator accumulator = {};
    torch::autograd::FunctionPreHook* pre_hook = nullptr;
    std::uintptr_t post_hook = 0;
  };

  static bool missing(const Hooked& hooked);
  static void unhook(Hooked& hooked) noexcept;

  std::vector<Hooked> parameters_;
};

}  // namespace hvd::libtorch
