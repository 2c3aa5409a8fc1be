#pragma once

#include <torch/data/dataloader/stateless.h>
#include <torch/data/iterator.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/torch/sample_generator.h"
#include "hvd/torch/sample_order.h"

namespace hvd {

/// @addtogroup data
/// @{

class TrainingState;
template <class Dataset>
class PreparedLoader;

/// The treatment of samples that do not fill all ranks.
enum class Remainder {
  kPad,   ///< repeat samples from the start, as PyTorch's DistributedSampler
  kDrop,  ///< leave the samples out, as PyTorch's with drop_last
  /// Use each sample once. The first ranks have one sample more, and may have a batch more than the
  /// others, which then call hvd::join().
  kUneven,
};

/// How make_data_loader() forms batches.
struct DataLoaderOptions {
  /// Samples per batch and rank, at least 1.
  std::int64_t batch_size = 1;
  /// Samples per step on all ranks together, instead of batch_size: the step has the same size for
  /// any number of ranks, which may change in an elastic job. The ranks' batches differ by at most
  /// one sample, so the optimizer needs set_weight(). The last step of an epoch may be smaller; if
  /// it has fewer samples than there are ranks, kPad repeats some. kDrop leaves it out. 0: not
  /// used.
  std::int64_t global_batch = 0;
  /// Number of loading threads, each with a copy of the data set; 0: batches are loaded in the
  /// calling thread. Batches and their order do not depend on it.
  std::int64_t workers = 0;
  /// Number of batches that workers load ahead, at least 1. Not set: 2 per worker.
  std::optional<std::int64_t> max_jobs = std::nullopt;
  /// Shuffles by seed + epoch, as PyTorch does; false: in the order of the data set.
  bool shuffle = true;
  /// Seed of the order and of the generators of samples (see sample_generator()).
  std::uint64_t seed = 0;
  Remainder remainder = Remainder::kPad;
  /// Leaves out a last batch of fewer than batch_size samples.
  bool drop_last = false;
  /// An order of the program's own, the same on every rank: weighted_order(), order_by_length(), or
  /// any function. Its samples go to the ranks in turn. `shuffle` then has no effect. Empty: the
  /// order is that of `shuffle`.
  SampleOrder order = {};
  /// The number of samples that `order` returns. Not set: the size of the data set.
  std::optional<std::size_t> samples_per_epoch = std::nullopt;
  /// Limit of the wait for a batch of the workers, after which an iterator throws LibTorch's
  /// std::runtime_error. Not set: no limit.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  /// The ranks that share the data set.
  ProcessSet process_set = {};
  /// Used in error texts. Loaders that are used by several threads at a time need distinct names.
  std::string name = "data_loader";
};

namespace libtorch {

/// A batch's place in its epoch.
struct BatchPlace {
  std::size_t rank = 0, ranks = 1;
  /// Samples of the epoch that no rank had used before the batch, without repeated ones.
  std::size_t samples_left = 0;
  /// Samples of each rank's batch, by rank, with repeated ones.
  std::vector<std::size_t> sizes = {};
  /// Whether at least one rank has no further batch in the epoch after this one. Equal on all
  /// ranks.
  bool last = false;
};

/// The position of the ranks of a loader in their data set. Not thread-safe.
class LoaderProgress {
 public:
  /// The samples of one batch, for a worker.
  struct BatchRequest {
    std::uint64_t epoch = 0;
    std::vector<std::size_t> samples;
    std::size_t size() const noexcept { return samples.size(); }
  };

  /// Compares the arguments of the ranks. Collective over the options' process set, except in an
  /// elastic job, where the first begin() of each generation does it. @throws as make_data_loader()
  LoaderProgress(std::optional<std::size_t> dataset_size, DataLoaderOptions options);
  /// For rank `rank` of `ranks`; does not communicate.
  LoaderProgress(std::size_t dataset_size, DataLoaderOptions options, std::size_t rank,
                 std::size_t ranks);

