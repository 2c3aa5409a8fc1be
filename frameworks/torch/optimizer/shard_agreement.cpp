#include "optimizer/shard_agreement.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <cstddef>
#include <typeinfo>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/torch/object.h"
#include "optimizer/parameter_groups.h"

namespace hvd::libtorch {
namespace {

/// One line for each thing that must be the same on all ranks.
std::vector<std::string> lines_of(const torch::optim::Optimizer& optimizer,
                                  std::span<const ReducedParameter> parameters) {
  std::vector<std::string> lines;
  lines.push_back(c10::demangle(typeid(optimizer).name()) + " with " +
                  std::to_string(parameters.size()) + " parameters");
  const std::vector<std::string> options = group_lines(optimizer);
  std::size_t next = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    const std::string name = "parameter group " + std::to_string(g);
    for (std::size_t i = 0; i < group.params().size() && next < parameters.size(); ++i) {
      const ReducedParameter& parameter = parameters[next++];
      lines.push_back("'" + parameter.name() + "' " +
                      shape_to_string(parameter.tensor().sizes().vec()) + ' ' +
                      c10::toString(parameter.tensor().scalar_type()) + " on " +
                      c10::DeviceTypeName(parameter.tensor().device().type(), /*lower_case=*/true) +
                      (parameter.active() ? "" : " (frozen)") + " in " + name);
    }
    lines.push_back(options[g]);
  }
  return lines;
}

std::string line_of(const std::vector<std::string>& lines, std::size_t i) {
  return i < lines.size() ? lines[i] : "nothing more";
}

}  // namespace

void agree_on_shards(const std::string& scope, const ProcessSet& process_set,
                     const std::string& complaint, const torch::optim::Optimizer& optimizer,
                     std::span<const ReducedParameter> parameters) {
  std::pair<std::string, std::vector<std::string>> own{complaint, {}};
  if (complaint.empty()) own.second = lines_of(optimizer, parameters);
  const auto all = allgather_object(own, {.name = scope + ".shards", .process_set = process_set});
  if (!complaint.empty()) throw UsageError(complaint);
  const std::string who = "ShardedOptimizer (" + scope + "): rank ";
  const std::vector<int> ranks = process_set.ranks();
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].first.empty())
      throw MismatchError(who + std::to_string(ranks[r]) + " cannot take part: " + all[r].first);
  }
  const std::vector<std::string>& first = all.front().second;
  for (std::size_t r = 1; r < all.size(); ++r) {
    const std::vector<std::string>& other = all[r].second;
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (line_of(first, i) == line_of(other, i)) continue;
      throw MismatchError(who + std::to_string(ranks.front()) + " has " + line_of(first, i) +
                          ", rank " + std::to_string(ranks[r]) + " has " + line_of(other, i) +
                          "; expected the same model and the same optimizer on every rank");
    }
  }
}

}  // namespace hvd::libtorch
