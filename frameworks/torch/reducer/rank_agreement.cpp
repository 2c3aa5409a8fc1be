#include "reducer/rank_agreement.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"

namespace hvd::libtorch {
namespace {

/// Options that cause a hang, or pair the wrong operations, if they differ between ranks. The
/// coordinator compares those of a single operation (op, compression, factors).
std::vector<std::pair<std::string, std::int64_t>> options_of(const GradientReduction& how) {
  return {{"adasum_delta", how.reduces_changes},
          {"batch_norm_buffers", static_cast<std::int64_t>(how.statistics.size())},
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
        std::string(how_.wrapper) + " (" + how_.scope +
        "): not all ranks have called the same step() or synchronize(); expected the call on "
        "each rank in every step, also on a rank that has no batch or drops it: " +
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
  // The hash and its negative, so that the result contains both the maximum and the minimum; and an
  // entry for each rank, which only that rank sets.
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
  AgreementTerms terms{.name = how_.scope + ".options",
                       .title = text(how_.wrapper, " (", how_.scope, ")"),
                       .process_set = how_.process_set,
                       .expected = text("expected the same ", how_.wrapper,
                                        "Options and the same HVD_ variables on every rank"),
                       .without_joined = true};
  std::vector<Fact> facts;
  for (const auto& [name, value] : options_of(how_))
    facts.emplace_back("the option " + name, text(value));
  agree(terms, "", facts);
  facts.clear();
  for (const ReducedParameter& parameter : parameters_) {
    if (!parameter.active()) continue;
    facts.emplace_back(
        text("parameter ", facts.size()),
        text("'", parameter.name(), "' ", shape_to_string(parameter.tensor().sizes().vec()), " ",
             c10::toString(parameter.tensor().scalar_type())));
  }
  terms.name = how_.scope + ".descriptions";
  terms.expected =
      "expected the same parameters that require grad, in the same order, on every rank; build the "
      "same model and freeze the same layers everywhere";
  agree(terms, "", facts);
  throw MismatchError(terms.title +
                      ": the ranks' parameters differ; expected the same on every rank");
}

bool RankAgreement::waits_for_layout(const ReducedParameter& parameter) const {
  return how_.sparse == SparseGradients::kReduceSparse && !parameter.agreed_layout() &&
         parameter.own_layout().value_or(0) > 0;
}

/// Depends only on earlier agreements, so that either all ranks or no rank begin the next one.
bool RankAgreement::layouts_in_doubt() const {
  return how_.sparse == SparseGradients::kReduceSparse &&
         std::any_of(parameters_.begin(), parameters_.end(), [](const ReducedParameter& parameter) {
           return !parameter.agreed_layout() && parameter.active();
         });
}

void RankAgreement::agree_on_layouts() {
  const auto count = static_cast<std::int64_t>(parameters_.size());
  const std::int64_t members = how_.process_set.size();
  // Each rank has an entry behind the layouts. A rank that has joined is absent, and does not get
  // the result.
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
  const bool all_present = (reply.narrow(0, 2 * count, members) == 1).all().item<bool>();
  const torch::Tensor all = reply.narrow(0, 0, 2 * count).view({2, count});
  const auto common = all.accessor<std::int64_t, 2>();
  // If no known gradient is sparse, the unknown ones are unlikely to be sparse, and count as dense.
  const bool sparse = (all[1] > 0).any().item<bool>();
  for (std::int64_t i = 0; i < count; ++i) {
    ReducedParameter& parameter = parameters_[static_cast<std::size_t>(i)];
    if (!all_present && !parameter.agreed_layout())
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

std::optional<AgreedOrder> RankAgreement::agree_on_order(const std::vector<std::size_t>& order,
                                                         bool shares_gradients) const {
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
  // The order; the hash of layouts and its negative, so that the result contains both the maximum
  // and the minimum; and an entry for each rank, which only that rank sets: 1 if it makes gradients
  // in shared memory.
  const torch::Tensor own = torch::full({count + 2 + how_.process_set.size()}, -1, torch::kInt64);
  auto* const values = own.data_ptr<std::int64_t>();
  values[count] = layout;
  values[count + 1] = -layout;
  values[count + 2 + how_.process_set.rank()] = shares_gradients ? 1 : 0;
  if (how_.process_set.rank() == 0) std::copy(order.begin(), order.end(), values);
  const torch::Tensor all = reduced(own, "order", ReduceOp::kMax);
  const auto* const common = all.const_data_ptr<std::int64_t>();
  const std::span entries(common + count + 2, common + all.numel());
  const auto least = std::min_element(entries.begin(), entries.end());
  if (*least < 0) return AgreedOrder();
  if (common[count] != -common[count + 1]) return std::nullopt;
  return AgreedOrder{.order = {common, common + count}, .gradients_shared = *least > 0};
}

bool RankAgreement::on_all_ranks(bool own, const std::string& name) const {
  const torch::Tensor least =
      reduced(torch::full({1}, own ? 1 : 0, torch::kInt64), name, ReduceOp::kMin);
  return least.item<std::int64_t>() == 1;
}

void FiniteCheck::inspect(std::size_t parameter, const torch::Tensor& gradient) {
  if (found_ != 0 || !gradient.defined()) return;
  const torch::NoGradGuard no_grad;
  torch::Tensor values = gradient.detach();
  // Entries with the same indices are added, and their sum may overflow.
  if (values.is_sparse()) values = values.coalesce().values();
  if (torch::isfinite(values).all().item<bool>()) return;
  found_ =
      2 * static_cast<std::int64_t>(parameter) + (torch::isnan(values).any().item<bool>() ? 2 : 1);
}

std::string FiniteCheck::difference(std::span<const ReducedParameter> parameters) const {
  const torch::Tensor own = torch::zeros({how_.process_set.size()}, torch::kInt64);
  own[how_.process_set.rank()] = found_;
  const torch::Tensor all = allreduce(
      own, {.name = how_.scope + ".finite", .op = ReduceOp::kMax, .process_set = how_.process_set});
  const auto* const codes = all.const_data_ptr<std::int64_t>();
  const std::vector<int> ranks = how_.process_set.ranks();
  constexpr std::size_t kMaxShown = 8;
  std::string text;
  std::size_t found = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (codes[r] == 0 || ++found > kMaxShown) continue;
    const auto parameter = static_cast<std::size_t>((codes[r] - 1) / 2);
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(ranks[r]) +
            (codes[r] % 2 == 0 ? " nan" : " inf") + " in the gradient of '" +
            parameters[parameter].name() + "'";
  }
  if (found > kMaxShown) text += ", and " + std::to_string(found - kMaxShown) + " more ranks";
  return text;
}

}  // namespace hvd::libtorch
