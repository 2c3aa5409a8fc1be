#include "reducer/gradient_units.h"

#include <c10/core/alignment.h>
#include <malloc.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <new>
#include <utility>

#include "hvd/hvd.h"
#include "hvd/memory.h"
#include "operations/membership.h"
#include "reducer/bucket_plan.h"
#include "reducer/guarded_gradient.h"
#include "reducer/reduced_parameter.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

/// Returns free memory to the system, because malloc keeps free memory that is below memory in use.
void return_free_memory() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace

GradientUnits::GradientUnits(const GradientReduction& how, std::span<ReducedParameter> parameters,
                             const RankAgreement& agreement)
    : how_(how), parameters_(parameters), agreement_(agreement) {
  plan_.forms.resize(parameters_.size());
  share_gradients();
  add_units_without_bucket();
}

/// Whether the gradient can be reduced in shared memory by a separate operation. The decision uses
/// only facts that are equal on all ranks of the set.
bool GradientUnits::can_share(const ReducedParameter& parameter) const {
  return parameter.tensor().is_cpu() && parameter.tensor().nbytes() >= kSmallestShared &&
         how_.op != ReduceOp::kAdasum && how_.compression == Compression::kNone && !how_.sharded &&
         !how_.hook && !waits_for_rank() && how_.process_set.size() > 1 && local_size() == size();
}

/// Makes autograd allocate large gradients in shared memory from now on.
void GradientUnits::share_gradients() {
  std::vector<std::size_t> sizes;
  for (const ReducedParameter& parameter : parameters_)
    if (can_share(parameter)) sizes.push_back(parameter.tensor().nbytes());
  shared_ = SharedGradients(std::move(sizes));
}

/// Adds a unit for each of the user's groups, and one for each other gradient.
void GradientUnits::add_units_without_bucket() {
  plan_.version = ++last_version_;
  std::map<int, std::size_t> unit_of_group;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (plan_.forms[i]) continue;
    const int group = parameters_[i].group();
    const auto [known, added] = unit_of_group.try_emplace(group, plan_.units.size());
    if (group >= 0 && !added) {
      plan_.units[known->second].members.push_back(i);
      continue;
    }
    plan_.units.push_back(
        {.group = group < 0 ? "" : how_.scope + ".group" + std::to_string(group), .members = {i}});
  }
}

std::vector<std::vector<std::size_t>> GradientUnits::members() const {
  std::vector<std::vector<std::size_t>> members;
  for (const GradientUnit& unit : plan_.units) members.push_back(unit.members);
  return members;
}

/// With a single rank, buckets are used on a GPU only, for a benchmark; on the CPU they would cost
/// a copy without a gain. Adasum handles each tensor separately.
bool GradientUnits::wants_bucket(const ReducedParameter& parameter, bool several_ranks) const {
  return how_.bucket_views && how_.op != ReduceOp::kAdasum &&
         (several_ranks || parameter.tensor().is_cuda());
}

/// Groups and sparse gradients need other operations, and copies that LibTorch casts cannot be
/// views. The decision uses only facts that all ranks of the set have agreed on, such as the types
/// of active parameters, whose gradients have just been reduced.
bool GradientUnits::fits_bucket(const ReducedParameter& parameter, bool several_ranks) const {
  if (!wants_bucket(parameter, several_ranks) || !parameter.active() || parameter.group() >= 0)
    return false;
  if (in_place_ && can_share(parameter)) return false;
  const std::optional<std::int64_t> sparse_dims = parameter.agreed_layout();
  if (how_.sparse == SparseGradients::kReduceSparse && !sparse_dims) return false;
  const torch::ScalarType type = parameter.tensor().scalar_type();
  // The elements of a bucket that is scattered must be contiguous in memory.
  if (how_.sharded && !parameter.tensor().is_non_overlapping_and_dense()) return false;
  return is_supported(type) && !type_to_cast_to(type, how_.compression) &&
         sparse_dims.value_or(0) == 0;
}

bool GradientUnits::has_form(const torch::Tensor& tensor, const ParameterForm& form) {
  return tensor.scalar_type() == form.type && tensor.device() == form.device &&
         tensor.sizes() == form.sizes && tensor.strides() == form.strides;
}

