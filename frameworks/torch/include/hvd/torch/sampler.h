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

struct SamplerOptions {
  /// Reorders the data set by seed + epoch, alike on every rank; false: in order.
  bool shuffle = true;
  std::uint64_t seed = 0;
  /// True drops the tail that does not fill every rank; false repeats from the start until it does.
  bool drop_last = false;
  /// The ranks that share the data set.
  ProcessSet process_set = {};
};

/// This rank's share of a data set: indices rank, rank + size, ... of its (shuffled) order, the
/// same number on every rank. The order is that of PyTorch's DistributedSampler for the same seed
/// and epoch.
///
/// Copies share one state, so set_epoch() reaches the copy inside a data loader, and next() on one
/// copy advances all. Call set_epoch() before each epoch begins; a data loader's begin() calls
/// reset(). Thread-safe.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// @throws NotInitializedError before init(), which tells rank and size; UsageError when this
  /// rank is not in the process set.
  explicit DistributedSampler(std::size_t dataset_size, SamplerOptions options = {});

  /// Chooses the order of the next enumeration: of the current one if nothing was drawn from it
  /// yet, else from reset() on.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const;

  /// Starts again, optionally over a data set of another size. The first call after load() (a data
  /// loader's begin()) goes on where the saved sampler was, unless set_epoch() has named another
  /// epoch meanwhile or the size changes.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Up to `batch_size` indices, fewer at the end; nullopt when there are no more.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Epoch, and how many samples of its order all ranks have drawn together, each as many as this
  /// one. The same on every rank, so one rank's archive serves all, at any number of ranks: what is
  /// left of the epoch is dealt out among those there are. A data loader with workers draws ahead
  /// of what the program has used.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// @throws UsageError when the archive belongs to a data set of another size, or to another order
  /// (seed, shuffle).
  void load(torch::serialize::InputArchive& archive) override;
  /// Throws as load() would, and changes nothing.
  void check(torch::serialize::InputArchive& archive) const;

  /// Samples per epoch on this rank.
  std::size_t size() const;
  /// Samples already drawn from this epoch; after load() at another number of ranks as if it had
  /// been this number from the start, rounded down.
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

}  // namespace hvd
