#include "optimizer/gradient_units.h"

#include <malloc.h>

#include <algorithm>
#include <map>
#include <new>
#include <utility>

#include "optimizer/bucket_plan.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

/// malloc keeps what lies below memory that is in use.
void return_free_memory() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace

GradientUnits::GradientUnits(const GradientReduction& how, std::span<ReducedParameter> parameters,
                             const RankAgreement& agreement)
    : how_(how), parameters_(parameters), agreement_(agreement) {
  add_units_without_bucket();
}

/// As the user has grouped the parameters.
void GradientUnits::add_units_without_bucket() {
  std::map<int, std::size_t> unit_of_group;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].transfer.view().defined()) continue;
    const int group = parameters_[i].group;
    const auto [known, added] = unit_of_group.try_emplace(group, units_.size());
    if (group >= 0 && !added) {
      units_[known->second].members.push_back(i);
      continue;
    }
    units_.push_back(
        {.group = group < 0 ? "" : how_.scope + ".group" + std::to_string(group), .members = {i}});
  }
}

std::vector<std::vector<std::size_t>> GradientUnits::members() const {
  std::vector<std::vector<std::size_t>> members;
  for (const GradientUnit& unit : units_) members.push_back(unit.members);
  return members;
}

bool GradientUnits::wants_buckets() const {
  // Adasum looks at each tensor.
  return how_.bucket_views && how_.process_set.size() > 1 && how_.op != ReduceOp::kAdasum;
}

bool GradientUnits::expect_buckets() const {
  return wants_buckets() &&
         std::any_of(parameters_.begin(), parameters_.end(),
                     [this](const auto& parameter) { return might_fit_bucket(parameter); });
}

/// Groups and sparse gradients travel in their own way, and copies that LibTorch casts cannot be
/// views. Only what all ranks of the set agree on decides: the types of active parameters, whose
/// gradients have just been reduced, are.
bool GradientUnits::fits_bucket(const ReducedParameter& parameter) const {
  const bool layout_known = how_.sparse != SparseGradients::kReduceSparse ||
                            parameter.transfer.agreed_layout().has_value();
  return layout_known && might_fit_bucket(parameter);
}

bool GradientUnits::might_fit_bucket(const ReducedParameter& parameter) const {
  if (!parameter.active() || parameter.group >= 0) return false;
  const torch::ScalarType type = parameter.tensor().scalar_type();
  return is_supported(type) && !type_to_cast_to(type, how_.compression) &&
         parameter.transfer.agreed_layout().value_or(0) == 0;
}

bool GradientUnits::buckets_fit() const {
  return std::all_of(
      parameters_.begin(), parameters_.end(), [this](const ReducedParameter& parameter) {
        const torch::Tensor& view = parameter.transfer.view();
        const torch::Tensor& tensor = parameter.tensor();
        if (!view.defined()) return !fits_bucket(parameter);
        return fits_bucket(parameter) && tensor.scalar_type() == view.scalar_type() &&
               tensor.device() == view.device() && tensor.sizes() == view.sizes();
      });
}

bool GradientUnits::learn(std::vector<std::size_t> order) {
  const bool any = std::any_of(parameters_.begin(), parameters_.end(),
                               [this](const auto& parameter) { return fits_bucket(parameter); });
  if (!wants_buckets() || !any) return false;
  std::erase_if(order, [this](std::size_t i) { return !fits_bucket(parameters_[i]); });
  const auto agreed = agreement_.agree_on_order(order);
  if (!agreed) state_ = State::kRefused;
  return agreed && !agreed->empty() && use_buckets(*agreed);
}

/// Null if there is no memory.
std::shared_ptr<GradientBucket> GradientUnits::make_bucket(const std::vector<std::size_t>& members,
                                                           std::size_t number) const {
  std::vector<torch::Tensor> own;
  for (const std::size_t i : members) own.push_back(parameters_[i].tensor());
  const std::string name = how_.scope + ".bucket" + std::to_string(number) + "[" +
                           parameters_[members.front()].name + " .. " +
                           parameters_[members.back()].name + "]";
  try {
    return std::make_shared<GradientBucket>(name, how_, own);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

/// Nothing is changed before every rank has its memory.
bool GradientUnits::use_buckets(const std::vector<std::size_t>& order) {
  std::vector<GradientSize> sizes;
  for (const ReducedParameter& parameter : parameters_) {
    sizes.push_back({.device = static_cast<int>(parameter.tensor().device().type()),
                     .dtype = static_cast<int>(parameter.tensor().scalar_type()),
                     .bytes = parameter.tensor().nbytes()});
  }
  std::size_t bytes = 0;
  for (const std::size_t i : order) bytes += sizes[i].bytes;
  std::vector<GradientUnit> units;
  bool complete = true;
  for (std::vector<std::size_t>& members : plan_buckets(order, sizes, most_bucket_bytes(bytes))) {
    std::shared_ptr<GradientBucket> bucket = make_bucket(members, units.size());
    complete = bucket != nullptr;
    if (!complete) break;
    units.push_back({.group = "", .members = std::move(members), .bucket = std::move(bucket)});
  }
  if (!agreement_.on_all_ranks(complete, "buckets")) {
    if (!complete)
      TORCH_WARN("DistributedOptimizer (", how_.scope, "): no memory for buckets of ", bytes,
                 " bytes; all ranks go on without them");
    state_ = State::kRefused;
    return false;
  }
  units_ = std::move(units);
  for (const GradientUnit& unit : units_) {
    for (std::size_t m = 0; m < unit.members.size(); ++m) {
      GradientTransfer& transfer = parameters_[unit.members[m]].transfer;
      transfer.set_view(unit.bucket->view(m));
      transfer.move_to_view();
    }
    return_free_memory();  // of these gradients
  }
  add_units_without_bucket();
  state_ = State::kBuckets;
  return true;
}

bool GradientUnits::follow_parameters() {
  if (state_ != State::kBuckets || buckets_fit()) return false;
  for (ReducedParameter& parameter : parameters_) parameter.transfer.set_view({});
  units_.clear();
  add_units_without_bucket();
  state_ = State::kLearning;
  return true;
}

void GradientUnits::end_cycle() {
  for (GradientUnit& unit : units_) unit.stream.reset();
}

}  // namespace hvd::libtorch
