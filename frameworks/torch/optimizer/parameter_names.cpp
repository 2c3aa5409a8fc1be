#include "optimizer/parameter_names.h"

#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "hvd/error.h"

namespace hvd::libtorch {

using torch::optim::Optimizer;

namespace {

/// By name: which of the user's groups a parameter is in.
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
