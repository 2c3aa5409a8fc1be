#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/torch/gradient_hook.h"
#include "hvd/types.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {

/// Treatment of sparse gradients.
enum class SparseGradients { kRefuse, kMakeDense, kReduceSparse };

/// How the gradients of one optimizer are reduced.
struct GradientReduction {
  const char* wrapper =
      "DistributedOptimizer";  ///< name of the user's class, which begins messages
  std::string scope = {};      ///< prefix of every name that ranks agree on
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1;
  double postscale = 1;
  Compression compression = Compression::kNone;
  ProcessSet process_set = {};
  SparseGradients sparse = SparseGradients::kRefuse;
  bool bucket_views = false;
  std::int64_t bucket_bytes = 0;    ///< size of buckets; 0: the default
  int check_every = 0;              ///< see ParameterCheck
  bool error_if_nonfinite = false;  ///< see FiniteCheck
  /// Buffers with BatchNorm statistics, by name. A difference between ranks causes a warning.
  std::vector<std::pair<std::string, torch::Tensor>> statistics = {};
  /// Each rank updates a part of the parameters: buckets in the host's memory that are not
  /// compressed are scattered; see decision 29.
  bool sharded = false;
  /// Returns lines that must be the same on all ranks. Compared as often as the parameters, bit for
  /// bit. May be empty.
  std::function<std::vector<std::string>()> options = {};
  /// Reduces the changes that each rank's optimizer has made, instead of gradients.
  bool reduces_changes = false;
  /// Reduces units of gradients instead of the runtime.
  GradientHook hook = {};
};

/// A copy of fewer bytes into a common buffer costs less than another call of the backend.
inline constexpr std::size_t kWorthACallOfItsOwn = std::size_t{128} << 10;
/// Tensors from this size on, in bytes, are not fused within one host.
inline constexpr std::size_t kLargeOnOneHost = std::size_t{256} << 10;

/// An allreduce in place. The core compresses real numbers if `how` wants compression. The caller
/// sets keep_alive.
Submission reduction_in_place(std::string name, const GradientReduction& how, TensorView memory);
/// A reducescatter in place: this rank's rows stay where they are. Not compressed.
Submission scatter_in_place(std::string name, const GradientReduction& how, TensorView memory);
/// An allreduce in place of a contiguous tensor, which the submission keeps alive.
Submission reduction_in_place(std::string name, const GradientReduction& how,
                              const torch::Tensor& tensor);

/// Strides of a gradient in a bucket: those of the parameter, or contiguous ones if those have
/// gaps.
std::vector<std::int64_t> strides_for(const torch::Tensor& parameter);

}  // namespace hvd::libtorch
