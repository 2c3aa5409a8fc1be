#include "hvd/torch/local_sgd.h"

#include <torch/serialize.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/text.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"
#include "optimizer/live_optimizers.h"
#include "tensors/tensor_adapter.h"

namespace hvd {
namespace {

using torch::optim::Optimizer;

constexpr const char* kWho = "LocalSgd";

std::vector<torch::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<torch::Tensor> all;
  const auto* const wrapper = dynamic_cast<const OptimizerWrapper*>(&optimizer);
  const auto& groups = wrapper != nullptr ? wrapper->param_groups() : optimizer.param_groups();
  for (const auto& group : groups)
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

/// Throws UsageError for a parameter that the other optimizer does not have, or has more than once.
void refuse_difference(const std::map<const c10::TensorImpl*, int>& uses,
                       const std::vector<torch::Tensor>& parameters, const char* here,
                       const char* there) {
  for (const torch::Tensor& parameter : parameters) {
    const auto found = uses.find(parameter.unsafeGetTensorImpl());
    if (found == uses.end()) {
      throw UsageError(text(
          kWho, ": a parameter of shape ", shape_to_string(parameter.sizes().vec()), " is in the ",
          here, " optimizer and not in the ", there, " one; expected the same parameters in both"));
    }
    if (found->second > 1) {
      throw UsageError(text(kWho, ": a parameter of shape ",
                            shape_to_string(parameter.sizes().vec()), " occurs ", found->second,
                            " times in the ", there, " optimizer; expected each parameter once"));
    }
  }
}

std::map<const c10::TensorImpl*, int> uses_of(const std::vector<torch::Tensor>& parameters) {
  std::map<const c10::TensorImpl*, int> uses;
  for (const torch::Tensor& parameter : parameters) ++uses[parameter.unsafeGetTensorImpl()];
  return uses;
}

void check(const Optimizer& inner, const Optimizer& outer, const LocalSgdOptions& options) {
  if (options.sync_every < 1) {
    throw UsageError(
        text(kWho, ": sync_every: expected at least 1 local step, got ", options.sync_every));
  }
  if (&inner == &outer) {
    throw UsageError(text(kWho, ": the outer optimizer is the inner one; expected two optimizers"));
  }
  if (dynamic_cast<const OptimizerWrapper*>(&outer) != nullptr) {
    throw UsageError(text(kWho,
                          ": the outer optimizer is a wrapper, which would reduce gradients; "
                          "expected an optimizer that is not wrapped"));
  }
  const std::vector<torch::Tensor> inner_parameters = parameters_of(inner);
  const std::vector<torch::Tensor> outer_parameters = parameters_of(outer);
  if (inner_parameters.empty() && outer_parameters.empty())
    throw UsageError(text(kWho, ": the optimizers have no parameters; expected those of a model"));
  refuse_difference(uses_of(outer_parameters), inner_parameters, "inner", "outer");
  refuse_difference(uses_of(inner_parameters), outer_parameters, "outer", "inner");
  for (const torch::Tensor& parameter : outer_parameters) {
    if (parameter.layout() == torch::kStrided) continue;
    throw UsageError(text(kWho, ": expected dense parameters, got one of another layout"));
  }
  libtorch::require_member(kWho, options.process_set);
}

/// Replaces the gradients of parameters; the destructor restores the former ones.
class GradientSwap {
 public:
  GradientSwap(std::vector<torch::Tensor>& parameters, std::vector<torch::Tensor> gradients)
      : parameters_(parameters), gradients_(std::move(gradients)) {
    swap();
  }
  GradientSwap(const GradientSwap&) = delete;
  GradientSwap& operator=(const GradientSwap&) = delete;
  ~GradientSwap() { swap(); }

 private:
  void swap() {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      std::swap(parameters_[i].mutable_grad(), gradients_[i]);
  }

  std::vector<torch::Tensor>& parameters_;
  std::vector<torch::Tensor> gradients_;
};

}  // namespace

LocalSgd::LocalSgd(Optimizer& inner, Optimizer& outer, LocalSgdOptions options)
    : inner_(inner), outer_(outer), options_(std::move(options)) {
  check(inner, outer, options_);
  parameters_ = parameters_of(outer);
  for (const torch::Tensor& parameter : parameters_)
    synchronized_.push_back(parameter.detach().clone());
  const auto name_operations = [this] {
    scope_ = libtorch::LiveOptimizers::instance().next_scope(options_.process_set) + ".local_sgd";
  };
  name_operations();
  generations_ = elastic::at_each_generation(name_operations);
}

LocalSgd::~LocalSgd() = default;

torch::Tensor LocalSgd::step(Optimizer::LossClosure closure) {
  torch::Tensor loss = closure ? inner_.step(std::move(closure)) : inner_.step();
  if (++local_steps_ >= options_.sync_every) synchronize();
  return loss;
}

void LocalSgd::synchronize() {
  if (local_steps_ == 0) return;
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> gradients(parameters_.size());
  std::vector<torch::Tensor> reduced;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].requires_grad()) continue;
    gradients[i] = synchronized_[i] - parameters_[i].detach();
    reduced.push_back(gradients[i]);
  }
  if (!reduced.empty()) {
    grouped_allreduce_(reduced, {.name = scope_,
                                 .op = ReduceOp::kAverage,
                                 .compression = options_.compression,
                                 .process_set = options_.process_set});
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i].detach().copy_(synchronized_[i]);
  {
    const GradientSwap swap(parameters_, std::move(gradients));
    outer_.step();
  }
  local_steps_ = 0;
  take_parameters();
}

void LocalSgd::take_parameters() {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    synchronized_[i].copy_(parameters_[i].detach());
}

void LocalSgd::save(torch::serialize::OutputArchive& archive) const {
  archive.write("local_steps", torch::tensor(local_steps_, torch::kInt64));
  if (local_steps_ == 0) return;
  for (std::size_t i = 0; i < synchronized_.size(); ++i)
    archive.write(text("synchronized", i), synchronized_[i]);
}

void LocalSgd::load(torch::serialize::InputArchive& archive) {
  const torch::NoGradGuard no_grad;
  torch::Tensor steps;
  if (!archive.try_read("local_steps", steps))
    throw Error(text(kWho, "::load: the archive has no state of a LocalSgd"));
  const auto count = steps.item<std::int64_t>();
  std::vector<torch::Tensor> values;
  for (std::size_t i = 0; count > 0 && i < synchronized_.size(); ++i) {
    torch::Tensor& value = values.emplace_back();
    if (archive.try_read(text("synchronized", i), value) &&
        value.sizes() == synchronized_[i].sizes())
      continue;
    throw Error(text(kWho, "::load: the archive has other parameters; expected one of shape ",
                     shape_to_string(synchronized_[i].sizes().vec()), " as number ", i));
  }
  local_steps_ = count;
  if (count == 0) return take_parameters();
  for (std::size_t i = 0; i < values.size(); ++i) synchronized_[i].copy_(values[i]);
}

}  // namespace hvd
