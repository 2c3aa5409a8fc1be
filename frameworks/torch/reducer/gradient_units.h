#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "reducer/gradient_reduction.h"
#include "reducer/rank_agreement.h"
#include "reducer/reduced_parameter.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

/// Gradients of several parameters, reduced as one tensor. Not thread-safe.
///
/// On the CPU they lie one behind the other in memory that the ranks of a host share, and are views
/// of it. That memory lives as long as the bucket or any view of it. On a GPU each stays where
/// autograd has put it, and one launch packs all of them when they are reduced; see decision 23.
class GradientBucket {
 public:
  /// @param parameters dense, of one dtype and device
  GradientBucket(std::string name, const GradientReduction& how,
                 std::span<const torch::Tensor> parameters);

  /// CPU: a tensor of the parameter's shape, and of its strides if those leave no gaps. It is no
  /// view in the sense of autograd, so that the optimizer may detach it in place.
  const torch::Tensor& view(std::size_t parameter) const { return views_[parameter]; }

  /// GPU: gradients stay where they are.
  bool gathers() const noexcept { return gathered_ != nullptr; }
  /// Before it is submitted: where each parameter's gradient is, in the order of the parameters.
  /// Undefined: it has none, nor needs one. @param gradient as ReducedParameter::gather() says
  void add(const torch::Tensor& gradient);
  /// What was added is forgotten. @param done whoever may get the gradients' memory next comes
  /// after the reduction; otherwise they are kept until the device is done with them
  void let_go(bool done);

  /// In elements, with what lies between the gradients.
  std::int64_t elements() const noexcept { return elements_; }
  /// Of each parameter, the position of its first element.
  std::span<const std::int64_t> first() const noexcept { return first_; }
  /// CPU: all of its memory, as one row of elements. Undefined on a GPU.
  const torch::Tensor& flat() const noexcept { return flat_; }

  /// The same at each call, but for what the caller sets: on a GPU where it begins.
  Submission& submission() noexcept { return submission_; }

 private:
  void lay_out(std::span<const torch::Tensor> parameters, std::size_t bytes);
  void begin_gathering();

  /// What an operation under way uses.
  struct Gathered {
    std::vector<TensorPart> parts;
    std::vector<torch::Tensor> gradients;
  };

  Submission submission_;
  std::vector<torch::Tensor> views_;
  std::vector<std::int64_t> first_;
  std::int64_t elements_ = 0;
  std::int64_t first_own_row_ = 0;  ///< of the rows that this rank gets, if it gets some only
  torch::Tensor flat_;
  std::shared_ptr<Gathered> gathered_;
};

/// Gradients that are submitted together: one alone, those of a group that the user asked for, or
/// those of a bucket.
struct GradientUnit {
  std::string group;  ///< its name on every rank; empty for a parameter alone or a bucket
  std::vector<std::size_t> members;
  std::shared_ptr<GradientBucket> bucket = {};
  StreamChain stream = {};  ///< GPU: gradients may come from several streams
};

/// The units of one optimizer. At first gradients travel as the user has grouped them. Once the
/// ranks have agreed on an order, all that can be are in buckets, until the parameters have
/// changed; then learning begins again. Not thread-safe.
class GradientUnits {
 public:
  GradientUnits(const GradientReduction& how, std::span<ReducedParameter> parameters,
                const RankAgreement& agreement);

  GradientUnit& operator[](std::size_t unit) { return units_[unit]; }
  const std::vector<GradientUnit>& all() const noexcept { return units_; }
  /// Another number when units are others.
  std::uint64_t version() const noexcept { return version_; }
  /// Of each unit.
  std::vector<std::vector<std::size_t>> members() const;

  /// No order has been learnt.
  bool learning() const noexcept { return state_ == State::kLearning; }
  /// Puts gradients into buckets if all ranks can. Collective. @pre learning(), and gradients have
  /// just been reduced  @param order of arrival  @return whether units are others now
  bool learn(std::vector<std::size_t> order);
  /// Gives buckets up that do not fit the parameters any more. @return whether units are others now
  bool follow_parameters();
  void end_cycle();

 private:
  enum class State { kLearning, kBuckets, kRefused };
  /// What a parameter was like when its gradient was given its place in a bucket.
  struct Place {
    torch::ScalarType type;
    torch::Device device;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
  };

  void add_units_without_bucket();
  bool wants_bucket(const ReducedParameter& parameter) const;
  bool fits_bucket(const ReducedParameter& parameter) const;
  bool buckets_fit() const;
  std::shared_ptr<GradientBucket> make_bucket(const std::vector<std::size_t>& members,
                                              std::size_t number) const;
  bool use_buckets(const std::vector<std::size_t>& order);
  std::vector<std::vector<std::size_t>> plan(const std::vector<std::size_t>& order) const;
  void move_into_buckets();

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  const RankAgreement& agreement_;
  std::vector<GradientUnit> units_;
  std::vector<std::optional<Place>> places_;  ///< by parameter; nothing: it is in no bucket
  State state_ = State::kLearning;
  std::uint64_t version_ = 0;
};

}  // namespace hvd::libtorch