  const DataLoaderOptions& options() const noexcept { return options_; }
  torch::data::DataLoaderOptions torch_options() const;
  std::size_t epoch() const noexcept { return epoch_; }
  std::size_t samples_used() const noexcept { return used_; }
  /// On this rank, in the current epoch.
  std::size_t samples_left() const noexcept;
  std::size_t batches_left() const noexcept;
  /// This rank's unused samples of the current epoch, in order.
  std::vector<std::size_t> samples() const;
  std::size_t samples_per_epoch() const noexcept { return dataset_size_; }
  /// The next batch, which use_batch() has not counted yet.
  BatchPlace next_batch() const;
  /// Continues after the first `batches` batches of the epoch, unless at least as many are used.
  /// @return whether the position has changed
  bool skip_first(std::size_t batches);

  void set_epoch(std::size_t epoch);
  /// Counts one batch on every rank as used (the last may be smaller, or empty).
  void use_batch();
  void end_epoch();
  /// A number that changes when existing iterators become invalid.
  std::uint64_t generation() const noexcept { return generation_; }
  void leave() noexcept { ++generation_; }
  /// Compares the positions of the ranks. Collective. @throws MismatchError on every rank when they
  /// differ
  void begin();
  /// Samples of a full batch of this rank.
  std::size_t full_batch() const noexcept { return share_of(rank_, step_samples()); }

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);
  /// Throws as load() would, and changes nothing.
  void check(torch::serialize::InputArchive& archive) const { read(archive); }

 private:
  struct SavedPosition {
    std::size_t epoch = 0, used = 0;
  };
  SavedPosition read(torch::serialize::InputArchive& archive) const;
  std::string own_error() const;
  void meet();
  void begin_generation();
  /// Samples of a full step on all ranks.
  std::size_t step_samples() const noexcept;
  std::size_t share_of(std::size_t rank, std::size_t samples) const noexcept {
    return (samples + ranks_ - 1 - rank) / ranks_;
  }
  /// Samples of the next step on all ranks, with repeated ones, if `left` are left. With a
  /// global_batch.
  std::size_t next_step(std::size_t left) const noexcept;
  std::size_t samples_left_of(std::size_t rank) const noexcept;
  std::size_t batches_in(std::size_t samples) const noexcept;
  /// The samples of this epoch from options().order. @throws UsageError when they are not valid
  const std::vector<std::size_t>& own_order() const;

  DataLoaderOptions options_;
  std::size_t data_size_ = 0;     ///< samples in the data set
  std::size_t dataset_size_ = 0;  ///< samples in an epoch
  mutable std::vector<std::size_t> own_order_;
  mutable std::optional<std::size_t> own_order_epoch_;
  std::size_t rank_ = 0, ranks_ = 1;
  bool no_size_ = false;
  bool met_ = false;  ///< the ranks have compared their arguments
  std::shared_ptr<const void> generations_;
  std::size_t epoch_ = 0;
  std::size_t used_ = 0;  ///< by all ranks, of the epoch's order; counts repeated samples
  std::uint64_t generation_ = 0;
};

/// Gives LibTorch's loader the samples of a rank, ahead of the program's use.
class LoaderSampler : public torch::data::samplers::Sampler<LoaderProgress::BatchRequest> {
 public:
  explicit LoaderSampler(std::shared_ptr<const LoaderProgress> progress)
      : progress_(std::move(progress)) {}

  /// Starts from the samples that the program has not used.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  std::optional<LoaderProgress::BatchRequest> next(std::size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override { progress_->save(archive); }
  /// @throws UsageError always: the state is loaded by the loader
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<const LoaderProgress> progress_;
  std::vector<std::size_t> samples_;
  std::size_t requested_ = 0;
};

/// A data set whose samples have random generators.
template <class Dataset>
class SeededDataset {
 public:
  using BatchType = typename Dataset::BatchType;

