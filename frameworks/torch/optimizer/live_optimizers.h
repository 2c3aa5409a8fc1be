#pragma once

#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/process_set.h"
#include "optimizer/gradient_reducer.h"

namespace hvd::libtorch {

/// What the DistributedOptimizers of a process must know of each other. Thread-safe.
class LiveOptimizers {
 public:
  /// Of this process.
  static LiveOptimizers& instance();

  /// @param averaging whether gradients are averaged, not summed
  /// @throws UsageError when the optimizer or one of its parameters is here already; nothing is
  /// changed then.
  void add(const torch::optim::Optimizer& optimizer,
           std::span<const GradientReducer::Parameter> parameters, bool averaging);
  /// With the same `averaging`.
  void remove(const torch::optim::Optimizer& optimizer, bool averaging);
  /// How many average.
  int averaging() const;
  /// "opt0", "opt1", ...: the n-th DistributedOptimizer of a process set, on every rank of it.
  /// After shutdown() and init() numbers are used again, for sets of other members, which have
  /// constructed other numbers of them.
  std::string next_scope(const ProcessSet& process_set);

 private:
  using MembersOfSet = std::pair<int, std::vector<int>>;  // by the set's number

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::set<const torch::optim::Optimizer*> wrapped_;
  /// Of parameters.
  std::unordered_map<const c10::TensorImpl*, const torch::optim::Optimizer*> owners_;
  std::map<MembersOfSet, std::uint64_t> constructed_;
  int averaging_ = 0;
};

}  // namespace hvd::libtorch
