#include "reducer/bucket_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "hvd/collectives.h"

namespace hvd::libtorch {
namespace {

// The buckets of two ranks fit into half of a common L3 cache (16 to 32 MiB), where a reduction is
// four times as fast as in memory.
constexpr std::size_t kMaxBucketOnHost = std::size_t{8} << 20;
// Even a small model has several buckets, so that the first are reduced during backward.
constexpr std::size_t kMinBucketsOnHost = 8;

// An allreduce between GPUs has a latency of tens of microseconds, in which NVLink moves 10 MB and
// more. Smaller buckets would leave it idle; see docs/benchmarks.md.
constexpr std::size_t kMaxBucketOnGpu = std::size_t{25} << 20;
constexpr std::size_t kMinBucketsOnGpu = 4;
// The reduction of a last bucket of this size takes little longer than the latency.
constexpr std::size_t kLastOnGpu = std::size_t{1} << 20;

using DeviceAndType = std::pair<int, int>;  // device and dtype

DeviceAndType device_and_type(const GradientSize& size) { return {size.device, size.dtype}; }

/// Positions in the order at which the last bucket of each device and dtype begins. That bucket has
/// as many of the last gradients as fit, at least one.
std::map<DeviceAndType, std::size_t> last_buckets(std::span<const std::size_t> order,
                                                  std::span<const GradientSize> sizes,
                                                  std::size_t most) {
  struct LastBucket {
    std::size_t begin = 0;
    std::size_t bytes = 0;
    bool full = false;
  };
  std::map<DeviceAndType, LastBucket> last;
  for (std::size_t place = order.size(); place-- > 0;) {
    const GradientSize& size = sizes[order[place]];
    const auto [found, first] = last.try_emplace(device_and_type(size));
    LastBucket& bucket = found->second;
    const std::size_t bytes = room_in_bucket(size.bytes);
    bucket.full = bucket.full || (!first && bucket.bytes + bytes > most);
    if (bucket.full) continue;
    bucket.begin = place;
    bucket.bytes += bytes;
  }
  std::map<DeviceAndType, std::size_t> begins;
  for (const auto& [key, bucket] : last) begins.emplace(key, bucket.begin);
  return begins;
}

}  // namespace

std::size_t room_in_bucket(std::size_t bytes) {
  return (bytes + kGradientAlignment - 1) / kGradientAlignment * kGradientAlignment;
}

BucketLimits host_bucket_limits(std::size_t total, std::size_t asked) {
  if (asked > 0) return {.most = asked};
  return {.most = std::min(kMaxBucketOnHost, total / kMinBucketsOnHost)};
}

BucketLimits gpu_bucket_limits(std::size_t total, std::size_t asked) {
  if (asked > 0) return {.most = asked, .last = std::min(asked, kLastOnGpu)};
  return {.most = std::clamp(total / kMinBucketsOnGpu, kLastOnGpu, kMaxBucketOnGpu),
          .last = kLastOnGpu};
}

std::vector<std::vector<std::size_t>> plan_buckets(std::span<const std::size_t> order,
                                                   std::span<const GradientSize> sizes,
                                                   const BucketLimits& limits) {
  struct OpenBucket {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
  };
  std::map<DeviceAndType, std::size_t> last;
  if (limits.last > 0) last = last_buckets(order, sizes, limits.last);
  std::map<DeviceAndType, OpenBucket> open;
  std::vector<std::vector<std::size_t>> buckets;
  for (std::size_t place = 0; place < order.size(); ++place) {
    const std::size_t index = order[place];
    const DeviceAndType key = device_and_type(sizes[index]);
    OpenBucket& bucket = open[key];
    const std::size_t bytes = room_in_bucket(sizes[index].bytes);
    const auto begins = last.find(key);
    const bool last_begins = begins != last.end() && begins->second == place;
    if (!bucket.members.empty() && (last_begins || bucket.bytes + bytes > limits.most))
      buckets.push_back(std::exchange(bucket, {}).members);
    bucket.members.push_back(index);
    bucket.bytes += bytes;
  }
  for (auto& [key, bucket] : open) {
    if (!bucket.members.empty()) buckets.push_back(std::move(bucket.members));
  }
  return buckets;
}

ElementRange rows_at(std::int64_t elements, int ranks, int position) {
  const std::int64_t begin =
      position * (elements / ranks) + std::min<std::int64_t>(position, elements % ranks);
  return {begin, begin + rows_of_member(elements, ranks, position)};
}

}  // namespace hvd::libtorch
