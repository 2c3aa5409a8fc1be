#pragma once

#include <c10/util/Synchronized.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/process_set.h"
#include "reducer/reduced_parameter.h"

namespace hvd {
class OptimizerWrapper;
}

namespace hvd::libtorch {

class GradientReducer;

/// The registry of the DistributedOptimizers and ShardedOptimizers of a process. Thread-safe.
class LiveOptimizers {
 public:
  LiveOptimizers();
  /// The registry of this process.
  static LiveOptimizers& instance();

  /// Registers a wrapped optimizer. @param averaging whether gradients are averaged, not summed
  /// @param who name of the wrapper, which begins messages
  /// @throws UsageError if the optimizer or one of its parameters is registered already; the
  /// registry does not change then.
  void add(const torch::optim::Optimizer& optimizer, std::span<const ReducedParameter> parameters,
           bool averaging, const std::string& who);
  /// Adds parameters to a registered optimizer, which may already have some of them. @throws
  /// UsageError if a parameter belongs to another optimizer; the registry does not change then.
  void extend(const torch::optim::Optimizer& optimizer,
              std::span<const ReducedParameter> parameters, const std::string& who);
  /// Sets the parameters of a registered optimizer to these.
  void shrink(const torch::optim::Optimizer& optimizer, std::span<const torch::Tensor> parameters);
  /// @param averaging as in add()
  void remove(const torch::optim::Optimizer& optimizer, bool averaging);
  /// Records that a ShardedOptimizer wraps this registered optimizer, which therefore has no state
  /// between steps.
  void set_sharded(const torch::optim::Optimizer& optimizer);
  bool is_sharded(const torch::optim::Optimizer& optimizer) const;
  /// Whether a registered optimizer has the parameter.
  bool trains(const torch::Tensor& parameter) const;
  using Reducer = c10::Synchronized<std::unique_ptr<GradientReducer>>;

  /// Records the wrapper of a registered optimizer, and the reducer that it uses now.
  void set_wrapper(const torch::optim::Optimizer& optimizer, OptimizerWrapper* wrapper,
                   const std::shared_ptr<Reducer>& reducer);
  /// The wrapper of an optimizer; null without one.
  OptimizerWrapper* wrapper_of(const torch::optim::Optimizer& optimizer) const;
  /// The reducer of an optimizer's gradients; null without one.
  std::shared_ptr<Reducer> reducer_of(const torch::optim::Optimizer& optimizer) const;
  /// Counts an update of parameters by a wrapper.
  void count_update() noexcept { ++updates_; }
  std::uint64_t updates() const noexcept { return updates_.load(); }
  /// Number of registered optimizers that average.
  int averaging() const;
  /// "opt0", "opt1", ...: a name for the next wrapper of a process set, the same on every rank of
  /// it. Wrappers are counted by the set's number and members, since set numbers are reused after
  /// shutdown() and init(). The counts restart in each generation of an elastic job.
  std::string next_scope(const ProcessSet& process_set);

 private:
  struct Registered {
    std::set<const torch::optim::Optimizer*> wrapped;
    std::set<const torch::optim::Optimizer*> sharded;
    struct Wrapper {
      OptimizerWrapper* wrapper = nullptr;
      std::weak_ptr<Reducer> reducer = {};
    };
    std::unordered_map<const torch::optim::Optimizer*, Wrapper> wrappers;
    /// The optimizer of each parameter.
    std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners;
    /// Number of wrappers, by the set's number and members.
    std::map<std::pair<int, std::vector<int>>, std::uint64_t> constructed;
    int averaging = 0;

    void own(const torch::optim::Optimizer& optimizer, std::span<const ReducedParameter> parameters,
             const std::string& who);
  };

  c10::Synchronized<Registered> registered_;
  std::atomic<std::uint64_t> updates_ = 0;
  std::shared_ptr<const void> generations_;  ///< resets the counts of next_scope()
};

/// Warns if backward passes continue after the wrapper of these parameters was destroyed. Their
/// gradients are then not reduced, and the wrapped optimizer would train a different model on each
/// rank. Does not keep a parameter alive. Thread-safe, as is forget_departed().
/// @param wrapper its name in messages
void watch_departed(std::span<const ReducedParameter> parameters, const std::string& wrapper);
/// Ends the watch, because another wrapper reduces these parameters.
void forget_departed(std::span<const ReducedParameter> parameters);

}  // namespace hvd::libtorch
