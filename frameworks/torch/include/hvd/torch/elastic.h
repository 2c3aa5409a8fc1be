#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/types.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "hvd/elastic.h"
#include "hvd/torch/data_loader.h"
#include "hvd/torch/local_sgd.h"
#include "hvd/torch/parameters.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

template <class T>
concept ModulePointer = requires(T& pointer) {
  requires std::derived_from<std::remove_cvref_t<decltype(*pointer)>, torch::nn::Module>;
};

/// Types other than tensors, modules, optimizers and schedulers.
template <class T>
concept PlainObject =
    !std::is_const_v<T> && !ModulePointer<T> && !std::derived_from<T, torch::Tensor> &&
    !std::derived_from<T, torch::nn::Module> && !std::derived_from<T, torch::optim::Optimizer> &&
    !std::derived_from<T, torch::optim::LRScheduler>;

}  // namespace hvd::libtorch

namespace hvd::elastic {

/// @addtogroup elastic
/// @{

/// Whether a commit copies parameters and optimizer state.
enum class Copy {
  /// No. A rank whose parameters were written after its last commit receives those of another rank.
  /// If all ranks have written theirs, they continue with one rank's parameters, and the samples of
  /// one step are used twice.
  kNone,
  /// Yes, at the cost of their memory and of the copy. Every rank goes back to the last commit
  /// exactly.
  kAtCommit,
};

/// Options of a TorchState.
struct TorchStateOptions {
  Copy copy = Copy::kNone;
};

/// How an elastic Sampler divides the samples of an epoch. Expects one of batch and global_batch.
struct SamplerOptions {
  std::size_t batch = 0;  ///< samples of a step on each rank
  /// Samples of a step on all ranks together, whose shares differ by at most one sample. A step
  /// then uses the same samples for any number of ranks.
  std::size_t global_batch = 0;
  bool shuffle = true;     ///< by seed + epoch, as PyTorch does
  std::uint64_t seed = 0;  ///< of the order
  bool drop_last = false;  ///< leave out a last step that is not full
};

/// The samples of each rank and step, as numbers in a data set:
///
///     for (; sampler.epoch() < 10; sampler.set_epoch(sampler.epoch() + 1)) {
///       while (const auto samples = sampler.next()) {
///         optimizer.set_weight(samples->size());
///         loss_of(*samples).backward();
///         optimizer.step();
///         state.commit();
///       }
///     }
///
/// All ranks track it (TorchState::track()), and call next() the same number of times. A change of
/// the ranks sets the position to that of the last commit, so each sample of an epoch is used in
/// exactly one committed step. A last step with fewer samples than ranks repeats some. Not
/// thread-safe.
class Sampler {
 public:
  /// Local. @throws UsageError for an empty data set, and unless exactly one of batch and
  /// global_batch is set
  Sampler(std::size_t dataset_size, SamplerOptions options);

  /// This rank's samples of the next step; nullopt at the end of the epoch. @throws UsageError for
  /// a global_batch of fewer samples than ranks
  std::optional<std::vector<std::size_t>> next();
  std::size_t epoch() const noexcept { return static_cast<std::size_t>(position_.epoch); }
  /// Goes to the start of another epoch. No effect for the current epoch.
  void set_epoch(std::size_t epoch);
  /// Samples of this epoch that all ranks together have taken.
  std::size_t samples_used() const noexcept { return static_cast<std::size_t>(position_.used); }
  std::size_t dataset_size() const noexcept { return dataset_size_; }

 private:
  friend class TorchState;
  struct Position {
    std::uint64_t epoch = 0, used = 0;
  };

  std::size_t dataset_size_;
  SamplerOptions options_;
  Position position_;
  std::vector<std::size_t> order_;  ///< of order_epoch_
  std::optional<std::uint64_t> order_epoch_;
};

/// The state of a training program in an elastic job: a State that also tracks models, optimizers
/// and the other objects that a TrainingState takes.
///
///     hvd::elastic::TorchState state(model, optimizer);
///     state.track("epoch", epoch).track("sampler", sampler).random(42);
///     hvd::elastic::run(state, [&] { ...; optimizer.step(); state.commit(); });
///
/// Refers to its arguments, which must outlive it. The constructor and track() do not communicate.
/// Parameters, optimizers and values are equal on all ranks at a commit, which the ranks check by a
/// hash when a generation begins. Buffers may differ between ranks, as the statistics of BatchNorm
/// do: a rank that has the last commit goes back to its own, and others receive one rank's. The
/// state of an optimizer that is not SGD, Adam, AdamW, Adagrad or RMSprop is copied at each commit,
/// and not compared. Not thread-safe.
class TorchState : public State {
 public:
  explicit TorchState(TorchStateOptions options = {}) : options_(options) {}
  /// Tracks the model as "model" and the optimizer, which may be a wrapper, as "optimizer".
  template <class Model>
  TorchState(const Model& model, torch::optim::Optimizer& optimizer, TorchStateOptions options = {})
      : options_(options) {
    track("model", model);
    track("optimizer", optimizer);
  }

