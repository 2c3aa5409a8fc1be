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
  /// Called after autograd has added to `.grad`, with the number of the parameter and the summands,
  /// which autograd still holds.
  using After = std::function<void(std::size_t, const torch::autograd::variable_list&)>;
  /// Called before autograd adds to `.grad`, with the number of the parameter. Returns whether
  /// autograd is to add; otherwise the gradient is dropped.
  using Before = std::function<bool(std::size_t)>;
  /// See set_gradient_error_handler(). May be null.
  static std::atomic<void (*)()> error_handler;

  explicit GradientHooks(const std::vector<torch::Tensor>& parameters);
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks() { remove(); }

  /// Hooks parameters that require grad and have no (live) hook. Call again after requires_grad or
  /// a dtype may have changed. @param after may be empty
  void install(const Before& before, const After& after);
  /// Whether all parameters that require grad have their hooks.
  bool complete() const;
  /// The same in less time: hooks that were lost with a replaced accumulator are not missed.
  bool complete_so_far() const;
  void remove() noexcept;

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
