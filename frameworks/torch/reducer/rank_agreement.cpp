#include "reducer/rank_agreement.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "tensors/shared_allocator.h"

namespace hvd::libtorch {
namespace {

/// Name, shape, dtype.
using Description = std::tuple<std::string, std::vector<std::int64_t>, std::string>;

std::string text_of(const std::vector<Description>& parameters, std::size_t i) {
  if (i >= parameters.size()) return "has no more than " + std::to_string(parameters.size());
  const auto& [name, shape, type] = parameters[i];
  return "has '" + name + "' " + shape_to_string(shape) + " " + type;
}

/// What a rank does otherwise, others wait for, or compare with nothing. What a single operation
/// shows (op, compression, factors) the coordinator compares.
std::map<std::string, std::int64_t> options_of(const GradientReduction& how) {
  return {{"adasum_delta", how.of_changes},
          {"bucket_bytes", how.bucket_bytes},
          {"check_every", how.check_every},
          {"error_if_nonfinite", how.error_if_nonfinite},
          {"gradient_as_bucket_view", how.bucket_views},
          {"gradient_hook", how.hook != nullptr},
          {"sharded", how.sharded},
          {"sparse_gradients", static_cast<std::int64_t>(how.sparse)}};
}

void mix_hash(std::size_t& hash, std::size_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15U + (hash >> 29U);
}

}  // namespace

torch::Tensor RankAgreement::reduced(const torch::Tensor& own, const std::string& name,
                                     ReduceOp op) const {
  try {
    return allreduce(own,
                     {.name = how_.scope + "." + name, .op = op, .process_set = how_.process_set});
  } catch (const StalledError& error) {
    throw StalledError(
        std::string(how_.who) + " (" + how_.scope +
        "): the ranks did not all come to the same step() or synchronize(); expected "
        "it of each rank in every step, also of one that has no batch or drops it: " +
        error.what());
  }
}

void RankAgreement::compare_parameters() {
  std::size_t hash = parameters_.size();
  for (const auto& [name, value] : options_of(how_))
    mix_hash(hash, static_cast<std::size_t>(value));
  for (const ReducedParameter& parameter : parameters_) {
    if (!parameter.active()) continue;
    mix_hash(hash, std::hash<std::string>()(parameter.name()));
    mix_hash(hash, static_cast<std::size_t>(parameter.tensor().scalar_type()));
    for (const std::int64_t size : parameter.tensor().sizes())
      mix_hash(hash, static_cast<std::size_t>(size));
  }
  // The hash, twice, so that its maximum and its minimum come back; and an entry that only one rank
  // sets, for each.
  const torch::Tensor own = torch::full({2 + how_.process_set.size()}, -1, torch::kInt64);
  auto* const values = own.mutable_data_ptr<std::int64_t>();
  values[0] = static_cast<std::int64_t>(hash >> 2U);
  values[1] = -values[0];
  values[2 + how_.process_set.rank()] = 1;
  const torch::Tensor all = reduced(own, "parameters", ReduceOp::kMax);
  const auto* const common = all.const_data_ptr<std::int64_t>();
  if (common[0] != -common[1]) throw_first_difference();
  same_parameters_ =
      std::all_of(common + 2, common + all.numel(), [](std::int64_t entry) { return entry > 0; });
}

void RankAgreement::throw_first_difference() const {
  const std::string who = how_.who;
  std::vector<Description> own;
  for (const ReducedParameter& parameter : parameters_) {
    if (parameter.active())
      own.emplace_back(parameter.name(), parameter.tensor().sizes().vec(),
                       std::string(c10::toString(parameter.tensor().scalar_type())));
  }
  const auto all_options =
      allgather_object(std::pair(hvd::rank(), options_of(how_)),
                       {.name = how_.scope + ".options", .process_set = how_.process_set});
  for (const auto& [rank, options] : all_options) {
    for (const auto& [name, value] : options) {
      const std::int64_t first = all_options.front().second.at(name);
      if (value == first) continue;
      throw MismatchError(who + " (" + how_.scope + "): the option " + name + " differs: rank " +
                          std::to_string(all_options.front().first) + " has " +
                          std::to_string(first) + ", rank " + std::to_string(rank) + " has " +
                          std::to_string(value) + "; expected the same " + who +
                          "Options and the same HVD_ variables on every rank");
    }
  }
  const auto all =
      allgather_object(std::pair(hvd::rank(), own),
                       {.name = how_.scope + ".descriptions", .process_set = how_.process_set});
  const auto& [first_rank, first] = all.front();
  for (const auto& [other_rank, other] : all) {
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (i < first.size() && i < other.size() && first[i] == other[i]) continue;
      throw MismatchError(who + " (" + how_.scope + "): parameter " + std::to_string(i) +
                          " differs: rank " + std::to_string(first_rank) + " " + text_of(first, i) +
                          ", rank " + std::to_string(other_rank) + " " + text_of(other, i) +
                          "; expected the same parameters that require grad, in the same order, on "
                          "every rank; build the same model and freeze the "
                          "same layers everywhere");
    }
  }
  throw MismatchError(who + " (" + how_.scope +
                      "): the ranks' parameters differ; expected the same on every rank");
}

