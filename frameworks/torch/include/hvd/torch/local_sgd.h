#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/types.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace hvd {

namespace elastic {
class TorchState;
}

/// @addtogroup train
/// @{

/// Options of LocalSgd, the same on every rank.
struct LocalSgdOptions {
  /// Local steps between two synchronizations (H), at least 1.
  std::int64_t sync_every = 500;
  /// Casts the pseudo-gradients for their reduction.
  Compression compression = Compression::kNone;
  /// The ranks that train together.
  ProcessSet process_set = {};
};

/// Trains with local steps: each rank makes H steps of an inner optimizer by its own gradients,
/// then the ranks average their pseudo-gradients, and an outer optimizer makes one step by the
/// average. The pseudo-gradient of a parameter is its value at the last synchronization minus its
/// current value. The ranks therefore communicate once in H steps.
///
///     torch::optim::AdamW inner(model->parameters(), 4e-4);
///     torch::optim::SGD outer(model->parameters(),
///                             torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
///     hvd::broadcast_parameters(model);
///     hvd::LocalSgd local_sgd(inner, outer, {.sync_every = 500});
///     for (auto& batch : *loader) {
///       inner.zero_grad();
///       loss_of(batch).backward();
///       local_sgd.step();
///     }
///     local_sgd.synchronize();
///
/// This is DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
/// Models", arXiv:2311.08105, 2023). With an outer SGD of learning rate 1 and without momentum the
/// ranks average their parameters, which is local SGD (Stich, arXiv:1805.09767, 2018).
///
/// The inner optimizer's state, and buffers such as the statistics of BatchNorm, are not exchanged.
/// Parameters that need no gradient are not reduced. Refers to both optimizers, which must outlive
/// it. Learning-rate schedulers work on the optimizers. Copies the parameters, which takes as much
/// memory as they do. In an elastic job the object may be constructed before elastic::run(), and is
/// tracked by elastic::TorchState. Not thread-safe.
class LocalSgd {
 public:
  /// Local. Expects parameters that are equal on all ranks (broadcast_parameters()).
  /// @param inner makes the local steps; an optimizer, or a wrapper over a part of the ranks
  /// @param outer has the same parameters as `inner`, each once, in any order and groups
  /// @throws UsageError if sync_every is less than 1, if an optimizer has no parameters, if one has
  /// a parameter that the other has not, or twice, if a parameter is sparse, if `outer` is a
  /// wrapper or `inner` itself, and if this rank is not in the process set
  LocalSgd(torch::optim::Optimizer& inner, torch::optim::Optimizer& outer,
           LocalSgdOptions options = {});
  LocalSgd(const LocalSgd&) = delete;
  LocalSgd& operator=(const LocalSgd&) = delete;
  ~LocalSgd();

  /// Makes a step of the inner optimizer, with a closure if it needs one, and calls synchronize()
  /// after every `sync_every` steps. Collective only then, so all ranks make equally many steps.
  /// @return the closure's loss on this rank
  /// @throws as the optimizers and synchronize()
  torch::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr);
  /// Averages the pseudo-gradients and makes a step of the outer optimizer, after which parameters
  /// are equal on all ranks. No effect without local steps since the last synchronization. Keeps
  /// `.grad`. Collective.
  /// @throws MismatchError, StalledError, PeerLostError or ShutdownError, after which parameters
  /// are unchanged and the call can be repeated; as step() of the outer optimizer, after which
  /// parameters have the values of the last synchronization, except those that the outer optimizer
  /// has already changed
  void synchronize();
  /// Local steps since the last synchronization. At 0 parameters are equal on all ranks.
  std::int64_t local_steps() const noexcept { return local_steps_; }
  std::int64_t sync_every() const noexcept { return options_.sync_every; }

  /// Saves the number of local steps and, if it is not 0, the parameters of the last
  /// synchronization. Save the model and both optimizers besides. With local steps every rank saves
  /// its own.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Call it after the model was loaded. @throws Error if the archive has no such state, or
  /// parameters of other shapes; nothing is changed then
  void load(torch::serialize::InputArchive& archive);

 private:
  friend class elastic::TorchState;

  /// Records the current parameters as those of the last synchronization.
  void take_parameters();

  torch::optim::Optimizer& inner_;
  torch::optim::Optimizer& outer_;
  const LocalSgdOptions options_;
  std::vector<torch::Tensor> parameters_;    ///< in the order of `outer`
  std::vector<torch::Tensor> synchronized_;  ///< their values at the last synchronization
  std::string scope_;                        ///< of the names of operations
  std::int64_t local_steps_ = 0;
  std::shared_ptr<const void> generations_;
};

/// @}

}  // namespace hvd
