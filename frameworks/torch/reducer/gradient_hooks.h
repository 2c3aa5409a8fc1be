#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd::libtorch {

/// Tells when autograd accumulates a gradient, and keeps the hooks that do so alive.
///
/// Not thread-safe; but who is told is called from autograd's threads. An exception ends the
/// backward(). Older LibTorch cannot take a hook away that runs afterwards, so it may be called
/// when this object is gone.
class GradientHooks {
 public:
  /// Nothing has been added to `.grad` yet.
  using Before = std::function<void(std::size_t parameter)>;
  /// @param gradients what autograd has added to `.grad`, and still holds
  using After =
      std::function<void(std::size_t parameter, const torch::autograd::variable_list& gradients)>;

  explicit GradientHooks(const std::vector<torch::Tensor>& parameters);
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;
  ~GradientHooks() { remove(); }

  /// Hooks parameters that require grad and have no (live) hook. Call again after requires_grad or
  /// a dtype may have changed.
  void install(const Before& before, const After& after);
  /// There is nothing for install() to do.
  bool complete() const;
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

  static bool missing(const Hooked& hooked);
  void hook(std::size_t index, const Before& before, const After& after);
  static void unhook(Hooked& hooked) noexcept;

  std::vector<Hooked> parameters_;
};

}  // namespace hvd::libtorch
