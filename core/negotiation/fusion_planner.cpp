#include "negotiation/fusion_planner.h"

#include <bit>
#include <map>
#include <string>
#include <utility>

#include "negotiation/validator.h"

namespace hvd::control {
namespace {

bool fusible(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBroadcast ||
         kind == OpKind::kReducescatter || kind == OpKind::kReduce;
}

// Adasum computes the weights of each tensor separately, so tensors are not fused.
bool fusible(const wire::Request& request) {
  return fusible(request.kind) && request.op != ReduceOp::kAdasum && !request.alone;
}

FusionSort sort_of(const wire::Request& request) {
  return {request.process_set,
          request.kind,
          request.op,
          request.dtype,
          request.compression,
          request.device,
          request.root,
          std::bit_cast<std::uint64_t>(request.prescale),
          std::bit_cast<std::uint64_t>(request.postscale)};
}

// Tensors that stay together: one tensor, or the members of a group that are of one sort.
struct FusionUnit {
  std::vector<std::size_t> indices = {};
  std::int64_t bytes = 0;
};

std::vector<FusionUnit> make_units(std::span<const ReadyTensor> tensors) {
  std::vector<FusionUnit> units;
  std::map<std::pair<std::string, FusionSort>, std::size_t> unit_of_group;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const wire::Request& request = *tensors[i].request;
    std::size_t index = units.size();
    if (request.group_size > 0 && fusible(request)) {
      index =
          unit_of_group.try_emplace({request.group_key(), sort_of(request)}, index).first->second;
    }
    if (index == units.size()) units.emplace_back();
    units[index].indices.push_back(i);
    units[index].bytes = saturating_sum(units[index].bytes, tensors[i].bytes);
  }
  return units;
}

}  // namespace

std::optional<FusionSort> fusion_sort(const wire::Request& request) {
  return fusible(request) ? std::optional(sort_of(request)) : std::nullopt;
}

bool may_share_batch(const wire::Request& a, const wire::Request& b) {
  return fusible(a) && sort_of(a) == sort_of(b);
}

std::vector<std::vector<std::size_t>> plan_fusion(std::span<const ReadyTensor> tensors,
                                                  std::int64_t threshold) {
  std::vector<std::vector<std::size_t>> batches;
  std::map<FusionSort, std::pair<std::size_t, std::int64_t>> open;  // batch, bytes
  for (FusionUnit& unit : make_units(tensors)) {
    const wire::Request& request = *tensors[unit.indices.front()].request;
    const std::optional<FusionSort> sort = fusion_sort(request);
    if (sort && threshold > 0) {
      const auto [found, is_new] = open.try_emplace(*sort, batches.size(), 0);
      auto& [batch, bytes] = found->second;
      bytes = saturating_sum(bytes, unit.bytes);
      if (!is_new && bytes <= threshold) {
        batches[batch].insert(batches[batch].end(), unit.indices.begin(), unit.indices.end());
        continue;
      }
      found->second = {batches.size(), unit.bytes};
    }
    batches.push_back(std::move(unit.indices));
  }
  return batches;
}

}  // namespace hvd::control
