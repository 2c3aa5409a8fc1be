#pragma once

#include <torch/types.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>

#include "hvd/error.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// The error of a backward pass that reaches a parameter too often.
UsageError too_many_passes(const std::string& wrapper, const std::string& name, int expected);
/// The error of backward(create_graph = true).
UsageError graph_would_be_lost(const std::string& wrapper, const std::string& name);

/// Counts the backward passes of an optimizer whose process set has one rank. Its gradients are
/// final as backward leaves them, so its hook only counts, without a lock.
///
/// Thread-safe, but end_cycle() must not run beside a backward pass.
class SingleRankPasses {
 public:
  /// Whether the reduction by one rank leaves dense gradients as they are.
  static bool suffice(const GradientReduction& how);

  SingleRankPasses(const char* wrapper, std::span<const ReducedParameter> parameters,
                   std::shared_ptr<std::atomic<int>> no_sync_depth, int passes_per_step);

  /// The hook before autograd adds to `.grad`. @throws UsageError for more passes than expected,
  /// and with create_graph
  void begin_pass(std::size_t parameter);
  void set_passes_per_step(int passes) noexcept { passes_per_step_.store(passes); }
  /// Whether a pass has run since the last cycle, even under no_sync().
  bool reached() const noexcept { return reached_.load(std::memory_order_relaxed); }
  /// Whether a parameter has had all its passes in this cycle.
  bool complete() const noexcept { return complete_.load(std::memory_order_relaxed); }
  void end_cycle() noexcept;

 private:
  struct Counted {
    std::string name;
    torch::Tensor parameter;
    std::atomic<int> passes = 0;
  };

  const std::string wrapper_;
  const std::shared_ptr<std::atomic<int>> no_sync_depth_;
  std::atomic<int> passes_per_step_;
  std::atomic<bool> reached_ = false;
  std::atomic<bool> complete_ = false;
  std::deque<Counted> parameters_;
};

}  // namespace hvd::libtorch
