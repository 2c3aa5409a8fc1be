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
    : how_(how), parameters_(parameters), agreement_(agreement), places_(parameters.size()) {
  add_units_without_bucket();
}

/// As the user has grouped the parameters.
void GradientUnits::add_units_without_bucket() {
  ++version_;
  std::map<int, std::size_t> unit_of_group;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (places_[i]) continue;
    const int group = parameters_[i].group();
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

/// A rank alone has buckets on a GPU, where they are what a benchmark measures; on the CPU they
/// would cost a copy and gain nothing. Adasum looks at each tensor.
bool GradientUnits::wants_bucket(const ReducedParameter& parameter) const {
  return how_.bucket_views && how_.op != ReduceOp::kAdasum &&
         (how_.process_set.size() > 1 || parameter.tensor().is_cuda());
}

/// Groups and sparse gradients travel in their own way, and copies that LibTorch casts cannot be
/// views. Only what all ranks of the set agree on decides: the types of active parameters, whose
/// gradients have just been reduced, are.
bool GradientUnits::fits_bucket(const ReducedParameter& parameter) const {
  if (!wants_bucket(parameter) || !parameter.active() || parameter.group() >= 0) return false;
  const std::optional<std::int64_t> sparse_dims = parameter.agreed_layout();
  if (how_.sparse == SparseGradients::kReduceSparse && !sparse_dims) return false;
  const torch::ScalarType type = parameter.tensor().scalar_type();
  // What has gaps in memory has no elements one behind the other to share out.
  if (how_.sharded && !parameter.tensor().is_non_overlapping_and_dense()) return false;
  return is_supported(type) && !type_to_cast_to(type, how_.compression) &&
         sparse_dims.value_or(0) == 0;
}

bool GradientUnits::buckets_fit() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::optional<Place>& place = places_[i];
    if (place.has_value() != fits_bucket(parameters_[i])) return false;
    const torch::Tensor& tensor = parameters_[i].tensor();
    if (place && (tensor.scalar_type() != place->type || tensor.device() != place->device ||
                  tensor.sizes() != place->sizes || tensor.strides() != place->strides))
      return false;
  }
  return true;
}

bool GradientUnits::learn(std::vector<std::size_t> order) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(learning());
  const bool any = std::any_of(parameters_.begin(), parameters_.end(),
                               [this](const auto& parameter) { return fits_bucket(parameter); });
  if (!any) return false;
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
                           parameters_[members.front()].name() + " .. " +
                           parameters_[members.back()].name() + "]";
  try {
    return std::make_shared<GradientBucket>(name, how_, own);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

/// Those in the host's memory, and those on a GPU, which are larger.
std::vector<std::vector<std::size_t>> GradientUnits::plan(
    const std::vector<std::size_t>& order) const {
  std::vector<GradientSize> sizes;
  for (const ReducedParameter& parameter : parameters_) {
    sizes.push_back({.device = static_cast<int>(parameter.tensor().device().type()),
                     .dtype = static_cast<int>(parameter.tensor().scalar_type()),
                     .bytes = parameter.tensor().nbytes()});
  }
  std::vector<std::vector<std::size_t>> buckets;
  for (const bool on_gpu : {false, true}) {
    std::vector<std::size_t> members;
    std::size_t bytes = 0;
    for (const std::size_t i : order) {
      if (parameters_[i].tensor().is_cuda() != on_gpu) continue;
      members.push_back(i);
      bytes += sizes[i].bytes;
    }
    const auto asked = static_cast<std::size_t>(how_.bucket_bytes);
    const BucketLimits limits =
        on_gpu ? gpu_bucket_limits(bytes, asked) : host_bucket_limits(bytes, asked);
    for (std::vector<std::size_t>& bucket : plan_buckets(members, sizes, limits))
      buckets.push_back(std::move(bucket));
  }
  return buckets;
}

/// Nothing is changed before every rank has its memory.
bool GradientUnits::use_buckets(const std::vector<std::size_t>& order) {
  std::vector<GradientUnit> units;
  bool complete = true;
  for (std::vector<std::size_t>& members : plan(order)) {
    std::shared_ptr<GradientBucket> bucket = make_bucket(members, units.size());
    complete = bucket != nullptr;
    if (!complete) break;
    units.push_back({.group = "", .members = std::move(members), .bucket = std::move(bucket)});
  }
  if (!agreement_.on_all_ranks(complete, "buckets")) {
    if (!complete)
      TORCH_WARN(how_.who, " (", how_.scope,
                 "): no memory for buckets; all ranks go on without them");
    state_ = State::kRefused;
    return false;
  }
  units_ = std::move(units);
  move_into_buckets();
  add_units_without_bucket();
  state_ = State::kBuckets;
  return true;
}

void GradientUnits::move_into_buckets() {
  for (const GradientUnit& unit : units_) {
    for (std::size_t m = 0; m < unit.members.size(); ++m) {
      const torch::Tensor& tensor = parameters_[unit.members[m]].tensor();
      places_[unit.members[m]] = Place{tensor.scalar_type(), tensor.device(), tensor.sizes().vec(),
                                       tensor.strides().vec()};
      if (unit.bucket->gathers()) continue;
      ReducedParameter& parameter = parameters_[unit.members[m]];
      parameter.set_view(unit.bucket->view(m));
      parameter.move_to_view();
    }
    if (!unit.bucket->gathers()) return_free_memory();  // of these gradients
  }
}

bool GradientUnits::follow_parameters() {
  if (state_ != State::kBuckets || buckets_fit()) return false;
  for (ReducedParameter& parameter : parameters_) parameter.set_view({});
  places_.assign(parameters_.size(), std::nullopt);
  units_.clear();
  add_units_without_bucket();
  state_ = State::kLearning;
  return true;
}

void GradientUnits::end_cycle() {
  for (GradientUnit& unit : units_) unit.stream.reset();
}

}  // namespace hvd::libtorch
