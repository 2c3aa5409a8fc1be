#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "optimizer/gradient_bucket.h"
#include "optimizer/rank_agreement.h"
#include "optimizer/reduced_parameter.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

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
