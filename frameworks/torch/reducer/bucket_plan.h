#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd::libtorch {

/// What a plan of buckets must know of a gradient.
struct GradientSize {
  int device = 0;         ///< its type
  int dtype = 0;          ///< as a number
  std::size_t bytes = 0;  ///< without what a bucket adds
};

/// Where a gradient may begin in a bucket: as aligned as a tensor of its own. In bytes.
inline constexpr std::size_t kGradientAlignment = 64;

/// What a gradient takes up in a bucket. In bytes.
std::size_t room_in_bucket(std::size_t bytes);

/// How large buckets are, in bytes. A bucket of one gradient may be larger.
struct BucketLimits {
  std::size_t most = 0;
  /// Of the one that is complete last, which nothing hides: 0: as the others.
  std::size_t last = 0;
};

/// @param total of all gradients that are in such buckets. In bytes.
/// @param asked the size that the program wants. In bytes; 0: the best for `total`
BucketLimits host_bucket_limits(std::size_t total, std::size_t asked = 0);
BucketLimits gpu_bucket_limits(std::size_t total, std::size_t asked = 0);

/// Shares gradients out among buckets.
///
/// @param order gradients as they become ready
/// @param sizes of all gradients, by index
/// @return indices of gradients, by bucket; a bucket has one dtype and device, and buckets are in
/// the order in which they are complete
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

/// The rows that a member of a set gets of a reducescatter of so many elements.
ElementRange rows_at(std::int64_t elements, int ranks, int position);

}  // namespace hvd::libtorch
