#pragma once

#include <torch/types.h>

#include <string>

#include "hvd/process_set.h"

namespace hvd {

namespace libtorch {
class MetricItem;
}

/// @addtogroup observe
/// @{

/// A mean, sum, minimum or maximum over the values of all ranks, such as a loss or an accuracy.
///
///     hvd::Metric loss("loss");
///     for (auto& batch : *loader) { ...; loss.update(batch_loss, batch.data.size(0)); }
///     double mean = loss.compute();  // over all samples of all ranks
///
/// update() is local; the number of its calls may differ between ranks and may be 0. compute() is
/// collective. Sums are in float64. Not thread-safe.
class Metric {
 public:
  /// How values are combined, over updates and over ranks.
  enum class Kind {
    kMean,  ///< sum of weight * value / sum of weights; NaN if there is no weight
    kSum,   ///< sum of weight * value
    kMin,   ///< infinity if there is no value
    kMax,   ///< -infinity if there is no value
  };

  /// @param name the same on every rank; unique among the metrics
  /// @throws UsageError for an empty name
  explicit Metric(std::string name, Kind kind = Kind::kMean, ProcessSet process_set = {});

  /// Adds each element of a tensor of any real dtype and shape with the weight `weight` (for the
  /// mean of a batch, the batch's size). Does not wait for a GPU. A minimum or maximum ignores the
  /// weight, except that values with weight 0 are left out. A NaN makes the result NaN.
  /// @throws UsageError for an undefined or complex tensor, and for a weight that is negative or
  /// not finite; no value is added then
  void update(const torch::Tensor& values, double weight = 1);
  void update(double value, double weight = 1);

  /// The result over all values since construction or reset() on all ranks of the set. One
  /// allreduce of two numbers. Blocks. Every rank's metric must be of the same kind. @throws as
  /// allreduce()
  double compute() const;
  /// Removes this rank's values. Local: call it on every rank.
  void reset();

 private:
  friend class libtorch::MetricItem;

  bool extreme() const noexcept { return kind_ == Kind::kMin || kind_ == Kind::kMax; }

  std::string name_;
  Kind kind_;
  ProcessSet process_set_;
  /// For kMin the smallest value, for kMax the smallest negated value, otherwise the weighted sum;
  /// float64 of shape [], on the device of the values.
  torch::Tensor total_;
  double weight_ = 0;
};

/// @}

}  // namespace hvd