bool GradientUnits::fits(const Plan& plan) const {
  const bool several_ranks = how_.process_set.size() > 1;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& form = plan.forms[i];
    if (form.has_value() != fits_bucket(parameters_[i], several_ranks)) return false;
    if (form && !has_form(parameters_[i].tensor(), *form)) return false;
  }
  return true;
}

/// Whether a parameter has changed since the plan was made. The plan will then not fit again.
bool GradientUnits::is_outdated(const Plan& plan) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (plan.forms[i] && !has_form(parameters_[i].tensor(), *plan.forms[i])) return true;
  }
  return false;
}

bool GradientUnits::learn(std::vector<std::size_t> order) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(learning());
  in_place_ = false;
  const bool several_ranks = how_.process_set.size() > 1;
  const auto stays_out = [&](std::size_t i) { return !fits_bucket(parameters_[i], several_ranks); };
  const bool any = std::any_of(parameters_.begin(), parameters_.end(), [&](const auto& parameter) {
    return fits_bucket(parameter, several_ranks);
  });
  if (!any) return false;
  std::erase_if(order, stays_out);
  auto agreed = agreement_.agree_on_order(order, shared_.active());
  refused_ = !agreed;
  learning_ = !refused_;
  if (!agreed || agreed->order.empty()) return false;
  in_place_ = agreed->gradients_shared;
  if (!in_place_) shared_ = SharedGradients();
  std::erase_if(agreed->order, stays_out);
  return use_buckets(agreed->order);
}

/// Returns null if there is not enough memory.
std::shared_ptr<GradientBucket> GradientUnits::make_bucket(const std::vector<std::size_t>& members,
                                                           std::size_t number) const {
  std::vector<torch::Tensor> own;
  for (const std::size_t i : members) own.push_back(parameters_[i].tensor());
  // Names differ between plans, so that the runtime still has a plan's operations when the plan is
  // used again.
  const std::string plan = learnings_ == 0 ? "" : ".plan" + std::to_string(learnings_);
  const std::string name = how_.scope + plan + ".bucket" + std::to_string(number) + "[" +
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

/// Plans buckets in the host's memory, and on a GPU, where they are larger.
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

/// Changes the units only if every rank has the memory for its buckets.
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
      TORCH_WARN(how_.wrapper, " (", how_.scope,
                 "): no memory for buckets; all ranks continue without them");
    refused_ = true;
    learning_ = false;
    return false;
  }
  // Every rank has taken part in each learning, and so removes the same plan.
  constexpr std::size_t kMaxSetAside = 3;
  if (aside_.size() > kMaxSetAside)
    aside_.erase(std::min_element(aside_.begin(), aside_.end(), [](const Plan& a, const Plan& b) {
      return a.number < b.number;
    }));
  plan_.number = learnings_++;
  plan_.units = std::move(units);
  move_into_buckets();
  add_units_without_bucket();
  learning_ = false;
  return true;
}

void GradientUnits::move_into_buckets() {
  for (const GradientUnit& unit : plan_.units) {
    for (std::size_t m = 0; m < unit.members.size(); ++m) {
      const torch::Tensor& tensor = parameters_[unit.members[m]].tensor();
      plan_.forms[unit.members[m]] = ParameterForm{tensor.scalar_type(), tensor.device(),
                                                   tensor.sizes().vec(), tensor.strides().vec()};
      if (unit.bucket->gathers()) continue;
      ReducedParameter& parameter = parameters_[unit.members[m]];
      parameter.set_view(unit.bucket->view(m));
      parameter.move_to_view();
    }
    if (!unit.bucket->gathers()) return_free_memory();  // the gradients' former memory
  }
}

bool GradientUnits::follow_parameters() {
  if (refused_) return false;
  if (learning_) return use_fitting_plan();
  if (fits(plan_)) return false;
  for (ReducedParameter& parameter : parameters_) parameter.set_view({});
  aside_.push_back(std::exchange(plan_, {}));
  plan_.forms.resize(parameters_.size());
  std::erase_if(aside_, [this](const Plan& plan) { return is_outdated(plan); });
  share_gradients();
  if (use_fitting_plan()) return true;
  add_units_without_bucket();
  learning_ = true;
  return true;
}

