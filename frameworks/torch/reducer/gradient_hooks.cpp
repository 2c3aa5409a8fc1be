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

/// The state that the two hooks of a parameter share.
struct ParameterHook {
  ParameterHook(std::shared_ptr<const GradientHooks::Functions> shared, std::size_t number)
      : functions(std::move(shared)), parameter(number) {}

  const std::shared_ptr<const GradientHooks::Functions> functions;
  const std::size_t parameter;
  /// The last gradient was taken before the accumulation. Two threads may reach the parameter.
  std::atomic<bool> taken = false;
};

class BeforeHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeHook(std::shared_ptr<ParameterHook> hook) : hook_(std::move(hook)) {}
  variable_list operator()(const variable_list& gradients) override {
    using Next = GradientHooks::Next;
    const Next next =
        guarded([&] { return hook_->functions->before(hook_->parameter, gradients); });
    hook_->taken.store(next == Next::kTaken, std::memory_order_relaxed);
    return next == Next::kAdd ? gradients : variable_list(gradients.size());
  }

 private:
  const std::shared_ptr<ParameterHook> hook_;
};

class AfterHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterHook(std::shared_ptr<ParameterHook> hook) : hook_(std::move(hook)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    if (!hook_->taken.load(std::memory_order_relaxed))
      guarded([&] { hook_->functions->after(hook_->parameter, gradients); });
    return outputs;
  }

 private:
  const std::shared_ptr<ParameterHook> hook_;
};

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
         (!hooked.accumulator ||
          torch::autograd::impl::try_get_grad_accumulator(hooked.parameter) != hooked.accumulator);
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
  const auto functions =
      std::make_shared<const Functions>(Functions{std::move(before), std::move(after)});
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Hooked& hooked = parameters_[i];
    if (!missing(hooked)) continue;
    unhook(hooked);
    hooked.accumulator = torch::autograd::impl::grad_accumulator(hooked.parameter);
    const auto hook = std::make_shared<ParameterHook>(functions, i);
    auto pre_hook = std::make_unique<BeforeHook>(hook);
    hooked.pre_hook = pre_hook.get();
    hooked.accumulator->add_pre_hook(std::move(pre_hook));
    if (functions->after)
      hooked.post_hook = hooked.accumulator->add_post_hook(std::make_unique<AfterHook>(hook));
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
