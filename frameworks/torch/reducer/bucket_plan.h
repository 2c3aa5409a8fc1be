#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd::libtorch {

/// Properties of a gradient that determine its bucket.
struct GradientSize {
  int device = 0;         ///< type of the device
  int dtype = 0;          ///< as a number
  std::size_t bytes = 0;  ///< without padding
};

/// Alignment of a gradient in a bucket, in bytes: that of a tensor.
inline constexpr std::size_t kGradientAlignment = 64;

/// Size of a gradient in a bucket, with padding, in bytes.
std::size_t room_in_bucket(std::size_t bytes);

/// Sizes of buckets, in bytes. A bucket of one gradient may be larger.
struct BucketLimits {
  std::size_t most = 0;
  /// Size of the bucket that is complete last, whose reduction does not overlap with backward. 0:
  /// the same as the others.
  std::size_t last = 0;
};

/// @param total bytes of all gradients in such buckets
/// @param asked bucket size that the program has set, in bytes; 0: the default for `total`
BucketLimits host_bucket_limits(std::size_t total, std::size_t asked = 0);
BucketLimits gpu_bucket_limits(std::size_t total, std::size_t asked = 0);

/// Distributes gradients over buckets, of one dtype and device each.
///
/// @param order indices of gradients in the order in which they become ready
/// @param sizes of all gradients, by index
/// @return indices of gradients, by bucket, in the order in which buckets are complete
std::vector<std::vector<std::size_t>> plan_buckets(std::span<const std::size_t> order,
                                                   std::span<const GradientSize> sizes,
                                                   const BucketLimits&);

/// Elements [begin, end).
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const noexcept { return end - begin; }
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

/// The rows that the member at this position gets in a reducescatter of `elements` rows.
ElementRange rows_at(std::int64_t elements, int ranks, int position);

}  // namespace hvd::libtorch
