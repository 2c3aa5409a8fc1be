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
#include "reducer/gradient_reduction.h"
#include "reducer/gradient_units.h"
#include "reducer/parameter_check.h"
#include "reducer/reduced_parameter.h"

namespace hvd::libtorch {

/// Which parameters have a gradient on some rank: one number each, reduced along with the gradients
/// (same dtype and factors, so that it is fused with them). Behind them is room for numbers of
/// others, which are reduced too.
class UsedFlags {
 public:
  /// @param like a parameter of the set  @param used whether this rank has a gradient of the
  /// parameter with that number
  /// @param room how many numbers of others, which `fill` writes
  /// @return valid until the next prepare()
  const Submission& prepare(const GradientReduction& how, const torch::Tensor& like,
                            std::size_t count, const std::function<bool(std::size_t)>& used,
                            std::size_t room = 0,
                            const std::function<void(std::span<float>)>& fill = {});
  /// Once what prepare() returned is done.
  void read();
  /// Some rank has a gradient of it. @pre read()
  bool used(std::size_t parameter) const {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(read_);
    return values_.const_data_ptr<float>()[parameter] != 0.0F;
  }
  /// The others' numbers, reduced. @pre read()
  std::span<const float> room() const;

 private:
  std::size_t count_ = 0;
  torch::Tensor values_;  ///< float32
  torch::Tensor flags_;   ///< of the dtype in which they travel; may be values_
  Submission submission_;
  bool read_ = false;  ///< values_ are the reduced ones
};

/// Units of gradients that the user's GradientHook reduces instead of hvd. Not thread-safe.
class HookedBuckets {
 public:
  HookedBuckets(const GradientReduction& how, std::span<ReducedParameter> parameters)
      : how_(how), parameters_(parameters) {}

  /// Calls the hook, unless all of the unit is frozen. @param index of the unit
  /// @param readiness gradients that are not handed over are taken as they are now
  void start(std::size_t index, GradientUnit& unit, const GradientReadiness& readiness);
  /// Waits for all that was started, in that order, and makes the results the gradients. @throws
  /// what the hook's functions throw; UsageError for a result of another size
  void finish();
  /// Waits as well, and uses nothing.
  void drop();

 private:
  struct Started {
    BucketGradients bucket;
    std::vector<torch::Tensor> rows;  ///< the members' memory, if it is not that of bucket.values
    std::function<torch::Tensor()> finish;
  };

  std::exception_ptr finish_all(bool use);
  void take_over(const Started& started, const torch::Tensor& result) const;

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  std::vector<Started> started_;
};

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
