#include "reducer/gradient_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

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

class LambdaPreHook : public torch::autograd::FunctionPreHook {
 public:
  explicit LambdaPreHook(std::function<bool()> run) : run_(std::move(run)) {}
  variable_list operator()(const variable_list& gradients) override {
    return run_() ? gradients : variable_list(gradients.size());
  }

 private:
  std::function<bool()> run_;
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

void GradientHooks::install(const Before& before, const After& after) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Hooked& hooked = parameters_[i];
    if (!missing(hooked)) continue;
    unhook(hooked);
    hooked.accumulator = torch::autograd::impl::grad_accumulator(hooked.parameter);
    auto pre_hook =
        std::make_unique<LambdaPreHook>([before, i] { return guarded([&] { return before(i); }); });
    hooked.pre_hook = pre_hook.get();
    hooked.accumulator->add_pre_hook(std::move(pre_hook));
    if (!after) continue;
    hooked.post_hook =
        hooked.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [after, i](const variable_list& outputs, const variable_list& gradients) {
              guarded([&] { after(i, gradients); });
              return outputs;
            }));
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
