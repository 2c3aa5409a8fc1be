#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/gradient_reduction.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// What the ranks find out about each other's parameters and gradients before they rely on it.
/// Every question is collective over the process set; whether it is asked depends only on what the
/// ranks have agreed on. Not thread-safe.
///
/// A rank that has joined (see join()) does not answer and would not hear what the others find out,
/// so that they ask again in the next cycle.
class RankAgreement {
 public:
  RankAgreement(const GradientReduction& how, std::span<ReducedParameter> parameters)
      : how_(how), parameters_(parameters) {}

  /// All ranks are known to have the same active parameters.
  bool same_parameters() const noexcept { return same_parameters_; }
  /// Whether all ranks have the same active parameters, in the same order, and the same options.
  /// @throws MismatchError with the first difference.
  void compare_parameters();

  /// The gradient is sparse, and the others may have a dense one.
  bool waits_for_layout(const ReducedParameter& parameter) const;
  bool layouts_in_doubt() const;
  /// Settles the layouts of gradients: one that is dense anywhere is dense everywhere, as it may
  /// have been submitted.
  void agree_on_layouts();
  /// Forgets what was agreed on for this cycle only.
  void end_cycle();

  /// The order of the set's first rank; empty when a rank has joined. nullopt: there must be no
  /// buckets, as the ranks' parameters do not lie in memory alike, or gradients are born in shared
  /// memory on any rank and so need no copies.
  std::optional<std::vector<std::size_t>> agree_on_order(const std::vector<std::size_t>& own) const;
  /// Whether it holds on every rank. @param name of the operation, without the scope
  bool on_all_ranks(bool own, const std::string& name) const;

 private:
  [[noreturn]] void throw_first_difference() const;
  /// Of all ranks. @throws StalledError that says what they have to do, and as every collective
  torch::Tensor reduced(const torch::Tensor& own, const std::string& name, ReduceOp op) const;

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  bool same_parameters_ = false;
  std::vector<std::size_t> provisional_layouts_;  ///< agreed on for this cycle only
};

/// Finds out which rank has an inf or a nan in a gradient before the gradients of all ranks are
/// reduced, after which all ranks have it. Reads every gradient, and sends a number for each rank
/// and cycle: for DistributedOptimizerOptions::error_if_nonfinite only. Not thread-safe.
class FiniteCheck {
 public:
  explicit FiniteCheck(const GradientReduction& how) : how_(how) {}

  /// This rank's own gradient, before anything is sent of it. Undefined ones are finite.
  void look_at(std::size_t parameter, const torch::Tensor& gradient);
  /// Collective over the set. @return which ranks have found what since end_cycle(), the same on
  /// every rank; empty when all gradients were finite
  std::string difference(std::span<const ReducedParameter> parameters) const;
  void end_cycle() { found_.reset(); }

 private:
  struct Found {
    std::size_t parameter;
    bool nan;
  };

  const GradientReduction& how_;
  std::optional<Found> found_;  ///< the first of this cycle
};

}  // namespace hvd::libtorch
