#include "optimizer/parameter_addition.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/object.h"

namespace hvd::libtorch {
namespace {

std::string described(const ReducedParameter& parameter) {
  return "'" + parameter.name() + "' " + shape_to_string(parameter.tensor().sizes().vec()) + ' ' +
         c10::toString(parameter.tensor().scalar_type()) + (parameter.active() ? "" : " (frozen)");
}

std::string entry_of(const std::vector<std::string>& added, std::size_t i) {
  if (i < added.size()) return "adds " + added[i];
  return "adds no more than " + std::to_string(added.size());
}

}  // namespace

void agree_on_addition(const std::string& who, const std::string& scope,
                       const ProcessSet& process_set, const std::string& complaint,
                       std::span<const ReducedParameter> added) {
  std::pair<std::string, std::vector<std::string>> own{complaint, {}};
  for (const auto& parameter : added) own.second.push_back(described(parameter));
  const auto all =
      allgather_object(own, {.name = scope + ".add_param_group", .process_set = process_set});
  if (!complaint.empty()) throw UsageError(complaint);
  const std::string where = who + " (" + scope + "): add_param_group: rank ";
  const std::vector<int> ranks = process_set.ranks();
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].first.empty())
      throw MismatchError(where + std::to_string(ranks[r]) +
                          " cannot add its group: " + all[r].first);
  }
  const auto& first = all.front().second;
  for (std::size_t r = 1; r < all.size(); ++r) {
    const auto& other = all[r].second;
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (i < first.size() && i < other.size() && first[i] == other[i]) continue;
      throw MismatchError(where + std::to_string(ranks.front()) + ' ' + entry_of(first, i) +
                          ", rank " + std::to_string(ranks[r]) + ' ' + entry_of(other, i) +
                          "; expected the same parameters on every rank");
    }
  }
}

}  // namespace hvd::libtorch
