#pragma once

#include <torch/types.h>

#include <string>

#include "hvd/process_set.h"

namespace hvd {

namespace libtorch {
class MetricItem;
}

/// What ranks have measured, as one number that is the same on all of them: a loss, an accuracy.
///
///   hvd::Metric loss("loss");
///   for (auto& batch : *loader) { ...; loss.update(batch_loss, batch.data.size(0)); }
///   double mean = loss.compute();  // over all samples of all ranks, however they were shared out
///
/// update() is local and may be called differently often on each rank, or never; compute() is
/// collective. Numbers are added up in float64. Not thread-safe.
class Metric {
 public:
  enum class Kind {
    kMean,  ///< sum of weight * value / sum of weights; NaN if there is no weight
    kSum,   ///< sum of weight * value
    kMin,   ///< infinity if there is no value
    kMax,   ///< -infinity if there is no value
  };

  /// @param name the same on every rank, and another one for each metric
  /// @throws UsageError for an empty name
  explicit Metric(std::string name, Kind kind = Kind::kMean, ProcessSet process_set = {});

  /// Each element of the tensor, of any real dtype and shape, counts `weight` times (so a mean over
  /// a batch has the batch's size). On a GPU nobody waits for it. A minimum or maximum takes no
  /// notice of the weight, except that 0 leaves the values out. A NaN makes the result NaN.
  /// @throws UsageError for an undefined or complex tensor, and for a weight that is negative or
  /// not finite; nothing has been added then
  void update(const torch::Tensor& values, double weight = 1);
  void update(double value, double weight = 1);

  /// Over everything since construction or reset(), on all ranks of the set. One allreduce of two
  /// numbers. Blocks; can be called again. Every rank's metric is of the same kind. @throws as
  /// allreduce()
  double compute() const;
  /// Forgets this rank's values. Local: call it on every rank.
  void reset();

 private:
  friend class libtorch::MetricItem;

  bool extreme() const noexcept { return kind_ == Kind::kMin || kind_ == Kind::kMax; }

  std::string name_;
  Kind kind_;
  ProcessSet process_set_;
  /// Of kMin and kMax the least of the values (kMax: of their negatives), otherwise their weighted
  /// sum; float64, without dimensions, where the values were.
  torch::Tensor total_;
  double weight_ = 0;
};

}  // namespace hvd
