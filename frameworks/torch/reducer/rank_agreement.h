#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// The ranks agree on this before they make buckets.
struct AgreedOrder {
  /// The order in which gradients arrive on the set's first rank; empty if a rank has joined.
  std::vector<std::size_t> order = {};
  /// Whether every rank's large gradients are made in shared memory.
  bool gradients_shared = false;
};

/// Agreements of the ranks about their parameters and gradients. Every agreement is collective over
/// the process set, and whether it begins depends only on facts that the ranks have already agreed
/// on. Not thread-safe.
///
/// A rank that has joined (see join()) takes no part and does not receive the result, so the others
/// repeat the agreement in the next cycle.
class RankAgreement {
 public:
  RankAgreement(const GradientReduction& how, std::span<ReducedParameter> parameters)
      : how_(how), parameters_(parameters) {}

  /// Whether all ranks are known to have the same active parameters.
  bool same_parameters() const noexcept { return same_parameters_; }
  /// Compares the active parameters of all ranks, in their order, and the options.
  /// @throws MismatchError with the first difference.
  void compare_parameters();

  /// Whether the gradient is sparse, while other ranks may have a dense one.
  bool waits_for_layout(const ReducedParameter& parameter) const;
  bool layouts_in_doubt() const;
  /// Agrees on the layouts of gradients: a gradient that is dense on one rank becomes dense on all,
  /// since it may already have been submitted.
  void agree_on_layouts();
  /// Forgets agreements for this cycle only.
  void end_cycle();

  /// @param shares_gradients whether this rank's large gradients are made in shared memory
  /// @return nullopt if buckets must not be used, because the strides of parameters differ between
  /// ranks
  std::optional<AgreedOrder> agree_on_order(const std::vector<std::size_t>& own,
                                            bool shares_gradients) const;
  /// Whether `own` is true on every rank. @param name of the operation, without the scope
  bool on_all_ranks(bool own, const std::string& name) const;

 private:
  [[noreturn]] void throw_first_difference() const;
  /// Reduces over all ranks. @throws StalledError with advice; the errors of every collective
  torch::Tensor reduced(const torch::Tensor& own, const std::string& name, ReduceOp op) const;

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  bool same_parameters_ = false;
  std::vector<std::size_t> provisional_layouts_;  ///< parameters with a layout for this cycle only
};

/// Finds out which rank has inf or nan in a gradient, before the reduction spreads it to all ranks.
/// Reads every gradient, and sends a number for each rank and cycle. For
/// DistributedOptimizerOptions::error_if_nonfinite. Not thread-safe.
class FiniteCheck {
 public:
  explicit FiniteCheck(const GradientReduction& how) : how_(how) {}

  /// Inspects this rank's own gradient before it is reduced. Undefined gradients are finite.
  void inspect(std::size_t parameter, const torch::Tensor& gradient);
  /// Collective over the set. @return the ranks that have found inf or nan since end_cycle(), and
  /// the parameters, the same text on every rank; empty if all gradients were finite
  std::string difference(std::span<const ReducedParameter> parameters) const;
  void end_cycle() { found_ = 0; }

 private:
  const GradientReduction& how_;
  /// The first parameter of this cycle with inf or nan, as 2 * its number + (1: inf, 2: nan). 0:
  /// none.
  std::int64_t found_ = 0;
};

}  // namespace hvd::libtorch