  SeededDataset(Dataset dataset, std::uint64_t seed) : dataset_(std::move(dataset)), seed_(seed) {}

  BatchType get_batch(LoaderProgress::BatchRequest request) {
    const SampleScope scope(seed_, request.epoch, request.samples);
    return dataset_.get_batch(request.samples);
  }

 private:
  Dataset dataset_;
  std::uint64_t seed_;
};

/// LibTorch's loader, extended so that it can be restarted in the middle of an epoch.
template <class Dataset>
class PrefetchingLoader
    : public torch::data::StatelessDataLoader<SeededDataset<Dataset>, LoaderSampler> {
 public:
  using Base = torch::data::StatelessDataLoader<SeededDataset<Dataset>, LoaderSampler>;
  using Base::Base;
  using Base::next;

  void restart() {
    this->shuttle_.drain();  // drops unused batches; begin() would refuse otherwise
    this->begin();
  }
};

/// Counts a batch as used when the program receives it.
template <class Batch>
class UsedBatchIterator final : public torch::data::detail::ValidIterator<Batch> {
  using Base = torch::data::detail::ValidIterator<Batch>;

 public:
  UsedBatchIterator(std::function<std::optional<Batch>()> load, std::function<void()> use)
      : Base(std::move(load)), use_(std::move(use)) {}

  Batch& get() override {
    Batch& batch = Base::get();
    count();
    return batch;
  }
  void next() override {
    this->lazy_initialize();
    if (this->batch_) count();  // a batch that the program has skipped
    Base::next();
    counted_ = false;
  }

 private:
  void count() {
    if (!counted_) use_();
    counted_ = true;
  }

  std::function<void()> use_;
  bool counted_ = false;
};

[[noreturn]] void throw_stale_iterator(const std::string& loader);

}  // namespace libtorch

/// This rank's batches of a data set, epoch after epoch, loaded ahead by LibTorch's DataLoader. The
/// loader counts the samples that the program has *used*, not those that workers have loaded ahead.
/// save() saves that position, so an interrupted program continues after the last batch that it
/// used.
///
///     auto loader = hvd::make_data_loader(dataset, {.batch_size = 64, .workers = 2});
///     while (loader->epoch() < 10) {
///       for (auto& batch : *loader) { ...; optimizer.step(); }  // a checkpoint may be saved here
///     }
///
/// A batch counts as used when the iterator is first dereferenced, which is before a range-for's
/// body begins. When an iterator reaches the end, epoch() increases by one, and the next begin()
/// starts that epoch. The next begin() after a loop that was left early continues the epoch.
///
/// The order of an epoch is that of PyTorch's DistributedSampler for the same seed. Used samples
/// are counted over all ranks, so any number of ranks can load the state and continue with the
/// unused samples. Not thread-safe; iterators must not outlive the loader.
///
/// In an elastic job a loader may be made before elastic::run(), and survives changes of the ranks.
/// Track it (elastic::TorchState): the ranks then go back to the position of the last commit, so
/// that each sample is used in one committed step.
template <class Dataset>
class DataLoader {
  static_assert(!Dataset::is_stateful,
                "hvd: a stateful data set has no sample numbers, so no position that could be "
                "saved or shared out; make it a BatchDataset of indices");
  static_assert(
      std::is_constructible_v<typename Dataset::BatchRequestType, const std::vector<std::size_t>&>,
      "hvd: expected a data set whose get_batch() takes indices");

 public:
  using BatchType = typename Dataset::BatchType;

  /// See make_data_loader().
  DataLoader(Dataset dataset, DataLoaderOptions options)
      : progress_(std::make_shared<libtorch::LoaderProgress>(dataset.size(), std::move(options))),
        loader_(libtorch::SeededDataset<Dataset>(std::move(dataset), progress_->options().seed),
                libtorch::LoaderSampler(progress_), progress_->torch_options()) {}

