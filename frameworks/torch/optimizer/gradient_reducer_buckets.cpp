// GradientReducer: how it comes to use buckets.
#include <malloc.h>

#include <algorithm>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "hvd/torch/operations.h"
#include "optimizer/gradient_reducer.h"
#include "tensors/shared_allocator.h"

namespace hvd::libtorch {
namespace {

// Of two ranks' buckets both fit into half of a common L3 cache (16 to 32 MiB), where a reduction
// runs four times as fast as in memory.
constexpr std::size_t kMostBucketBytes = std::size_t{8} << 20;
// A small model has several buckets too, so that the first are reduced while backward still runs.
constexpr std::size_t kFewestBuckets = 8;

/// malloc keeps what lies below memory that is in use.
void return_free_memory() {
#if defined(__GLIBC__)
  ::malloc_trim(0);
#endif
}

}  // namespace

bool GradientReducer::wants_buckets() const {
  // Adasum looks at each tensor.
  return how_.bucket_views && how_.process_set.size() > 1 && how_.op != ReduceOp::kAdasum;
}

bool GradientReducer::may_use_buckets() const {
  return wants_buckets() && std::any_of(slots_.begin(), slots_.end(),
                                        [this](const Slot& slot) { return fits_bucket(slot); });
}

/// Groups and sparse gradients travel in their own way, and copies that LibTorch casts cannot be
/// views. Only what all ranks of the set agree on decides: the types of active parameters, whose
/// gradients have just been reduced, are.
bool GradientReducer::fits_bucket(const Slot& slot) const {
  const bool layout_known =
      how_.sparse != SparseGradients::kReduceSparse || slot.transfer.agreed_layout().has_value();
  return layout_known && might_fit_bucket(slot);
}

bool GradientReducer::might_fit_bucket(const Slot& slot) const {
  if (!slot.active() || slot.group >= 0) return false;
  const torch::ScalarType type = slot.transfer.parameter().scalar_type();
  return is_supported(type) && !type_to_cast_to(type, how_.compression) &&
         slot.transfer.agreed_layout().value_or(0) == 0;
}

bool GradientReducer::buckets_fit() const {
  return std::all_of(slots_.begin(), slots_.end(), [this](const Slot& slot) {
    const torch::Tensor& view = slot.transfer.view();
    const torch::Tensor& parameter = slot.transfer.parameter();
    if (!view.defined()) return !fits_bucket(slot);
    return fits_bucket(slot) && parameter.scalar_type() == view.scalar_type() &&
           parameter.device() == view.device() && parameter.sizes() == view.sizes();
  });
}

/// The order in which the set's first rank submitted its gradients; empty when a rank has joined,
/// since it would not learn it. If the ranks' parameters do not lie in memory alike, or gradients
/// are born in shared memory on any rank and so need no copies, buckets are refused.
std::vector<std::size_t> GradientReducer::agree_on_order(
    const std::vector<std::size_t>& submitted) {
  std::size_t hash = slots_.size();
  for (const Slot& slot : slots_) {
    const torch::Tensor& parameter = slot.transfer.parameter();
    mix_hash(hash, std::hash<std::string>()(slot.name));
    mix_hash(hash, slot.active() ? static_cast<std::size_t>(parameter.scalar_type()) : 1000);
    mix_hash(hash, static_cast<std::size_t>(parameter.device().type()));
    for (const std::int64_t size : parameter.sizes())
      mix_hash(hash, static_cast<std::size_t>(size));
    for (const std::int64_t stride : parameter.strides())
      mix_hash(hash, static_cast<std::size_t>(stride));
  }
  const auto layout = static_cast<std::int64_t>(hash >> 2U);
  const auto count = static_cast<std::int64_t>(submitted.size());
  // The order; the layout, twice, so that its maximum and its minimum come back; and an entry for
  // each rank, which only that rank sets: 1 if its gradients are born in shared memory.
  const torch::Tensor own = torch::full({count + 2 + how_.process_set.size()}, -1, torch::kInt64);
  auto* const values = own.data_ptr<std::int64_t>();
  values[count] = layout;
  values[count + 1] = -layout;
  values[count + 2 + how_.process_set.rank()] = shared_allocator_installed() ? 1 : 0;
  if (how_.process_set.rank() == 0) std::copy(submitted.begin(), submitted.end(), values);
  const torch::Tensor all = allreduce(
      own, {.name = scope_ + ".order", .op = ReduceOp::kMax, .process_set = how_.process_set});
  const auto* const common = all.const_data_ptr<std::int64_t>();
  if (std::any_of(common + count + 2, common + all.numel(),
                  [](std::int64_t entry) { return entry < 0; }))
    return {};
  const bool born_shared = std::any_of(common + count + 2, common + all.numel(),
                                       [](std::int64_t entry) { return entry > 0; });
  if (born_shared || common[count] != -common[count + 1]) {
    buckets_ = Buckets::kRefused;
    return {};
  }
  return {common, common + count};
}

void GradientReducer::learn_buckets(std::vector<std::size_t> submitted) {
  if (!may_use_buckets()) return;
  std::erase_if(submitted, [this](std::size_t i) { return !fits_bucket(slots_[i]); });
  const std::vector<std::size_t> order = agree_on_order(submitted);
  if (!order.empty()) use_buckets(order);
}

/// Null if there is no memory.
std::shared_ptr<GradientBucket> GradientReducer::make_bucket(
    const std::vector<std::size_t>& members, std::size_t number) const {
  std::vector<torch::Tensor> own;
  for (const std::size_t i : members) own.push_back(parameters_[i]);
  const std::string name = scope_ + ".bucket" + std::to_string(number) + "[" +
                           slots_[members.front()].name + " .. " + slots_[members.back()].name +
                           "]";
  try {
    return std::make_shared<GradientBucket>(name, how_, own);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

bool GradientReducer::on_all_ranks(bool own, const std::string& name) const {
  const torch::Tensor least = allreduce(
      torch::full({1}, own ? 1 : 0, torch::kInt64),
      {.name = scope_ + "." + name, .op = ReduceOp::kMin, .process_set = how_.process_set});
  return least.item<std::int64_t>() == 1;
}

/// Nothing is changed before every rank has its memory.
void GradientReducer::use_buckets(const std::vector<std::size_t>& order) {
  std::size_t bytes = 0;
  for (const std::size_t i : order) bytes += parameters_[i].nbytes();
  const std::size_t most = std::min(kMostBucketBytes, bytes / kFewestBuckets);
  std::vector<Unit> units;
  bool complete = true;
  for (const std::vector<std::size_t>& members : plan_buckets(order, parameters_, most)) {
    units.push_back({.group = "", .slots = members, .bucket = make_bucket(members, units.size())});
    complete = complete && units.back().bucket != nullptr;
    if (!complete) break;
  }
  if (!on_all_ranks(complete, "buckets")) {
    if (!complete)
      TORCH_WARN("DistributedOptimizer (", scope_, "): no memory for buckets of ", bytes,
                 " bytes; all ranks go on without them");
    buckets_ = Buckets::kRefused;
    return;
  }
  units_ = std::move(units);
  for (std::size_t u = 0; u < units_.size(); ++u) {
    for (std::size_t m = 0; m < units_[u].slots.size(); ++m) {
      Slot& slot = slots_[units_[u].slots[m]];
      slot.unit = u;
      slot.transfer.set_view(units_[u].bucket->view(m));
      slot.transfer.move_to_view();
    }
    return_free_memory();  // of these gradients
  }
  add_units_without_bucket();
  buckets_ = Buckets::kUsed;
}

void GradientReducer::forget_buckets() {
  for (Slot& slot : slots_) slot.transfer.set_view({});
  units_.clear();
  add_units_without_bucket();
  buckets_ = Buckets::kUnknown;
}

}  // namespace hvd::libtorch
