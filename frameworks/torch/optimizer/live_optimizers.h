#pragma once

#include <c10/util/Synchronized.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/process_set.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// What the DistributedOptimizers and ShardedOptimizers of a process must know of each other.
/// Thread-safe.
class LiveOptimizers {
 public:
  /// Of this process.
  static LiveOptimizers& instance();

  /// @param averaging whether gradients are averaged, not summed  @param who begins messages
  /// @throws UsageError when the optimizer or one of its parameters is here already; nothing is
  /// changed then.
  void add(const torch::optim::Optimizer& optimizer, std::span<const ReducedParameter> parameters,
           bool averaging, const std::string& who);
  /// One that is here gets more parameters; those that it has do not matter. @throws UsageError
  /// when one belongs to another; nothing is changed then.
  void extend(const torch::optim::Optimizer& optimizer,
              std::span<const ReducedParameter> parameters, const std::string& who);
  /// Its parameters are these and no more.
  void shrink(const torch::optim::Optimizer& optimizer, std::span<const torch::Tensor> parameters);
  /// With the same `averaging`.
  void remove(const torch::optim::Optimizer& optimizer, bool averaging);
  /// A wrapper shares the optimizer's state out: the optimizer itself has none between steps. Until
  /// remove(). It is here already.
  void set_sharded(const torch::optim::Optimizer& optimizer);
  bool is_sharded(const torch::optim::Optimizer& optimizer) const;
  /// How many average.
  int averaging() const;
  /// "opt0", "opt1", ...: the n-th DistributedOptimizer of a process set, on every rank of it.
  /// After shutdown() and init() numbers are used again, for sets of other members, which have
  /// constructed other numbers of them.
  std::string next_scope(const ProcessSet& process_set);

 private:
  struct State {
    std::set<const torch::optim::Optimizer*> wrapped;
    std::set<const torch::optim::Optimizer*> sharded;
    /// Of parameters.
    std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners;
    /// By the set's number and members.
    std::map<std::pair<int, std::vector<int>>, std::uint64_t> constructed;
    int averaging = 0;

    void own(const torch::optim::Optimizer& optimizer, std::span<const ReducedParameter> parameters,
             const std::string& who);
  };

  c10::Synchronized<State> state_;
};

/// Warns when backward passes go on after the wrapper of a parameter's optimizer was destroyed,
/// which reduces the gradients no more: the wrapped optimizer would train another model on each
/// rank. Keeps no parameter alive. Thread-safe.

/// @param parameters that the wrapper has reduced  @param wrapper how messages name it
void watch_departed(std::span<const ReducedParameter> parameters, const std::string& wrapper);
/// Another wrapper reduces these parameters.
void forget_departed(std::span<const ReducedParameter> parameters);

}  // namespace hvd::libtorch
