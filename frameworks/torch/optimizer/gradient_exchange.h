#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "optimizer/gradient_readiness.h"
#include "optimizer/gradient_units.h"
#include "optimizer/hooked_buckets.h"
#include "optimizer/parameter_check.h"
#include "optimizer/reduced_parameter.h"
#include "optimizer/used_flags.h"

namespace hvd::libtorch {

/// What is under way in a cycle: the operations that reduce units of gradients, and the numbers
/// that travel with the last of them (see UsedFlags and ParameterCheck).
///
/// On a GPU all of this is about what is queued: wait() makes the caller's current stream wait.
///
/// Not thread-safe.
class GradientExchange {
 public:
  GradientExchange(const GradientReduction& how, std::span<ReducedParameter> parameters,
                   GradientUnits& units, GradientReadiness& readiness, ParameterCheck& check);

  /// Submits a unit that is ready, from a hook. If the user's GradientHook reduces units, those
  /// that are the next in its order.
  void submit(std::size_t unit);
  /// Submits all that has not been, with zeros for what has no gradient, so that every rank submits
  /// the same set.
  void submit_rest();

  void wait() const;
  /// @pre wait()
  bool succeeded() const;
  /// @throws the error of an operation, or UsageError for a gradient that was written to or
  /// replaced meanwhile.
  /// @pre wait()
  void raise_if_error();
  /// Looks at what has travelled with the gradients. @throws DivergedError on every rank. @pre
  /// succeeded()
  void check_parameters();
  /// Some rank has a gradient of some parameter. @pre check_parameters()
  /// (checked by UsedFlags::used())
  bool any_used() const;
  /// Makes what has been reduced the parameters' gradients. @pre check_parameters()
  /// (checked by UsedFlags::used())
  void complete();
  /// Instead of complete(): waits for what only the user's GradientHook knows to be under way.
  /// @pre wait()
  void drop_results();
  /// Forgets what is under way. @pre wait()
  void end_cycle();

 private:
  bool over() const;
  void call_hook(bool for_all);
  void submit_units(std::span<const std::size_t> units, bool with_flags, Progress progress);
  void submit_bucket(GradientUnit& unit, Progress progress);
  void gather(GradientUnit& unit);
  void submit_one(const Submission& submission, Progress progress);
  void add_submissions(GradientUnit& unit, std::vector<Submission>& submissions);
  void follow_streams(GradientUnit& unit);
  const Submission& prepare_flags();

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  GradientUnits& units_;
  GradientReadiness& readiness_;
  ParameterCheck& check_;
  std::vector<Operation> operations_;
  HookedBuckets hooked_;
  UsedFlags flags_;
  bool flags_submitted_ = false;
  bool completed_ = false;  ///< what was reduced are the gradients now
};

}  // namespace hvd::libtorch