/// Uses a plan that was set aside and fits the parameters, if there is one.
bool GradientUnits::use_fitting_plan() {
  const auto found =
      std::find_if(aside_.begin(), aside_.end(), [this](const Plan& plan) { return fits(plan); });
  if (found == aside_.end()) return false;
  plan_ = std::move(*found);
  aside_.erase(found);
  for (const GradientUnit& unit : plan_.units) {
    if (!unit.bucket || unit.bucket->gathers()) continue;
    for (std::size_t m = 0; m < unit.members.size(); ++m)
      parameters_[unit.members[m]].set_view(unit.bucket->view(m));
  }
  learning_ = false;
  return true;
}

void GradientUnits::end_cycle() {
  for (GradientUnit& unit : plan_.units) unit.stream.reset();
}

namespace {

static_assert(kGradientAlignment % c10::gAlignment == 0, "as aligned as a tensor of its own");

/// The bytes that the parameter's gradient occupies in a bucket.
std::size_t room_for(const torch::Tensor& parameter) { return room_in_bucket(parameter.nbytes()); }

}  // namespace

GradientBucket::GradientBucket(std::string name, const GradientReduction& how,
                               std::span<const torch::Tensor> parameters) {
  const auto element = static_cast<std::int64_t>(parameters.front().element_size());
  std::size_t bytes = 0;
  for (const torch::Tensor& parameter : parameters) {
    first_.push_back(static_cast<std::int64_t>(bytes) / element);
    bytes += room_for(parameter);
  }
  TensorView all = view_of(parameters.front());
  all.data = nullptr;
  all.count = elements_ = static_cast<std::int64_t>(bytes) / element;
  all.shape = {all.count};
  // Gradients are not scattered if a GPU packs them, if they are cast, or if a GradientHook reduces
  // them.
  const bool scatters = how.sharded && how.compression == Compression::kNone && !how.hook &&
                        parameters.front().is_cpu();
  submission_ = scatters ? scatter_in_place(std::move(name), how, std::move(all))
                         : reduction_in_place(std::move(name), how, std::move(all));
  if (scatters)
    first_own_row_ = rows_at(elements_, how.process_set.size(), how.process_set.rank()).begin;
  submission_.alone = bytes >= kMinUnfusedBytes;
  parameters.front().is_cuda() ? begin_gathering() : lay_out(parameters, bytes);
}

void GradientBucket::lay_out(std::span<const torch::Tensor> parameters, std::size_t bytes) {
  const std::shared_ptr<std::byte> memory = allocate_shared(bytes);
  std::size_t offset = 0;
  for (const torch::Tensor& parameter : parameters) {
    std::byte* const begin = memory.get() + offset;
    // The gap behind a gradient is reduced too, so it is set to zero. The pages of the gradients
    // themselves are not touched before the gradients are stored there.
    std::memset(begin + parameter.nbytes(), 0, room_for(parameter) - parameter.nbytes());
    views_.push_back(GuardedGradient::of(torch::from_blob(
        begin, parameter.sizes(), strides_for(parameter), [memory](void*) {},
        parameter.options().requires_grad(false))));
    offset += room_for(parameter);
  }
  flat_ = torch::from_blob(
      memory.get(), {elements_}, [memory](void*) {},
      parameters.front().options().requires_grad(false));
  submission_.input.data = submission_.output.data = memory.get();
  submission_.output.data += first_own_row_ * parameters.front().element_size();
  submission_.keep_alive = memory;
}

torch::Tensor GradientBucket::own_rows() const {
  return flat_.narrow(0, first_own_row_, submission_.output.count);
}

void GradientBucket::begin_gathering() {
  packed_ = std::make_shared<PackedGradients>();
  packed_->parts.reserve(first_.size());
  packed_->gradients.reserve(first_.size());
  submission_.keep_alive = packed_;
}

void GradientBucket::add(const torch::Tensor& gradient) {
  TensorPart part{nullptr, first_[packed_->parts.size()], 0};
  if (gradient.defined()) {
    part.data = static_cast<std::byte*>(gradient.mutable_data_ptr());
    part.count = gradient.numel();
    packed_->gradients.push_back(gradient);
  }
  packed_->parts.push_back(part);
  submission_.parts = packed_->parts;
}

void GradientBucket::release_gradients(bool done) {
  submission_.parts = {};
  if (!done) return begin_gathering();
  packed_->parts.clear();
  packed_->gradients.clear();
}

}  // namespace hvd::libtorch
