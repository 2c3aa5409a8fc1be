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
#include "reducer/rank_agreement.h"
#include "reducer/reduced_parameter.h"
#include "tensors/allocators.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

/// Gradients of several parameters, reduced as one tensor. Not thread-safe.
///
/// On the CPU the gradients are adjacent views of memory that the ranks of a host share. The memory
/// lives as long as the bucket or any view of it. On a GPU the gradients stay where autograd has
/// put them, and one launch packs them all for the reduction; see decision 23.
class GradientBucket {
 public:
  /// @param parameters dense, of one dtype and device
  GradientBucket(std::string name, const GradientReduction& how,
                 std::span<const torch::Tensor> parameters);

  /// CPU: a tensor of the parameter's shape, and of its strides if those leave no gaps. It is not a
  /// view in the sense of autograd, so that the optimizer may detach it in place.
  const torch::Tensor& view(std::size_t parameter) const { return views_[parameter]; }

  /// Whether gradients stay where they are (GPU).
  bool gathers() const noexcept { return packed_ != nullptr; }
  /// Adds the gradient of the next parameter, before the bucket is submitted. @param gradient from
  /// ReducedParameter::gather(); undefined for a frozen parameter
  void add(const torch::Tensor& gradient);
  /// Forgets the gradients. @param done whether later users of their memory run after the
  /// reduction; if not, the gradients are kept until the device is done with them
  void release_gradients(bool done);

  /// Size in elements, including the gaps between gradients.
  std::int64_t elements() const noexcept { return elements_; }
  /// Position of each parameter's first element.
  std::span<const std::int64_t> first() const noexcept { return first_; }
  /// CPU: the whole memory, as one row of elements. Undefined on a GPU.
  const torch::Tensor& flat() const noexcept { return flat_; }

  /// CPU: the part of flat() that this rank's reduction writes.
  torch::Tensor own_rows() const;

  /// The submission that reduces the bucket; each call returns the same object.
  Submission& submission() noexcept { return submission_; }

 private:
  void lay_out(std::span<const torch::Tensor> parameters, std::size_t bytes);
  void begin_gathering();

  /// Memory that an operation under way uses.
  struct PackedGradients {
    std::vector<TensorPart> parts;
    std::vector<torch::Tensor> gradients;
  };

  Submission submission_;
  std::vector<torch::Tensor> views_;
  std::vector<std::int64_t> first_;
  std::int64_t elements_ = 0;
  std::int64_t first_own_row_ = 0;  ///< first of this rank's rows, if the bucket is scattered
  torch::Tensor flat_;
  std::shared_ptr<PackedGradients> packed_;
};

/// Gradients that are submitted together: a single one, a group of the user's, or a bucket.
struct GradientUnit {
  std::string group;  ///< name of the group on every rank; empty for a single gradient or a bucket
  std::vector<std::size_t> members;
  std::shared_ptr<GradientBucket> bucket = {};
  StreamChain stream = {};  ///< GPU: gradients may come from several streams
};

/// The units of one optimizer. At first gradients are sent as the user has grouped them. Once the
/// ranks have agreed on an order, all gradients that fit are in buckets, except large ones that are
/// made in shared memory on all ranks. When other parameters are trained, or a parameter has
/// changed, the buckets are set aside and the ranks make new ones. A few sets of buckets are kept,
/// so that a program that freezes layers in every other step makes new buckets only twice. Not
/// thread-safe.
class GradientUnits {
 public:
  GradientUnits(const GradientReduction& how, std::span<ReducedParameter> parameters,
                const RankAgreement& agreement);

  GradientUnit& operator[](std::size_t unit) { return plan_.units[unit]; }
  const std::vector<GradientUnit>& all() const noexcept { return plan_.units; }
  /// A number that changes whenever the units change.
  std::uint64_t version() const noexcept { return plan_.version; }
  /// The members of each unit.
  std::vector<std::vector<std::size_t>> members() const;

  /// Whether the ranks have yet to agree on buckets for these parameters.
  bool learning() const noexcept { return learning_; }
  /// Puts gradients into buckets if all ranks can. Collective. @pre learning(), and gradients have
  /// just been reduced  @param order of arrival  @return whether the units have changed
  bool learn(std::vector<std::size_t> order);
  /// Sets aside buckets that no longer fit the parameters, and uses earlier buckets that fit, if
  /// there are any. @return whether the units have changed
  bool follow_parameters();
  /// How often the ranks have agreed on buckets.
  std::uint64_t learnings() const noexcept { return learnings_; }
  void end_cycle();

 private:
  /// Properties of a parameter when its gradient got its place in a bucket.
  struct ParameterForm {
    torch::ScalarType type;
    torch::Device device;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
  };
  /// Buckets that the ranks have learnt, if any, and the units without a bucket.
  struct Plan {
    std::vector<GradientUnit> units = {};
    /// By parameter; empty: it is in no bucket.
    std::vector<std::optional<ParameterForm>> forms = {};
    std::uint64_t number = 0;   ///< the count of learnings
    std::uint64_t version = 0;  ///< see version()
  };

  void add_units_without_bucket();
  void share_gradients();
  bool can_share(const ReducedParameter& parameter) const;
  bool wants_bucket(const ReducedParameter& parameter, bool several_ranks) const;
  bool fits_bucket(const ReducedParameter& parameter, bool several_ranks) const;
  static bool has_form(const torch::Tensor& tensor, const ParameterForm& form);
  bool fits(const Plan& plan) const;
  bool is_outdated(const Plan& plan) const;
  bool use_fitting_plan();
  std::shared_ptr<GradientBucket> make_bucket(const std::vector<std::size_t>& members,
                                              std::size_t number) const;
  bool use_buckets(const std::vector<std::size_t>& order);
  std::vector<std::vector<std::size_t>> plan(const std::vector<std::size_t>& order) const;
  void move_into_buckets();

  const GradientReduction& how_;
  const std::span<ReducedParameter> parameters_;
  const RankAgreement& agreement_;
  Plan plan_;
  SharedGradients shared_;
  bool in_place_ = false;  ///< large gradients are in shared memory on all ranks, and in no bucket
  bool learning_ = true;
  bool refused_ = false;  ///< a rank cannot have buckets
  std::uint64_t last_version_ = 0;
  std::uint64_t learnings_ = 0;
  std::vector<Plan> aside_;  ///< plans that are not in use
};

}  // namespace hvd::libtorch
