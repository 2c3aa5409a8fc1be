#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hvd::libtorch {

/// Tells a listener when autograd accumulates a gradient, and keeps the hooks that do so alive.
///
/// Not thread-safe; but the listener is called from autograd's threads.
class GradientHooks {
 public:
  class Listener {
   public:
    Listener() = default;
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;
    virtual ~Listener() = default;
    /// Nothing has been added to `.grad` yet. An exception ends the backward().
    virtual void before_accumulate(std::size_t parameter) = 0;
    /// @param gradients what autograd has added to `.grad`, and still holds
    virtual void after_accumulate(std::size_t parameter,
                                  const torch::autograd::variable_list& gradients) = 0;
  };

  explicit GradientHooks(const std::vector<torch::Tensor>& parameters);
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks() { remove(); }

  /// Hooks parameters that require grad and have no (live) hook. Call again after requires_grad or
  /// a dtype may have changed. Hooks do nothing once the listener is gone.
  void install(const std::weak_ptr<Listener>& listener);
  void remove() noexcept;

 private:
  // Its pointer type differs between LibTorch versions.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(torch::Tensor()));
  struct Hooked {
    torch::Tensor parameter;
    // Tensors refer to their accumulator weakly: unless somebody holds it, it goes, and the hooks
    // with it.
    Accumulator accumulator = {};
    torch::autograd::FunctionPreHook* pre_hook = nullptr;
    std::uintptr_t post_hook = 0;
  };

  void hook(std::size_t index, const std::weak_ptr<Listener>& listener);
  static void unhook(Hooked& hooked) noexcept;

  std::vector<Hooked> parameters_;
};

}  // namespace hvd::libtorch
