#include "optimizer/bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

namespace hvd::libtorch {
namespace {

// Of two ranks' buckets both fit into half of a common L3 cache (16 to 32 MiB), where a reduction
// runs four times as fast as in memory.
constexpr std::size_t kMostBucketBytes = std::size_t{8} << 20;
// A small model has several buckets too, so that the first are reduced while backward still runs.
constexpr std::size_t kFewestBuckets = 8;

}  // namespace

std::size_t room_in_bucket(std::size_t bytes) {
  return (bytes + kGradientAlignment - 1) / kGradientAlignment * kGradientAlignment;
}

std::size_t most_bucket_bytes(std::size_t total) {
  return std::min(kMostBucketBytes, total / kFewestBuckets);
}

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const std::size_t> order,
                                                   std::span<const GradientSize> sizes,
                                                   std::size_t most_bytes) {
  struct Open {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
  };
  std::map<std::pair<int, int>, Open> open;
  std::vector<std::vector<std::size_t>> buckets;
  for (const std::size_t index : order) {
    Open& bucket = open[{sizes[index].device, sizes[index].dtype}];
    const std::size_t bytes = room_in_bucket(sizes[index].bytes);
    if (!bucket.members.empty() && bucket.bytes + bytes > most_bytes)
      buckets.push_back(std::exchange(bucket, {}).members);
    bucket.members.push_back(index);
    bucket.bytes += bytes;
  }
  for (auto& [kind, bucket] : open) {
    if (!bucket.members.empty()) buckets.push_back(std::move(bucket.members));
  }
  return buckets;
}

}  // namespace hvd::libtorch
