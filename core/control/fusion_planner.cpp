#include "control/fusion_planner.h"

#include <map>
#include <tuple>

namespace hvd::control {
namespace {

bool fusible(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBroadcast;
}

// Everything that must be equal for two tensors to share a backend call.
auto sort_of(const wire::Request& request) {
  return std::tuple(request.process_set, request.kind, request.op, request.dtype, request.device, request.root,
                    request.prescale, request.postscale);
}
using Sort = decltype(sort_of(wire::Request{}));

struct OpenBatch {
  std::size_t index = 0;
  std::int64_t bytes = 0;
  std::string group = {};  // of its last tensor
};

}  // namespace

std::vector<std::vector<std::size_t>> plan_fusion(std::span<const ReadyTensor> tensors, std::int64_t threshold) {
  std::vector<std::vector<std::size_t>> batches;
  std::map<Sort, OpenBatch> open;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const wire::Request& request = *tensors[i].request;
    const std::string group = request.group_size > 0 ? request.group_key() : std::string();
    if (!fusible(request.kind)) {
      batches.push_back({i});
      continue;
    }
    const auto found = open.find(sort_of(request));
    if (found != open.end()) {
      OpenBatch& batch = found->second;
      const bool same_group = !group.empty() && group == batch.group;
      if (same_group || batch.bytes + tensors[i].bytes <= threshold) {
        batches[batch.index].push_back(i);
        batch.bytes += tensors[i].bytes;
        batch.group = group;
        continue;
      }
    }
    open[sort_of(request)] = {batches.size(), tensors[i].bytes, group};
    batches.push_back({i});
  }
  return batches;
}

}  // namespace hvd::control
