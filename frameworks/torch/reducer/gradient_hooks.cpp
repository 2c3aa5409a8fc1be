#include "reducer/gradient_hooks.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace hvd::libtorch {
namespace {

using torch::autograd::variable_list;

/// Calls the function. The handler may replace its exception.
template <class Call>
auto guarded(const Call& call) {
  try {
    return call();
  } catch (...) {
    if (void (*const handler)() = GradientHooks::error_handler.load()) handler();
    throw;
  }
}

/// The state that the hooks of all parameters share.
struct HookState {
  const GradientHooks::Before before;
  const GradientHooks::After after;
  /// For each parameter: whether its last gradient was taken before the accumulation. Two threads
  /// may reach a parameter.
  std::vector<std::atomic<bool>> taken;
};

class BeforeHook final : public torch::autograd::FunctionPreHook {
 public:
  BeforeHook(std::shared_ptr<HookState> state, std::size_t parameter)
      : state_(std::move(state)), parameter_(parameter) {}
  variable_list operator()(const variable_list& gradients) override {
    using Next = GradientHooks::Next;
    const Next next = guarded([&] { return state_->before(parameter_, gradients); });
    state_->taken[parameter_].store(next == Next::kTaken, std::memory_order_relaxed);
    return next == Next::kAdd ? gradients : variable_list(gradients.size());
  }

 private:
  const std::shared_ptr<HookState> state_;
  const std::size_t parameter_;
};

class AfterHook final : public torch::autograd::FunctionPostHook {
 public:
  AfterHook(std::shared_ptr<HookState> state, std::size_t parameter)
      : state_(std::move(state)), parameter_(parameter) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    if (!state_->taken[parameter_].load(std::memory_order_relaxed))
      guarded([&] { state_->after(parameter_, gradients); });
    return outputs;
  }

 private:
  const std::shared_ptr<HookState> state_;
  const std::size_t parameter_;
};

/// The parameter's accumulator, without a reference to it. Null if there is none.
/// try_get_grad_accumulator() counts a reference, which costs more than the comparison.
const torch::autograd::Node* accumulator_of(const torch::Tensor& parameter) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr) return nullptr;
  if constexpr (requires { meta->grad_accumulator_._unsafe_get_target(); }) {
    return meta->grad_accumulator_._unsafe_get_target();
  } else {
    return torch::autograd::impl::try_get_grad_accumulator(parameter).get();
  }
}

/// Older LibTorch cannot remove a post hook.
template <class Node>
void delete_post_hook(Node& node, std::uintptr_t key) {
  if constexpr (requires { node.del_post_hook(key); }) node.del_post_hook(key);
}

}  // namespace

std::atomic<void (*)()> GradientHooks::error_handler = nullptr;

GradientHooks::GradientHooks(const std::vector<torch::Tensor>& parameters) {
  for (const torch::Tensor& parameter : parameters) parameters_.push_back({.parameter = parameter});
}

/// Module::to() with another dtype replaces a parameter's accumulator.
bool GradientHooks::missing(const Hooked& hooked) {
  return hooked.parameter.requires_grad() &&
         (!hooked.accumulator || accumulator_of(hooked.parameter) != hooked.accumulator.get());
}

bool GradientHooks::complete() const {
  return std::none_of(parameters_.begin(), parameters_.end(), missing);
}

bool GradientHooks::complete_so_far() const {
  return std::none_of(parameters_.begin(), parameters_.end(), [](const Hooked& hooked) {
    return !hooked.accumulator && hooked.parameter.requires_grad();
  });
}

bool GradientHooks::alone(std::size_t parameter) const {
  const Hooked& hooked = parameters_[parameter];
  return hooked.accumulator->pre_hooks().size() == 1 &&
         hooked.accumulator->post_hooks().size() == 1 &&
         torch::autograd::impl::post_acc_grad_hooks(hooked.parameter) == nullptr;
}

void GradientHooks::install(Before before, After after) {
  const auto state = std::make_shared<HookState>(HookState{
      std::move(before), std::move(after), std::vector<std::atomic<bool>>(parameters_.size())});
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Hooked& hooked = parameters_[i];
    if (!missing(hooked)) continue;
    unhook(hooked);
    hooked.accumulator = torch::autograd::impl::grad_accumulator(hooked.parameter);
    auto pre_hook = std::make_unique<BeforeHook>(state, i);
    hooked.pre_hook = pre_hook.get();
    hooked.accumulator->add_pre_hook(std::move(pre_hook));
    if (state->after)
      hooked.post_hook = hooked.accumulator->add_post_hook(std::make_unique<AfterHook>(state, i));
  }
}

void GradientHooks::unhook(Hooked& hooked) noexcept {
  if (!hooked.accumulator) return;
  auto& hooks = hooked.accumulator->pre_hooks();
  std::erase_if(hooks, [&](const auto& hook) { return hook.get() == hooked.pre_hook; });
  if (hooked.post_hook != 0) delete_post_hook(*hooked.accumulator, hooked.post_hook);
  hooked.post_hook = 0;
  hooked.accumulator = {};
}

void GradientHooks::remove() noexcept {
  for (Hooked& hooked : parameters_) unhook(hooked);
}

}  // namespace hvd::libtorch
