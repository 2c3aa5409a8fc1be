#pragma once

#include <c10/util/Synchronized.h>
#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hvd/process_set.h"

namespace hvd {

/// @addtogroup data
/// @{

/// How a DistributedSampler orders and shares the samples.
struct SamplerOptions {
  /// Shuffles by seed + epoch, the same on every rank; false: in the order of the data set.
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// true: leaves out the last samples if there are not enough for every rank; false: fills up with
  /// samples from the start.
  bool drop_last = false;
  /// The ranks that share the data set.
  ProcessSet process_set = {};
};

/// This rank's share of a data set: the indices at positions rank, rank + size, ... of its
/// (shuffled) order, the same number on every rank. The order is that of PyTorch's
/// DistributedSampler for the same seed and epoch.
///
/// Copies share one state, so set_epoch() reaches the copy inside a data loader, and next() on one
/// copy advances all. Call set_epoch() before each epoch begins; a data loader's begin() calls
/// reset(). Thread-safe.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// @throws NotInitializedError before init(); UsageError when this rank is not in the process set
  explicit DistributedSampler(std::size_t dataset_size, SamplerOptions options = {});

  /// Sets the epoch. Its order is used at once if no index of the current order was drawn yet, and
  /// otherwise from the next reset() on.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const;

  /// Starts from the beginning, optionally with another size of the data set. The first call after
  /// load() (by a data loader's begin()) continues from the saved position instead, unless
  /// set_epoch() has set another epoch or the size changes.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Up to `batch_size` indices, fewer at the end; nullopt when there are no more.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Saves the epoch and the number of its samples that all ranks have drawn, assuming that each
  /// has drawn as many as this one. One rank's archive can be loaded on all ranks of a job of any
  /// size; these ranks share the rest of the epoch. A data loader with workers has drawn more
  /// samples than the program has used.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// @throws UsageError when the archive is for a data set of another size or for another order
  /// (seed, shuffle)
  void load(torch::serialize::InputArchive& archive) override;
  /// Throws as load() would, and changes nothing.
  void check(torch::serialize::InputArchive& archive) const;

  /// Samples per epoch on this rank.
  std::size_t size() const;
  /// Number of samples of this epoch that this rank has drawn. After load() at another number of
  /// ranks, earlier samples count as if the current ranks had drawn them, rounded down.
  std::size_t index() const;

 private:
  struct Saved {
    std::size_t epoch;
    std::size_t used;
  };
  Saved read(torch::serialize::InputArchive& archive) const;

  struct State;
  std::shared_ptr<c10::Synchronized<State>> state_;
};

/// @}

}  // namespace hvd