  /// An iterator over the unused batches of the epoch. Invalidates earlier iterators. Collective
  /// over the process set. The iterator throws the exceptions of the data set, those of workers as
  /// torch::data::WorkerException, and UsageError when the loader was set to another position.
  /// @throws MismatchError on every rank when the ranks' epochs or positions differ
  torch::data::Iterator<BatchType> begin() {
    progress_->begin();
    loader_.restart();
    const std::uint64_t generation = progress_->generation();
    return torch::data::Iterator<BatchType>(
        std::make_unique<libtorch::UsedBatchIterator<BatchType>>(
            [this, generation] { return next(generation); },
            [this, generation] {
              if (generation == progress_->generation()) progress_->use_batch();
            }));
  }
  torch::data::Iterator<BatchType> end() {
    return torch::data::Iterator<BatchType>(
        std::make_unique<torch::data::detail::SentinelIterator<BatchType>>());
  }

  std::size_t epoch() const noexcept { return progress_->epoch(); }
  /// Goes to the start of another epoch, the same on every rank. No effect for the current epoch,
  /// so a resumed program may call it at the top of its loop.
  void set_epoch(std::size_t epoch) { progress_->set_epoch(epoch); }
  /// Number of samples of this epoch that all ranks together have used, repeated ones included.
  std::size_t samples_used() const noexcept { return progress_->samples_used(); }
  /// Number of unused batches of this epoch on this rank.
  std::size_t batches_left() const noexcept { return progress_->batches_left(); }

  /// Saves epoch and position, which are the same on every rank. One rank's archive can be loaded
  /// on all (with Remainder::kUneven that of the set's first rank).
  void save(torch::serialize::OutputArchive& archive) const { progress_->save(archive); }
  /// Loads a saved position. Call it on every rank. batch_size, workers and the number of ranks may
  /// differ from those of the saved state.
  /// @throws UsageError, and changes nothing, for an archive without a loader's state, and for a
  /// data set of another size or order (seed, shuffle)
  void load(torch::serialize::InputArchive& archive) { progress_->load(archive); }

 private:
  friend class TrainingState;
  friend class PreparedLoader<Dataset>;
  const std::shared_ptr<libtorch::LoaderProgress>& progress() const noexcept { return progress_; }

  std::optional<BatchType> next(std::uint64_t generation) {
    if (generation != progress_->generation())
      libtorch::throw_stale_iterator(progress_->options().name);
    try {
      std::optional<BatchType> batch = loader_.next();
      if (!batch) progress_->end_epoch();
      return batch;
    } catch (...) {
      progress_->leave();  // otherwise the missing batch would count as used
      throw;
    }
  }

  std::shared_ptr<libtorch::LoaderProgress> progress_;
  libtorch::PrefetchingLoader<Dataset> loader_;
};

/// Makes a loader that divides a data set among the ranks of a set. Every rank passes the complete
/// data set. Collective over the process set, except in an elastic job; blocks. The first rank
/// warns when an epoch has no batch on any rank.
/// @throws UsageError for a data set without a size, a batch_size or max_jobs below 1, a negative
/// number of workers, a timeout that is not positive, samples_per_epoch without an order, and when
/// this rank is not in the set; MismatchError when another rank has thrown, and on every rank when
/// sizes or options (except workers and max_jobs) differ; NotInitializedError before init(); and as
/// every collective
template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> make_data_loader(Dataset dataset,
                                                      DataLoaderOptions options = {}) {
  return std::make_unique<DataLoader<Dataset>>(std::move(dataset), std::move(options));
}

/// Another name of make_data_loader(), for Accelerator::prepare():
/// `auto train = hvd::loader(data_set, {.batch_size = 64});`.
template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> loader(Dataset dataset, DataLoaderOptions options = {}) {
  return make_data_loader(std::move(dataset), std::move(options));
}

/// @}

}  // namespace hvd