bool RankAgreement::waits_for_layout(const ReducedParameter& parameter) const {
  return how_.sparse == SparseGradients::kReduceSparse && !parameter.agreed_layout() &&
         parameter.own_layout().value_or(0) > 0;
}

/// Only what the ranks have agreed on decides, so that all of them ask or none does.
bool RankAgreement::layouts_in_doubt() const {
  return how_.sparse == SparseGradients::kReduceSparse &&
         std::any_of(parameters_.begin(), parameters_.end(), [](const ReducedParameter& parameter) {
           return parameter.active() && !parameter.agreed_layout();
         });
}

void RankAgreement::agree_on_layouts() {
  const auto count = static_cast<std::int64_t>(parameters_.size());
  const std::int64_t members = how_.process_set.size();
  // Behind the layouts each rank has a place: one that has joined is absent, and would not learn
  // what the others agree on.
  const torch::Tensor message = torch::zeros({2 * count + members}, torch::kInt64);
  message[2 * count + how_.process_set.rank()] = 1;
  const torch::Tensor own = message.narrow(0, 0, 2 * count).view({2, count});
  auto codes = own.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < count; ++i) {
    const ReducedParameter& parameter = parameters_[static_cast<std::size_t>(i)];
    const SparseDims known = parameter.agreed_layout();
    const SparseDims layout = known ? known : parameter.own_layout();
    codes[0][i] = layout == 0 ? 1 : 0;
    codes[1][i] = layout.value_or(0);
  }
  const torch::Tensor reply = reduced(message, "layouts", ReduceOp::kMax);
  const bool everybody = (reply.narrow(0, 2 * count, members) == 1).all().item<bool>();
  const torch::Tensor all = reply.narrow(0, 0, 2 * count).view({2, count});
  const auto common = all.accessor<std::int64_t, 2>();
  // Without anything sparse what is left will hardly be, and is not worth another question.
  const bool sparse = (all[1] > 0).any().item<bool>();
  for (std::int64_t i = 0; i < count; ++i) {
    ReducedParameter& parameter = parameters_[static_cast<std::size_t>(i)];
    if (!everybody && !parameter.agreed_layout())
      provisional_layouts_.push_back(static_cast<std::size_t>(i));
    if (common[0][i] > 0 || (!sparse && parameter.active())) {
      parameter.agree(0);
    } else if (common[1][i] > 0) {
      parameter.agree(common[1][i]);
    }
  }
}

void RankAgreement::end_cycle() {
  for (const std::size_t i : provisional_layouts_) parameters_[i].agree(std::nullopt);
  provisional_layouts_.clear();
}

