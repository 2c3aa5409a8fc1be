#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "negotiation/messages.h"

namespace hvd::control {

/// A tensor that every member of its set has submitted.
struct ReadyTensor {
  const wire::Request* request = nullptr;
  std::int64_t bytes = 0;  ///< its size in a fusion buffer
};

/// The properties that tensors of one batch have in common. Factors are compared by
/// their bits, because a NaN among the keys would break their order.
struct FusionSort {
  int process_set = 0;
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DataType dtype = DataType::kFloat32;
  Compression compression = Compression::kNone;
  DeviceType device = DeviceType::kCpu;
  int root = 0;
  std::uint64_t prescale = 0;
  std::uint64_t postscale = 0;
  friend auto operator<=>(const FusionSort&, const FusionSort&) = default;
};

/// The sort of a tensor; empty if the tensor never shares a batch.
std::optional<FusionSort> fusion_sort(const wire::Request&);

/// Whether two tensors may go through the backend in one call.
bool may_share_batch(const wire::Request&, const wire::Request&);

/// Sorts tensors into batches that go through the backend in one call.
/// @param tensors in canonical order
/// @return per batch the indices into `tensors`
///
/// Tensors share a batch when kind, reduction, dtype, device, process set, scaling and root are
/// equal, and the sum of bytes stays within `threshold` (0: each alone). A tensor that does not fit
/// opens the next batch of its sort. Members of a group that are of one sort stay together at the
/// position of the first, even above the threshold. The result depends only on the arguments.
std::vector<std::vector<std::size_t>> plan_fusion(std::span<const ReadyTensor> tensors,
                                                  std::int64_t threshold);

}  // namespace hvd::control
