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

/// The allreduce of one sparse COO tensor: every rank gathers all indices and values and adds them
/// up. A third allgather, one row from each rank that contributes, carries the shape and tells by
/// how much an average divides. The three belong into one group. Not thread-safe.
class SparseReduction {
 public:
  /// @throws UsageError for what cannot be reduced.
  SparseReduction(const torch::Tensor& coo, AllreduceOptions options);

  /// Once.
  std::vector<Submission> begin_submissions() { return std::move(submissions_); }
  /// Coalesced. Once all submissions have succeeded; alike on every rank. @throws MismatchError
  /// when shapes differ.
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
