// GradientReducer: what the ranks find out about each other before they reduce, and while they do.
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "optimizer/gradient_reducer.h"

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
  return {{"check_every", how.check_every},
          {"gradient_as_bucket_view", how.bucket_views},
          {"sparse_gradients", static_cast<std::int64_t>(how.sparse)}};
}

}  // namespace

/// Whether all ranks have the same active parameters, in the same order. A rank that has joined
/// does not answer and would not hear it, so that the ranks ask again in the next cycle.
void GradientReducer::compare_parameters() {
  std::size_t hash = slots_.size();
  for (const auto& [name, value] : options_of(how_))
    mix_hash(hash, static_cast<std::size_t>(value));
  for (const Slot& slot : slots_) {
    if (!slot.active()) continue;
    const torch::Tensor& parameter = slot.transfer.parameter();
    mix_hash(hash, std::hash<std::string>()(slot.name));
    mix_hash(hash, static_cast<std::size_t>(parameter.scalar_type()));
    for (const std::int64_t size : parameter.sizes())
      mix_hash(hash, static_cast<std::size_t>(size));
  }
  // The hash, twice, so that its maximum and its minimum come back; and an entry that only one rank
  // sets, for each.
  const torch::Tensor own = torch::full({2 + how_.process_set.size()}, -1, torch::kInt64);
  auto* const values = own.mutable_data_ptr<std::int64_t>();
  values[0] = static_cast<std::int64_t>(hash >> 2U);
  values[1] = -values[0];
  values[2 + how_.process_set.rank()] = 1;
  const torch::Tensor all = allreduce(
      own, {.name = scope_ + ".parameters", .op = ReduceOp::kMax, .process_set = how_.process_set});
  const auto* const common = all.const_data_ptr<std::int64_t>();
  if (common[0] != -common[1]) throw_first_difference();
  same_parameters_ =
      std::all_of(common + 2, common + all.numel(), [](std::int64_t entry) { return entry > 0; });
}

void GradientReducer::throw_first_difference() const {
  std::vector<Description> own;
  for (const Slot& slot : slots_) {
    const torch::Tensor& parameter = slot.transfer.parameter();
    if (slot.active())
      own.emplace_back(slot.name, parameter.sizes().vec(),
                       std::string(c10::toString(parameter.scalar_type())));
  }
  const auto all_options =
      allgather_object(std::pair(hvd::rank(), options_of(how_)),
                       {.name = scope_ + ".options", .process_set = how_.process_set});
  for (const auto& [rank, options] : all_options) {
    for (const auto& [name, value] : options) {
      const std::int64_t first = all_options.front().second.at(name);
      if (value == first) continue;
      throw MismatchError("DistributedOptimizer (" + scope_ + "): the option " + name +
                          " differs: rank " + std::to_string(all_options.front().first) + " has " +
                          std::to_string(first) + ", rank " + std::to_string(rank) + " has " +
                          std::to_string(value) +
                          "; expected the same DistributedOptimizerOptions and the same HVD_ "
                          "variables on every rank");
    }
  }
  const auto all = allgather_object(std::pair(hvd::rank(), own), {.name = scope_ + ".descriptions",
                                                                  .process_set = how_.process_set});
  const auto& [first_rank, first] = all.front();
  for (const auto& [other_rank, other] : all) {
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (i < first.size() && i < other.size() && first[i] == other[i]) continue;
      throw MismatchError("DistributedOptimizer (" + scope_ + "): parameter " + std::to_string(i) +
                          " differs: rank " + std::to_string(first_rank) + " " + text_of(first, i) +
                          ", rank " + std::to_string(other_rank) + " " + text_of(other, i) +
                          "; expected the same parameters that require grad, in the same order, on "
                          "every rank; build the same model and freeze the "
                          "same layers everywhere");
    }
  }
  throw MismatchError("DistributedOptimizer (" + scope_ +
                      "): the ranks' parameters differ; expected the same on every rank");
}

/// Only what the ranks have agreed on decides, so that all of them ask or none does.
bool GradientReducer::layouts_in_doubt() const {
  return how_.sparse == SparseGradients::kReduceSparse &&
         std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
           return slot.active() && !slot.transfer.agreed_layout();
         });
}

/// A parameter that is dense anywhere is dense everywhere: it may have been submitted.
void GradientReducer::agree_on_layouts() {
  const auto count = static_cast<std::int64_t>(slots_.size());
  const std::int64_t members = how_.process_set.size();
  // Behind the layouts each rank has a place: one that has joined is absent, and would not learn
  // what the others agree on.
  const torch::Tensor message = torch::zeros({2 * count + members}, torch::kInt64);
  message[2 * count + how_.process_set.rank()] = 1;
  const torch::Tensor own = message.narrow(0, 0, 2 * count).view({2, count});
  auto codes = own.accessor<std::int64_t, 2>();
  for (std::int64_t i = 0; i < count; ++i) {
    const GradientTransfer& transfer = slots_[static_cast<std::size_t>(i)].transfer;
    const SparseDims known = transfer.agreed_layout();
    const SparseDims layout = known ? known : transfer.own_layout();
    codes[0][i] = layout == 0 ? 1 : 0;
    codes[1][i] = layout.value_or(0);
  }
  const torch::Tensor reply = allreduce(
      message,
      {.name = scope_ + ".layouts", .op = ReduceOp::kMax, .process_set = how_.process_set});
  const bool everybody = (reply.narrow(0, 2 * count, members) == 1).all().item<bool>();
  const torch::Tensor all = reply.narrow(0, 0, 2 * count).view({2, count});
  const auto common = all.accessor<std::int64_t, 2>();
  // Without anything sparse what is left will hardly be, and is not worth another question.
  const bool sparse = (all[1] > 0).any().item<bool>();
  for (std::int64_t i = 0; i < count; ++i) {
    Slot& slot = slots_[static_cast<std::size_t>(i)];
    if (!everybody && !slot.transfer.agreed_layout())
      provisional_layouts_.push_back(static_cast<std::size_t>(i));
    if (common[0][i] > 0 || (!sparse && slot.active())) {
      slot.transfer.agree(0);
    } else if (common[1][i] > 0) {
      slot.transfer.agree(common[1][i]);
    }
  }
}

/// Every rank sees the same checksums, and so throws, or none.
void GradientReducer::compare_checksums() {
  const std::uint64_t cycle = check_.cycles();
  if (!check_.differs(flags_.room(), slots_.size())) return;
  std::string difference;
  try {
    difference = check_.first_difference(checked_, checked_names_, scope_ + ".checksums");
  } catch (const Error& error) {
    difference = std::string("which one could not be found out: ") + error.what();
  }
  const std::string after = cycle == 0
                                ? "before the first update"
                                : "after " + std::to_string(cycle) + " reductions of gradients";
  throw DivergedError(
      "DistributedOptimizer (" + scope_ + "): " + after +
      " the parameters of the ranks are not the same: " + difference +
      "; expected equal parameters on every rank. What is usually forgotten: " +
      (cycle == 0 ? "broadcast_parameters() before training, or after a checkpoint was loaded on "
                    "one rank; step() of the DistributedOptimizer, instead of that "
                    "of the optimizer it wraps"
                  : "broadcast_optimizer_state() after a checkpoint was loaded on one rank; step() "
                    "of the DistributedOptimizer, instead of that "
                    "of the optimizer it wraps; a step() or a change of the learning rate that one "
                    "rank skips; broadcast_parameters() and "
                    "broadcast_optimizer_state() from the rank that join() returns, after it") +
      ". (check_every, HVD_CHECK_EVERY)");
}

}  // namespace hvd::libtorch
