#include "optimizer/departed_optimizers.h"

#include <c10/util/Synchronized.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <unordered_map>

#include "hvd/hvd.h"

namespace hvd::libtorch {
namespace {

/// One backward pass or two may belong to an evaluation.
constexpr int kPasses = 3;

struct Watch {
  std::atomic<bool> over = false;
  std::atomic<int> passes = 0;
};

using Watches = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Watch>>;

c10::Synchronized<Watches>& watches() {
  static auto* const all = new c10::Synchronized<Watches>();  // hooks may run late
  return *all;
}

void end(Watches& all, const torch::Tensor& parameter) {
  const auto found = all.find(parameter.unsafeGetTensorImpl());
  if (found == all.end()) return;
  found->second->over = true;
  all.erase(found);
}

}  // namespace

/// One parameter stands for all. The hook belongs to the parameter, and does not keep it.
void watch_departed(std::span<const ReducedParameter> parameters, const std::string& wrapper) {
  const auto first = std::find_if(parameters.begin(), parameters.end(),
                                  [](const auto& parameter) { return parameter.active(); });
  if (first == parameters.end()) return;
  const auto watch = std::make_shared<Watch>();
  watches().withLock([&](Watches& all) {
    end(all, first->tensor());
    all.emplace(first->tensor().unsafeGetTensorImpl(), watch);
  });
  first->tensor().register_hook([watch, wrapper, name = first->name()](const torch::Tensor&) {
    if (watch->over || !is_initialized() || ++watch->passes != kPasses) return;
    watch->over = true;
    TORCH_WARN(
        "backward() has reached parameter '", name, "' ", kPasses, " times since the ", wrapper,
        " was destroyed that reduced its gradient, which is this rank's own now. If the "
        "wrapped optimizer goes on to step(), each rank trains a model of its own: keep the ",
        wrapper, " for as long as the model is trained");
  });
}

void forget_departed(std::span<const ReducedParameter> parameters) {
  watches().withLock([&](Watches& all) {
    if (all.empty()) return;
    for (const ReducedParameter& parameter : parameters) end(all, parameter.tensor());
  });
}

}  // namespace hvd::libtorch
