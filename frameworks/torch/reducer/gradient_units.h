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
/// On the CPU the gradients are views of memory that the ranks of a host share, one after the
/// other. The memory lives as long as the bucket or any view of it. On a GPU the gradients stay
/// where autograd has put them, and one launch packs them all for the reduction; see decision 23.
class GradientBucket {
 public:
  /// @param parameters dense, of one dtype and device
  GradientBucket(std::string name, const GradientReduction& how,
                 std::span<const torch::Tensor> parameters);

  /// CPU: a tensor of the parameter's shape, and of its strides if those leave no gaps. It is not a
  /// view in the sense of autograd, so that the optimizer may detach it in place.
  const torch::Tensor& view(std::size_t parameter) const { return views_[parameter]; }

  /// Whether gradients stay where they are (GPU).
  bool gathers() const noexcept { return gathered_ != nullptr; }
  /// Adds the gradient of the next parameter, before the bucket is submitted. @param gradient from
  /// ReducedParameter::gather(); undefined for a frozen parameter
  void add(const torch::Tensor& gradient);
  /// Forgets the gradients. @param done later users of their memory run after the reduction;
  /// otherwise the gradients are kept until the device is done with them
  void release_gradients(bool done);

  /// Size in elements, including the gaps between gradients.
  std::int64_t elements() const noexcept { return elements_; }
  /// Position of each parameter's first element.
  std::span<const std::int64_t> first() const noexcept { return first_; }
  /// CPU: the whole memory, as one row of elements. Undefined on a GPU.
  const torch::Tensor& flat() const noexcept { return flat_; }

  /// The same at each call, apart from the fields that the caller sets.
  Submission& submission() noexcept { return submission_; }

 private:
  void lay_out(std::span<const torch::Tensor> parameters, std::size_t bytes);
  void begin_gathering();

  /// Memory that an operation under way uses.
  struct Gathered {
    std::vector<TensorPart> parts;
    std::vector<torch::Tensor> gradients;
  };

  Submission submission_;
  std::vector<torch::Tensor> views_;
  std::vector<std::int64_t> first_;
  std::int64_t elements_ = 0;
  std::int64_t first_own_row_ = 0;  ///< first of this rank's rows, if the bucket is scattered
  torch::Tensor flat_;
  std::shared_ptr<Gathered> gathered_;
};

/// Gradients that are submitted together: a single one, a group of the user's, or a bucket.
struct GradientUnit {
  std::string group;  ///< name of the group on every rank; empty for a single gradient or a bucket
  std::vector<std::size_t> members;
  std::shared_ptr<GradientBucket> bucket = {};
  StreamChain stream = {};  ///< GPU: gradients may come from several streams
};

/// The units of one optimizer. At first gradients travel as the user has grouped them. Once the
/// ranks have agreed on an order, all gradients that fit are in buckets. When other parameters are
/// trained, or a parameter has changed, the buckets are set aside and the ranks learn others. A few
/// sets of buckets are kept, so that a program that freezes layers in every other step learns
/// twice. Not thread-safe.
class GradientUnits {
 public:
  GradientUnits(const GradientReduction& how, std::span<ReducedParameter> parameters,
                const RankAgreement& agreement);

  GradientUnit& operator[](std::size_t unit) { return units_[unit]; }
  const std::vector<GradientUnit>& all() const noexcept { return units_; }
  /// Identifies the units: another number for other units.
  std::uint64_t version() const noexcept { return version_; }
  /// The members of each unit.
  std::vector<std::vector<std::size_t>> members() const;

  /// Whether the ranks have not agreed on buckets for these parameters.
  bool learning() const noexcept { return state_ == State::kLearning; }
  /// Puts gradients into buckets if all ranks can. Collective. @pre learning(), and gradients have
  /// just been reduced  @param order of arrival  @return whether the units have changed
  bool learn(std::vector<std::size_t> order);
  /// Sets buckets aside that do not fit the parameters any more, and takes buckets that do, if
  /// there are any. @return whether the units have changed
  bool follow_parameters();
  /// How often the ranks have agreed on buckets.
  std::uint64_t learnings() const noexcept { return learnings_; }
  void end_cycle();

 private:
  enum class State { kLearning, kBuckets, kRefused };
  /// Properties of a parameter when its gradient got its place in a bucket.
  struct Place {
    torch::ScalarType type;
    torch::Device device;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
  };
  /// By parameter; empty: it is in no bucket.
  using Places = std::vector<std::optional<Place>>;
  /// Buckets that the ranks have learnt, and the units beside them.
  struct Plan {
    std::vector<GradientUnit> units;
    Places places;
    std::uint64_t number;   ///< the count of learnings
    std::uint64_t version;  ///< see version()
  };

  void add_units_without_bucket();
  bool wants_bucket(const ReducedParameter& parameter) const;
  bool fits_bucket(const ReducedParameter& parameter) const;
  static bool is_as_placed(const torch::Tensor& tensor, const Place& place);
  bool fits(const Places& places) const;
  bool is_outdated(const Plan& plan) const;
  void set_plan_aside();
  bool take_fitting_plan();
  std::shared_ptr<GradientBucket> make_bucket(const std::vector<std::size_t>& members,
                                              std::size_t number) const;
  bool use_buckets(const std::vector<std::size_t>& order);
  std::vector<std::vector<std::size_t>> plan(const std::vector<std::size_t>& order) const;
  void move_into_buckets();

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  const RankAgreement& agreement_;
  std::vector<GradientUnit> units_;
  Places places_;
  State state_ = State::kLearning;
  std::uint64_t version_ = 0;
  std::uint64_t last_version_ = 0;
  std::uint64_t number_ = 0;  ///< of the plan in use
  std::uint64_t learnings_ = 0;
  std::vector<Plan> aside_;  ///< plans that are not in use
};

}  // namespace hvd::libtorch
