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

class TrainingState;

/// What becomes of samples that do not fill all ranks.
enum class Remainder {
  kPad,   ///< repeated from the start until they do: PyTorch's DistributedSampler
  kDrop,  ///< left out: PyTorch's with drop_last
  /// Each sample once: the first ranks have one more, perhaps a batch more than others, which then
  /// call hvd::join().
  kUneven,
};

struct DataLoaderOptions {
  /// Samples per batch and rank, at least 1.
  std::int64_t batch_size = 1;
  /// Threads that load, each with a copy of the data set; 0: the program's own. Batches and their
  /// order do not depend on it.
  std::int64_t workers = 0;
  /// Batches that workers load ahead. Not set: 2 per worker.
  std::optional<std::int64_t> max_jobs = std::nullopt;
  /// Reorders the data set by seed + epoch, as PyTorch does; false: in order.
  bool shuffle = true;
  /// Of the order, and of what transforms draw (see sample_generator()).
  std::uint64_t seed = 0;
  Remainder remainder = Remainder::kPad;
  /// Leaves out a last batch of fewer than batch_size samples.
  bool drop_last = false;
  /// An order of the program's own, the same on every rank: weighted_order(), order_by_length(), or
  /// any function. The loader shares it out among the ranks, sample by sample in turn. Empty: as
  /// `shuffle` says, which has no effect otherwise.
  SampleOrder order = {};
  /// How many samples `order` gives for each epoch. Not set: as many as the data set has.
  std::optional<std::size_t> samples_per_epoch = std::nullopt;
  /// How long the program waits for a batch of the workers. Not set: without a limit. An iterator
  /// throws LibTorch's std::runtime_error when it is over.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  /// The ranks that share the data set.
  ProcessSet process_set = {};
  /// In errors. Loaders that several threads use at a time need names of their own.
  std::string name = "data_loader";
};

namespace libtorch {

/// Where the ranks of a loader are in their data set. Not thread-safe.
class LoaderProgress {
 public:
  /// What is asked of a worker.
  struct Request {
    std::uint64_t epoch = 0;
    std::vector<std::size_t> samples;
    std::size_t size() const noexcept { return samples.size(); }
  };

  /// Collective over the options' process set: compares what ranks must agree on. @throws as
  /// make_data_loader()
  LoaderProgress(std::optional<std::size_t> dataset_size, DataLoaderOptions options);
  /// As rank `rank` of `ranks`; talks to nobody.
  LoaderProgress(std::size_t dataset_size, DataLoaderOptions options, std::size_t rank,
                 std::size_t ranks);

  const DataLoaderOptions& options() const noexcept { return options_; }
  torch::data::DataLoaderOptions torch_options() const;
  std::size_t epoch() const noexcept { return epoch_; }
  std::size_t samples_used() const noexcept { return used_; }
  /// This rank's, of the current epoch.
  std::size_t samples_left() const noexcept;
  std::size_t batches_left() const noexcept;
  /// This rank's samples that are left, in order.
  std::vector<std::size_t> samples() const;

  void set_epoch(std::size_t epoch);
  /// Every rank has used a batch more (the last may be smaller, or empty).
  void use_batch();
  void end_epoch();
  /// Changes whenever iterators of before are void.
  std::uint64_t generation() const noexcept { return generation_; }
  void leave() noexcept { ++generation_; }
  /// Collective: ranks must be at the same position. @throws MismatchError on every rank
  void begin();

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);
  /// What load() would throw.
  void check(torch::serialize::InputArchive& archive) const { read(archive); }

 private:
  struct Saved {
    std::size_t epoch = 0, used = 0;
  };
  Saved read(torch::serialize::InputArchive& archive) const;
  /// The program's own order of this epoch. @throws UsageError when it is not one
  const std::vector<std::size_t>& own_order() const;

  DataLoaderOptions options_;
  std::size_t data_size_ = 0;     ///< samples in the data set
  std::size_t dataset_size_ = 0;  ///< samples in an epoch
  mutable std::vector<std::size_t> own_order_;
  mutable std::optional<std::size_t> own_order_epoch_;
  std::size_t rank_ = 0, ranks_ = 1;
  std::size_t epoch_ = 0;
  std::size_t used_ = 0;  ///< by all ranks, of the epoch's order; counts repeated samples
  std::uint64_t generation_ = 0;
};

/// What LibTorch's loader asks for a rank's samples: ahead of what the program uses.
class LoaderSampler : public torch::data::samplers::Sampler<LoaderProgress::Request> {
 public:
  explicit LoaderSampler(std::shared_ptr<const LoaderProgress> progress)
      : progress_(std::move(progress)) {}

  /// Begins where the program is.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  std::optional<LoaderProgress::Request> next(std::size_t batch_size) override;
  void save(torch::serialize::OutputArchive& archive) const override { progress_->save(archive); }
  /// @throws UsageError: it is the loader that is loaded
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<const LoaderProgress> progress_;
  std::vector<std::size_t> samples_;
  std::size_t asked_ = 0;
};

