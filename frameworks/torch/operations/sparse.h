#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/torch/operations.h"

namespace hvd::libtorch {

/// The allreduce of one sparse COO tensor. Every rank gathers all indices and values and adds them.
/// A third allgather exchanges the shapes, one row from each contributing rank; the number of rows
/// is the divisor of an average. The three allgathers must be in one group. Not thread-safe.
class SparseReduction {
 public:
  /// @throws UsageError for a tensor that cannot be reduced
  SparseReduction(const torch::Tensor& coo, AllreduceOptions options);

  /// Call it once.
  std::vector<Submission> take_submissions() { return std::move(submissions_); }
  /// The coalesced result, the same on every rank. Call it after all submissions have succeeded.
  /// @throws MismatchError when shapes differ
  torch::Tensor result() const;

 private:
  void gather(const torch::Tensor& part, std::string name);
  std::vector<std::int64_t> common_shape(const torch::Tensor& shapes) const;

  const AllreduceOptions options_;
  const torch::ScalarType type_;
  std::vector<Submission> submissions_;
  std::vector<std::function<torch::Tensor()>> parts_;  ///< indices, values, shapes
};

}  // namespace hvd::libtorch