std::optional<std::vector<std::size_t>> RankAgreement::agree_on_order(
    const std::vector<std::size_t>& order) const {
  std::size_t hash = parameters_.size();
  for (const ReducedParameter& parameter : parameters_) {
    const torch::Tensor& tensor = parameter.tensor();
    mix_hash(hash, std::hash<std::string>()(parameter.name()));
    mix_hash(hash, parameter.active() ? static_cast<std::size_t>(tensor.scalar_type()) : 1000);
    mix_hash(hash, static_cast<std::size_t>(tensor.device().type()));
    for (const std::int64_t size : tensor.sizes()) mix_hash(hash, static_cast<std::size_t>(size));
    for (const std::int64_t stride : tensor.strides())
      mix_hash(hash, static_cast<std::size_t>(stride));
  }
  const auto layout = static_cast<std::int64_t>(hash >> 2U);
  const auto count = static_cast<std::int64_t>(order.size());
  // The order; the layout, twice, so that its maximum and its minimum come back; and an entry for
  // each rank, which only that rank sets: 1 if gradients of its CPU are born in shared memory.
  const torch::Tensor own = torch::full({count + 2 + how_.process_set.size()}, -1, torch::kInt64);
  auto* const values = own.data_ptr<std::int64_t>();
  values[count] = layout;
  values[count + 1] = -layout;
  const bool born_here =
      shared_allocator_installed() && std::any_of(order.begin(), order.end(), [&](std::size_t i) {
        return parameters_[i].tensor().is_cpu();
      });
  values[count + 2 + how_.process_set.rank()] = born_here ? 1 : 0;
  if (how_.process_set.rank() == 0) std::copy(order.begin(), order.end(), values);
  const torch::Tensor all = reduced(own, "order", ReduceOp::kMax);
  const auto* const common = all.const_data_ptr<std::int64_t>();
  if (std::any_of(common + count + 2, common + all.numel(),
                  [](std::int64_t entry) { return entry < 0; }))
    return std::vector<std::size_t>();
  const bool born_shared = std::any_of(common + count + 2, common + all.numel(),
                                       [](std::int64_t entry) { return entry > 0; });
  if (born_shared || common[count] != -common[count + 1]) return std::nullopt;
  return std::vector<std::size_t>(common, common + count);
}

bool RankAgreement::on_all_ranks(bool own, const std::string& name) const {
  const torch::Tensor least =
      reduced(torch::full({1}, own ? 1 : 0, torch::kInt64), name, ReduceOp::kMin);
  return least.item<std::int64_t>() == 1;
}

void FiniteCheck::look_at(std::size_t parameter, const torch::Tensor& gradient) {
  if (found_ || !gradient.defined()) return;
  const torch::NoGradGuard no_grad;
  torch::Tensor values = gradient.detach();
  // Entries of one place add up, and may overflow.
  if (values.is_sparse()) values = values.coalesce().values();
  if (torch::isfinite(values).all().item<bool>()) return;
  found_ = {.parameter = parameter, .nan = torch::isnan(values).any().item<bool>()};
}

std::string FiniteCheck::difference(std::span<const ReducedParameter> parameters) const {
  const torch::Tensor own = torch::zeros({how_.process_set.size()}, torch::kInt64);
  if (found_) {
    own[how_.process_set.rank()] =
        2 * static_cast<std::int64_t>(found_->parameter) + (found_->nan ? 2 : 1);
  }
  const torch::Tensor all = allreduce(
      own, {.name = how_.scope + ".finite", .op = ReduceOp::kMax, .process_set = how_.process_set});
  const auto* const codes = all.const_data_ptr<std::int64_t>();
  const std::vector<int> ranks = how_.process_set.ranks();
  constexpr std::size_t kMost = 8;
  std::string text;
  std::size_t found = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (codes[r] == 0 || ++found > kMost) continue;
    const auto parameter = static_cast<std::size_t>((codes[r] - 1) / 2);
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(ranks[r]) +
            (codes[r] % 2 == 0 ? " nan" : " inf") + " in the gradient of '" +
            parameters[parameter].name() + "'";
  }
  if (found > kMost) text += ", and " + std::to_string(found - kMost) + " more ranks";
  return text;
}

}  // namespace hvd::libtorch