/// A data set whose samples have generators.
template <class Dataset>
class SeededDataset {
 public:
  using BatchType = typename Dataset::BatchType;

  SeededDataset(Dataset dataset, std::uint64_t seed) : dataset_(std::move(dataset)), seed_(seed) {}

  BatchType get_batch(LoaderProgress::Request request) {
    const SampleScope scope(seed_, request.epoch, request.samples);
    return dataset_.get_batch(request.samples);
  }

 private:
  Dataset dataset_;
  std::uint64_t seed_;
};

/// LibTorch's loader, which can be begun again in mid-epoch.
template <class Dataset>
class PrefetchingLoader
    : public torch::data::StatelessDataLoader<SeededDataset<Dataset>, LoaderSampler> {
 public:
  using Base = torch::data::StatelessDataLoader<SeededDataset<Dataset>, LoaderSampler>;
  using Base::Base;
  using Base::next;

  void restart() {
    this->shuttle_.drain();  // what was loaded ahead and nobody has used; begin() would refuse
    this->begin();
  }
};

/// Counts batches as used when the program gets them.
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
    if (this->batch_) count();  // one that was passed over
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

/// This rank's batches of a data set, epoch after epoch, loaded ahead by LibTorch's DataLoader. It
/// knows how much the program has *used*, which is what save() saves, whatever workers have loaded:
/// a program that was interrupted goes on with the batch after the last one it has used.
///
///   auto loader = hvd::make_data_loader(dataset, {.batch_size = 64, .workers = 2});
///   while (loader->epoch() < 10) {
///     for (auto& batch : *loader) { ...; optimizer.step(); }  // a checkpoint may be saved here
///   }
///
/// A batch counts as used when the iterator first hands it out (`*iterator`), so from the top of a
/// range-for's body on. When an iterator has reached the end, epoch() is one more and the next
/// begin() begins that epoch; one that was left early goes on at the next begin().
///
/// The order, epoch by epoch, is that of PyTorch's DistributedSampler for the same seed. Samples
/// that were used are counted over all ranks, so a state saved by some ranks is loaded by any
/// number of ranks, which go on with the samples that nobody has used. Not thread-safe; iterators
/// must not outlive it.
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

  /// The batches that are left of the epoch. Iterators of before are void. Collective over the
  /// process set. @throws MismatchError on every rank when they are not at the same epoch and
  /// position. An iterator throws what the data set throws, from a worker as
  /// torch::data::WorkerException, and UsageError when the loader was set to another position.
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
  /// Goes to the start of another epoch; of this one, changes nothing, so that a program which was
  /// resumed may say at the top of its loop which epoch it is in. The same on every rank.
  void set_epoch(std::size_t epoch) { progress_->set_epoch(epoch); }
  /// Of this epoch, by all ranks together. Counts samples that were repeated.
  std::size_t samples_used() const noexcept { return progress_->samples_used(); }
  /// Of this epoch, on this rank.
  std::size_t batches_left() const noexcept { return progress_->batches_left(); }

  /// Epoch and position. The same on every rank, so one rank's archive serves all (with
  /// Remainder::kUneven that of the set's first rank).
  void save(torch::serialize::OutputArchive& archive) const { progress_->save(archive); }
  /// Call it on every rank, with any batch_size, workers and number of ranks.
  /// @throws UsageError, and nothing has changed, when the archive holds no loader's state, or that
  /// of a data set of another size or of another order (seed, shuffle)
  void load(torch::serialize::InputArchive& archive) { progress_->load(archive); }

 private:
  friend class TrainingState;
  const std::shared_ptr<libtorch::LoaderProgress>& progress() const noexcept { return progress_; }

  std::optional<BatchType> next(std::uint64_t generation) {
    if (generation != progress_->generation())
      libtorch::throw_stale_iterator(progress_->options().name);
    try {
      std::optional<BatchType> batch = loader_.next();
      if (!batch) progress_->end_epoch();
      return batch;
    } catch (...) {
      progress_->leave();  // or the batch that is missing would count as used
      throw;
    }
  }

  std::shared_ptr<libtorch::LoaderProgress> progress_;
  libtorch::PrefetchingLoader<Dataset> loader_;
};

/// Collective over the process set; blocks. The ranks of the set share the data set: each has all
/// of it, the same size on every rank.
/// Warns, on the first rank, when an epoch has no batch on any rank.
/// @throws UsageError for a data set without a size, a batch_size or max_jobs below 1, a negative
/// number of workers, a timeout that is not positive, samples_per_epoch without an order, and in a
/// process set that this rank is not in; MismatchError on the ranks that have nothing to complain
/// of when another rank throws, and on every rank when sizes or options (but workers and max_jobs)
/// differ; NotInitializedError before init(); and as every collective
template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> make_data_loader(Dataset dataset,
                                                      DataLoaderOptions options = {}) {
  return std::make_unique<DataLoader<Dataset>>(std::move(dataset), std::move(options));
}

}  // namespace hvd
