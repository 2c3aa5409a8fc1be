#include "optimizer/wrapper_setup.h"

#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "hvd/error.h"
#include "hvd/options.h"

namespace hvd::libtorch {
namespace {

int check_every(const DistributedOptimizerOptions& options) {
  constexpr int kDefault = 100;
  return options.check_every ? *options.check_every : requested_check_interval().value_or(kDefault);
}

}  // namespace

void check_options(const DistributedOptimizerOptions& options, const std::string& who) {
  if (options.op != ReduceOp::kAverage && options.op != ReduceOp::kSum &&
      options.op != ReduceOp::kAdasum) {
    throw UsageError(who + ": op: expected average, sum or adasum, got " +
                     std::string(to_string(options.op)));
  }
  if (options.backward_passes_per_step < 1) {
    throw UsageError(who + ": backward_passes_per_step: expected at least 1, got " +
                     std::to_string(options.backward_passes_per_step));
  }
  if (!(options.gradient_predivide_factor > 0)) {
    throw UsageError(who + ": gradient_predivide_factor: expected a positive number, got " +
                     std::to_string(options.gradient_predivide_factor));
  }
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::kAverage) {
    throw UsageError(
        who + ": gradient_predivide_factor splits the division of an average, but op is " +
        std::string(to_string(options.op)) + "; use ReduceOp::kAverage or leave the factor at 1");
  }
  if (options.adasum_delta && options.op != ReduceOp::kAdasum) {
    throw UsageError(who + ": adasum_delta: expected op to be adasum, got " +
                     std::string(to_string(options.op)));
  }
  const bool hvd_reduces = options.op == ReduceOp::kAdasum ||
                           options.compression != Compression::kNone ||
                           options.gradient_predivide_factor != 1;
  if (options.gradient_hook && hvd_reduces) {
    throw UsageError(who +
                     ": gradient_hook reduces gradients itself; expected op to be average or sum, "
                     "no compression and a gradient_predivide_factor of 1");
  }
  if (options.bucket_bytes < 0) {
    throw UsageError(who +
                     ": bucket_bytes: expected a number of bytes, or 0 for the default, got " +
                     std::to_string(options.bucket_bytes));
  }
  if (options.check_every.value_or(0) < 0) {
    throw UsageError(who + ": check_every: expected a number of reductions, or 0 for never, got " +
                     std::to_string(*options.check_every));
  }
  if (!options.process_set.included()) {
    throw UsageError(who + ": this rank is not in process set " +
                     std::to_string(options.process_set.id()));
  }
}

std::shared_ptr<const void> counted_scope(std::shared_ptr<std::atomic<int>> depth) {
  ++*depth;
  return {depth.get(), [depth](const void*) { --*depth; }};
}

GradientReduction reduction_of(const DistributedOptimizerOptions& options, std::string scope) {
  return {.scope = std::move(scope),
          .op = options.op,
          .prescale = 1 / options.gradient_predivide_factor,
          .postscale = options.gradient_predivide_factor,
          .compression = options.compression,
          .process_set = options.process_set,
          .sparse = options.sparse_as_dense || options.gradient_hook
                        ? SparseGradients::kMakeDense
                        : SparseGradients::kReduceSparse,
          .bucket_views = options.gradient_as_bucket_view,
          .bucket_bytes = options.bucket_bytes,
          .check_every = check_every(options),
          .error_if_nonfinite = options.error_if_nonfinite,
          .reduces_changes = options.adasum_delta,
          .hook = options.gradient_hook};
}

using torch::optim::Optimizer;

namespace {

/// The user's group of each parameter, by name.
std::map<std::string, int> groups_by_name(const std::vector<std::vector<std::string>>& groups,
                                          const std::string& who) {
  std::map<std::string, int> by_name;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& name : groups[g]) {
      if (!by_name.emplace(name, static_cast<int>(g)).second) {
        throw UsageError(who + ": groups: parameter '" + name +
                         "' occurs twice; expected each name in at most one group");
      }
    }
  }
  return by_name;
}

}  // namespace

NamedParameters named_parameters_of(const torch::nn::Module& module, const std::string& who) {
  NamedParameters named = module.named_parameters();
  if (named.is_empty()) {
    throw UsageError(who + ": the module " + module.name() +
                     " has no parameters; expected the one that the optimizer trains");
  }
  return named;
}

std::vector<std::pair<std::string, torch::Tensor>> batch_norm_statistics(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, torch::Tensor>> statistics;
  for (const auto& buffer : module.named_buffers()) {
    const bool wanted =
        buffer.key().ends_with("running_mean") || buffer.key().ends_with("running_var");
    if (wanted && buffer.value().defined() && buffer.value().is_floating_point())
      statistics.emplace_back(buffer.key(), buffer.value());
  }
  return statistics;
}

NamedParameters numbered(const Optimizer& optimizer, NamedParameters known) {
  std::set<const c10::TensorImpl*> named, seen;
  for (const auto& item : known) named.insert(item.value().unsafeGetTensorImpl());
  for (const auto& group : optimizer.param_groups()) {
    for (const torch::Tensor& parameter : group.params()) {
      const auto* const identity = parameter.unsafeGetTensorImpl();
      if (!seen.insert(identity).second || named.contains(identity)) continue;
      known.insert("param" + std::to_string(seen.size() - 1), parameter);
    }
  }
  return known;
}

std::vector<ReducedParameter> name_parameters(const Optimizer& optimizer,
                                              const NamedParameters& named,
                                              const std::vector<std::vector<std::string>>& groups,
                                              const std::string& who) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : named) {
    if (item.key().empty()) throw UsageError(who + ": a parameter has an empty name");
    // Tied parameters have several names; the first one counts.
    if (item.value().defined()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::map<std::string, int> group_of = groups_by_name(groups, who);
  std::vector<ReducedParameter> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!seen.insert(params[i].unsafeGetTensorImpl()).second) continue;
      const auto name = names.find(params[i].unsafeGetTensorImpl());
      if (name == names.end()) {
        throw UsageError(who + ": parameter " + std::to_string(i) + " of parameter group " +
                         std::to_string(g) + ", shape " + shape_to_string(params[i].sizes().vec()) +
                         ", has no name; pass the named_parameters() of every module that the "
                         "optimizer updates");
      }
      const auto group = group_of.extract(name->second);
      parameters.emplace_back(name->second, params[i], group ? group.mapped() : -1);
    }
  }
  if (!group_of.empty()) {
    throw UsageError(who + ": groups: '" + group_of.begin()->first +
                     "' is not the name of a parameter of this optimizer (a tied parameter goes by "
                     "its first name)");
  }
  return parameters;
}

}  // namespace hvd::libtorch