  /// @name Tracking Like State::track(), including its errors.
  /// @{

  /// The parameters and buffers that the module has now.
  TorchState& track(std::string_view name, const torch::nn::Module& module);
  template <class Impl>
  TorchState& track(std::string_view name, const torch::nn::ModuleHolder<Impl>& module) {
    return track(name, static_cast<const torch::nn::Module&>(*module));
  }
  template <std::derived_from<torch::nn::Module> M>
  TorchState& track(std::string_view name, const std::shared_ptr<M>& module) {
    return track(name, static_cast<const torch::nn::Module&>(*module));
  }
  /// State, and options of each group (learning rates).
  ///
  /// Another rank also keeps a copy of each rank's part of a ShardedOptimizer's state, which makes
  /// commit() collective: it copies the part, sends the copy, and returns when all ranks have
  /// theirs. @throws UsageError for the optimizer that a ShardedOptimizer wraps; for a
  /// ShardedOptimizer without Copy::kAtCommit, over a process set, and of an optimizer that is not
  /// SGD, Adam, AdamW, Adagrad or RMSprop
  TorchState& track(std::string_view name, torch::optim::Optimizer& optimizer);
  /// Both optimizers and the state of the object. Track its model too. Commit when its
  /// local_steps() is 0; another commit throws UsageError. Each rank goes back to its own inner
  /// state, and a rank that joins gets the state of one rank. @throws UsageError also without
  /// Copy::kAtCommit
  TorchState& track(std::string_view name, LocalSgd& local_sgd);
  /// A tensor of a fixed shape, copied at each commit.
  TorchState& track(std::string_view name, const torch::Tensor& tensor);
  TorchState& track(std::string_view name, torch::optim::LRScheduler& scheduler);
  TorchState& track(std::string_view name, torch::optim::ReduceLROnPlateauScheduler& scheduler);
  TorchState& track(std::string_view name, GradScaler& scaler);
  TorchState& track(std::string_view name, Sampler& sampler);
  /// All items of a checkpoint's state, by their names.
  TorchState& track(const TrainingState& state);
  /// Epoch, and the number of its samples that the program has used.
  template <class Dataset>
  TorchState& track(std::string_view name, DataLoader<Dataset>& loader) {
    TrainingState one;
    return add(one.loader(loader, std::string(name)));
  }
  /// Numbers, plain structs, strings and vectors as State::track(); other types as
  /// broadcast_object(), those with save() and load() for LibTorch's archives among them.
  template <libtorch::PlainObject T>
  TorchState& track(std::string_view name, T& value) {
    if constexpr (requires(State& state) { state.track(name, value); }) {
      State::track(name, value);
      return *this;
    } else {
      TrainingState one;
      return add(one.value(std::string(name), value));
    }
  }
  /// @}

  /// Reseeds LibTorch's default random streams at each commit from this seed, the rank and the
  /// number of commits, so that the random numbers of a step (dropout) depend only on these. A step
  /// that is repeated on the same number of ranks draws the same numbers. TrainingState::random()
  /// saves the number of commits, so that a job that loads a checkpoint draws the same numbers as
  /// the job that saved it would have drawn.
  TorchState& random(std::uint64_t seed);
  /// Commits a state that the function of run() has loaded from a checkpoint, and keeps its random
  /// streams. @throws as commit()
  void commit_loaded();

 private:
  static void require_synchronized(const LocalSgd& local_sgd);
  TorchState& add(const TrainingState& one);
  TorchState& add_tensors(const std::string& name, const NamedParameters& parameters,
                          const NamedParameters& buffers, const std::string& module);
  TorchState& add_sharded(std::string_view name, ShardedOptimizer& optimizer);
  TorchState& add_optimizer(std::string_view name, torch::optim::Optimizer& optimizer,
                            bool equal_on_ranks);
  TorchState& add_tensor(std::string name, const torch::Tensor& tensor, bool equal_on_ranks,
                         bool copied);

  const TorchStateOptions options_;
};

/// @}

}  // namespace hvd::elastic
