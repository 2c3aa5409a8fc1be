#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/torch/gradient_hook.h"
#include "hvd/types.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {

/// What becomes of sparse gradients.
enum class SparseGradients { kRefuse, kMakeDense, kReduceSparse };

/// How gradients are reduced. The same for all of one optimizer.
struct GradientReduction {
  const char* who = "DistributedOptimizer";  ///< the user's class, which begins messages
  std::string scope = {};                    ///< goes before every name that ranks agree on
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1;
  double postscale = 1;
  Compression compression = Compression::kNone;
  ProcessSet process_set = {};
  SparseGradients sparse = SparseGradients::kRefuse;
  bool bucket_views = false;
  std::int64_t bucket_bytes = 0;    ///< how large buckets are; 0: as large as is usually best
  int check_every = 0;              ///< see ParameterCheck
  bool error_if_nonfinite = false;  ///< see FiniteCheck
  /// Each rank updates a part of the parameters: of a bucket in the host's memory that is not
  /// compressed it gets its rows only; see decision 29.
  bool sharded = false;
  /// What the ranks must have in common besides the parameters, a line for each thing; compared as
  /// often as these, bit for bit. Empty: nothing.
  std::function<std::vector<std::string>()> options = {};
  /// What travels is no gradient but what each rank's optimizer has changed.
  bool of_changes = false;
  /// Reduces units of gradients instead of the runtime.
  GradientHook hook = {};
};

/// Copying less than this into a common buffer costs less than another call of the backend. In
/// bytes.
inline constexpr std::size_t kWorthACallOfItsOwn = std::size_t{128} << 10;
/// From here on a tensor is not fused within one host, wherever it lies. In bytes.
inline constexpr std::size_t kLargeOnOneHost = std::size_t{256} << 10;

/// An allreduce of `memory` in its own place, which the core compresses if it can: real numbers.
/// The caller sets keep_alive.
Submission reduction_in_place(std::string name, const GradientReduction& how, TensorView memory);
/// A reducescatter of `memory`, whose rows of this rank stay where they are. Not compressed.
Submission scatter_in_place(std::string name, const GradientReduction& how, TensorView memory);
/// The same as the first of a contiguous tensor, which it keeps alive.
Submission reduction_in_place(std::string name, const GradientReduction& how,
                              const torch::Tensor& tensor);

/// A gradient's strides in a bucket: the parameter's, if those leave no gaps.
std::vector<std::int64_t> strides_for(const torch::Tensor& parameter);

}  // namespace hvd::libtorch
