#pragma once

#include <torch/types.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/torch/gradient_hook.h"
#include "reducer/gradient_readiness.h"
#include "reducer/gradient_units.h"
#include "reducer/gradient_weights.h"
#include "reducer/parameter_check.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// Numbers that travel with the gradients, such as flags that mark the parameters with a gradient
/// on some rank. They have the dtype and factors of the gradients, so that they are fused with
/// them.
class UsedFlags {
 public:
  /// @param like a parameter of the optimizer  @param own this rank's flag with that number
  /// @return valid until the next prepare()
  const Submission& prepare(const GradientReduction& how, const torch::Tensor& like,
                            std::size_t count, const std::function<float(std::size_t)>& own);
  /// Bits of a number as it is sent.
  static int precision(const GradientReduction& how, const torch::Tensor& like);
  /// Reads the reduced flags, once the operation of prepare() is done.
  void read();
  /// Whether the flag is set on some rank. @pre read()
  bool used(std::size_t flag) const {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(read_);
    return value(flag) != 0.0F;
  }
  /// The reduced flag. @pre read()
  float value(std::size_t flag) const {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(read_);
    return values_.const_data_ptr<float>()[flag];
  }

 private:
  torch::Tensor values_;  ///< float32
  torch::Tensor flags_;   ///< of the dtype that is sent; may be values_
  Submission submission_;
  bool read_ = false;  ///< values_ are reduced
};

/// Lets the user's GradientHook reduce units of gradients instead of hvd. Not thread-safe.
class HookedBuckets {
 public:
  HookedBuckets(const GradientReduction& how, std::span<ReducedParameter> parameters)
      : how_(how), parameters_(parameters) {}

  /// Calls the hook, unless the whole unit is frozen. @param index of the unit
  /// @param readiness gradients that are not marked ready are used as they are now
  void start(std::size_t index, GradientUnit& unit, const GradientReadiness& readiness);
  /// Waits for all units for which the hook was called, in that order, and makes the results the
  /// gradients.
  /// @throws the errors of the hook's functions; UsageError for a result of another size
  void finish();
  /// Waits for all units, and drops the results.
  void drop();

 private:
  struct HookCall {
    BucketGradients bucket;
    std::vector<torch::Tensor> rows;  ///< the members' gradients, unless they are in a bucket
    std::function<torch::Tensor()> finish;
  };

  std::exception_ptr finish_all(bool use);
  void use_result(const HookCall& call, const torch::Tensor& result) const;

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  std::vector<HookCall> calls_;
};

/// Gives gradients that overlap memory of their own, so that complete() can give them different
/// results: another rank may have used only some of these parameters. Autograd makes such
/// gradients; see ReducedParameter::detect_sharing().
/// @param sharing parameters whose gradients share memory
void separate_overlapping(std::vector<ReducedParameter*> sharing);

/// The operations of a cycle, which reduce units of gradients, and the flags that are sent with the
/// last unit (see UsedFlags). On a GPU wait() makes the caller's current stream wait.
///
/// Not thread-safe.
class GradientExchange {
 public:
  GradientExchange(const GradientReduction& how, std::span<ReducedParameter> parameters,
                   GradientUnits& units, GradientReadiness& readiness, ParameterCheck& check,
                   GradientWeights& weights);

  /// Submits a unit that is ready. Called by autograd's hooks. With a user's GradientHook, submits
  /// the ready units that are next in the order of units.
  void submit(std::size_t unit);
  /// Fixes this rank's weight for the cycle; see GradientWeights::close().
  void close_weights();
  /// Reduces the flags before any gradient, to find the reference of the weights, and waits. Other
  /// ranks may submit their flags last.
  void reduce_flags_first();
  /// Submits the remaining units, with zeros for parameters without a gradient, so that every rank
  /// submits the same set.
  void submit_rest();

  /// Waits as hvd::wait_with_check().
  void wait_with_check() const;
  void wait() const;
  /// In an elastic job, call it after wait(): waits on the host for results on a GPU, so that no
  /// step uses results of operations that the loss of a rank has cut off. @throws the cause of
  /// failure
  void wait_on_host() const;
  /// @pre wait()
  bool succeeded() const;
  /// @throws the error of an operation, the same on every rank. @pre wait()
  void raise_if_error() const;
  /// @throws UsageError for a gradient that the program has written to or replaced on this rank
  /// while it was reduced. @pre wait()
  void raise_if_written();
  /// Finds out whether the flags could not be reduced because only some ranks have a weight.
  /// Collective over the set if the flags could not be reduced. @throws MismatchError on every rank
  /// that names two of them. @pre wait()
  void explain_mismatch() const;
  /// Reads the flags, and compares the parameters of the ranks if a rank requests it. Collective.
  /// @throws DivergedError on every rank. @pre succeeded()
  void check_parameters();
  /// Whether some rank has a gradient of some parameter. @pre check_parameters()
  /// (checked by UsedFlags::used())
  bool any_used() const;
  /// Makes the results the parameters' gradients. @pre check_parameters()
  /// (checked by UsedFlags::used())
  void complete();
  /// Instead of complete(): drops the results. Waits for the operations of a GradientHook.
  /// @pre wait()
  void drop_results();
  /// Forgets the operations. @pre wait()
  void end_cycle();

 private:
  bool check_flag(std::size_t number) const;
  float own_flag(std::size_t number) const;
  void read_flags();
  void scale_results(double factor);
  void separate_gradients();
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
  GradientWeights& weights_;
  std::vector<Operation> operations_;
  HookedBuckets hooked_;
  UsedFlags flags_;
  bool flags_submitted_ = false;
  std::size_t flags_operation_ = 0;  ///< index in operations_, once they are submitted
  bool completed_ = false;           ///< the results are the gradients now
};

}  // namespace hvd::libtorch
