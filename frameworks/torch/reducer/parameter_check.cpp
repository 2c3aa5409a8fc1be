#include "reducer/parameter_check.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/object.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {
namespace {

/// The cycle of an early check, since a short trial run may end before the first regular check.
constexpr std::uint64_t kSoon = 10;

/// Replaces all values and complements of a rank that does not contribute to the maximum.
constexpr std::int64_t kNoValue = std::numeric_limits<std::int64_t>::min();

/// Memory for a result of a GPU. A copy to pinned memory does not wait for the GPU.
torch::Tensor host_memory_for(const torch::Tensor& on_gpu) {
  const auto on_host = on_gpu.options().device(torch::kCPU);
  try {
    return torch::empty(on_gpu.sizes(), on_host.pinned_memory(true));
  } catch (const c10::Error&) {
    return torch::empty(on_gpu.sizes(), on_host);
  }
}

/// The values and the message of a rank that has no memory for its fingerprints. The rank takes
/// part, because the other ranks wait for it, but does not contribute to the maximum. If the GPU
/// lacks memory even for these few bytes, the message is on the host, and every rank gets a
/// MismatchError.
std::pair<torch::Tensor, torch::Tensor> without_values(std::int64_t count, torch::Device gpu) {
  const auto on_host = torch::TensorOptions(torch::kInt64);
  try {
    return {torch::full({count}, kNoValue, on_host.device(gpu)),
            torch::full({2 * count}, kNoValue, on_host.device(gpu))};
  } catch (const c10::OutOfMemoryError&) {
    return {torch::full({count}, kNoValue, on_host), torch::full({2 * count}, kNoValue, on_host)};
  }
}

/// "rank 2 from ranks 0 and 1": the largest group of ranks that agree is treated as correct.
std::string differing_ranks(const std::map<int, std::int64_t>& value_of_rank,
                            Comparison comparison) {
  std::vector<int> most, others;
  for (const auto& [candidate_rank, candidate] : value_of_rank) {
    std::vector<int> with, without;
    for (const auto& [rank, value] : value_of_rank) {
      const bool same = !differ(std::min(value, candidate), std::max(value, candidate), comparison);
      (same ? with : without).push_back(rank);
    }
    if (with.size() <= most.size()) continue;
    most = std::move(with);
    others = std::move(without);
  }
  return text(rank_list(others), " from ", rank_list(most));
}

}  // namespace

ParameterCheck::ParameterCheck(const GradientReduction& how, const std::vector<std::string>& names,
                               const std::vector<torch::Tensor>& parameters)
    : wrapper_(how.wrapper),
      scope_(how.scope),
      every_(how.check_every),
      set_(how.process_set),
      options_(how.options) {
  for (std::size_t i = 0; i < parameters.size(); ++i)
    items_.push_back({names[i], parameters[i], Role::kTrained});
  for (const auto& [name, tensor] : how.statistics)
    items_.push_back({name, tensor, Role::kStatistics});
}

void ParameterCheck::add_frozen(const std::string& name, const torch::Tensor& parameter) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(cycles_ == 0);
  items_.push_back({name, parameter, Role::kFrozen});
}

void ParameterCheck::continue_after_updates() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(cycles_ == 0);
  cycles_ = 1;
  soon_ = true;
}

bool ParameterCheck::is_due() const {
  if (every_ == 0 || set_.size() == 1) return false;
  const bool first_regular_is_late = every_ > static_cast<int>(kSoon);
  return cycles_ == 0 || soon_ || (cycles_ == kSoon && first_regular_is_late) ||
         since_ + 1 >= every_;
}

void ParameterCheck::end_cycle(bool due, bool updated, bool all_under_way) {
  const std::uint64_t cycle = cycles_++;
  ++since_;
  if (received_at_) {
    received_at_->synchronize();
    received_at_.reset();
    // A rank that has just returned from join() has no result, and would not take part in the
    // search for a difference.
    if (all_under_way)
      compare(received_.const_data_ptr<std::int64_t>(), compared_.size() + 1);
    else
      soon_ = true;
  }
  if (!due) return;
  since_ = 0;
  soon_ = false;
  checked_cycle_ = cycle;
  comparison_ = updated ? Comparison::kProjection : Comparison::kExact;
  begin_check();
}

/// Fills `compared_` and `values_`. Returns the GPU tensors whose projections are still missing in
/// `values_`.
std::vector<torch::Tensor> ParameterCheck::choose_compared() {
  std::vector<std::size_t> gpu_items;
  std::vector<torch::Tensor> on_gpu;
  compared_.clear();
  values_.assign(1, options_ ? hash_of(options_()) : 0);
  for (std::size_t i = 0; i < items_.size(); ++i) {
    const ComparedTensor& item = items_[i];
    const bool takes_part = comparison_ == Comparison::kExact
                                ? item.role != Role::kStatistics
                                : item.role == Role::kStatistics ||
                                      (item.role == Role::kTrained && item.tensor.requires_grad());
    if (!takes_part) continue;
    if (item.tensor.is_cuda()) {
      gpu_items.push_back(i);
      on_gpu.push_back(item.tensor);
    } else {
      compared_.push_back(i);
      values_.push_back(fingerprint_of(item.tensor, comparison_));
    }
  }
  compared_.insert(compared_.end(), gpu_items.begin(), gpu_items.end());
  if (comparison_ == Comparison::kExact && !on_gpu.empty()) {
    const std::vector<std::int64_t> hashes = gpu_hashes(on_gpu);
    values_.insert(values_.end(), hashes.begin(), hashes.end());
    on_gpu.clear();
  }
  return on_gpu;
}

void ParameterCheck::begin_check() {
  const torch::NoGradGuard no_grad;
  const std::vector<torch::Tensor> on_gpu = choose_compared();
  gpu_values_ = torch::Tensor();
  on_gpu.empty() ? exchange_on_host() : exchange_on_gpu(on_gpu);
}

// Sends complements too: the largest complement is that of the smallest value. Unlike a negative, a
// complement cannot overflow.
void ParameterCheck::exchange_on_host() {
  const std::size_t count = values_.size();
  if (!message_.defined() || message_.is_cuda() ||
      message_.numel() != static_cast<std::int64_t>(2 * count)) {
    message_ = torch::empty({static_cast<std::int64_t>(2 * count)}, torch::kInt64);
    const GradientReduction largest{.op = ReduceOp::kMax, .process_set = set_};
    submission_ = reduction_in_place(scope_ + ".check", largest, message_);
  }
  auto* const message = message_.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < count; ++i) {
    message[i] = values_[i];
    message[count + i] = ~values_[i];
  }
  run(false);
  compare(message, count);
}

void ParameterCheck::exchange_on_gpu(const std::vector<torch::Tensor>& on_gpu) {
  const torch::Device gpu = on_gpu.front().device();
  try {
    const torch::Tensor others = torch::tensor(values_, torch::kInt64).to(gpu, true);
    gpu_values_ = torch::cat({others, gpu_projections(on_gpu)});
    message_ = torch::cat({gpu_values_, gpu_values_.bitwise_not()});
  } catch (const c10::OutOfMemoryError&) {
    std::tie(gpu_values_, message_) =
        without_values(static_cast<std::int64_t>(compared_.size() + 1), gpu);
  }
  const GradientReduction largest{.op = ReduceOp::kMax, .process_set = set_};
  submission_ = reduction_in_place(scope_ + ".check", largest, message_);
  begin_after_current_stream(submission_);
  run(true);
  received_ = host_memory_for(message_);
  received_.copy_(message_, /*non_blocking=*/true);
  received_at_.emplace(torch::kCUDA);
  received_at_->record(*current_stream_of(message_));
}

void ParameterCheck::run(bool wait_for_stream) {
  submit_all({&submission_, 1}, {&operation_, 1}, Progress::kCaller);
  operation_.wait();
  if (!operation_.status().ok()) message_ = torch::Tensor();  // it may still be in use
  try {
    operation_.status().raise_if_error();
  } catch (const MismatchError& error) {
    throw_diverged(std::string("which one could not be found out: ") + error.what());
  }
  if (wait_for_stream) current_stream_waits(operation_);
}

/// @param largest the largest values of all ranks, followed by the largest complements @param count
/// the number of values
void ParameterCheck::compare(const std::int64_t* largest, std::size_t count) {
  if (largest[0] == kNoValue && largest[count] == kNoValue) return;  // no rank has contributed
  if (~largest[count] != largest[0]) throw_of_options();
  const std::string* first_statistics = nullptr;
  std::size_t statistics = 0;
  bool nonfinite = false;
  for (std::size_t i = 1; i < count; ++i) {
    const std::int64_t least = ~largest[count + i];
    const ComparedTensor& item = items_[compared_[i - 1]];
    if (item.role != Role::kStatistics)
      nonfinite = nonfinite || (comparison_ == Comparison::kProjection && largest[i] == kNotFinite);
    if (!differ(least, largest[i], comparison_)) continue;
    if (item.role != Role::kStatistics) throw_diverged(difference_at(i));
    if (statistics++ == 0) first_statistics = &item.name;
  }
  if (nonfinite) warn_of_nonfinite();
  if (statistics > 0) warn_of_statistics(*first_statistics, statistics - 1);
}

/// Collective over the set. @param index of a value
std::string ParameterCheck::difference_at(std::size_t index) {
  const std::string& name = items_[compared_[index - 1]].name;
  try {
    const std::int64_t own =
        gpu_values_.defined() ? gpu_values_[static_cast<std::int64_t>(index)].item<std::int64_t>()
                              : values_[index];
    std::map<int, std::int64_t> value_of_rank;
    for (const auto& [rank, value] : allgather_object(
             std::pair(rank(), own), {.name = scope_ + ".checksums", .process_set = set_}))
      if (value != kNoValue) value_of_rank[rank] = value;
    return text("'", name, "' differs on ", differing_ranks(value_of_rank, comparison_));
  } catch (const Error& error) {
    return text("'", name, "' differs; on which ranks could not be found out: ", error.what());
  }
}

void ParameterCheck::throw_diverged(const std::string& difference) const {
  const std::uint64_t cycle = checked_cycle_;
  const std::string after =
      cycle == 0 ? "before the first update" : text("after ", cycle, " reductions of gradients");
  const std::string usual =
      cycle == 0
          ? text(
                "a missing broadcast_parameters() before training, or after a checkpoint was "
                "loaded on one rank; a step() of the wrapped optimizer instead of the ",
                wrapper_,
                "'s. If parameters are to differ between ranks, give them to another optimizer; if "
                "those are frozen, do not construct the ",
                wrapper_, " with them")
          : text(
                "a missing broadcast_optimizer_state() after a checkpoint was loaded on one rank; "
                "a step() of the wrapped optimizer instead of the ",
                wrapper_,
                "'s; a step() or a change of the learning rate that one rank skips; after join(), "
                "a missing broadcast_parameters() and broadcast_optimizer_state() from the rank "
                "that it returns");
  throw DivergedError(text(wrapper_, " (", scope_, "): ", after,
                           " the parameters of the ranks are not the same: ", difference,
                           "; expected equal parameters on every rank. Frequent causes: ", usual,
                           ". (check_every, HVD_CHECK_EVERY)"));
}

/// Collective over the set.
void ParameterCheck::throw_of_options() const {
  const auto all = allgather_object(std::pair(rank(), options_()),
                                    {.name = scope_ + ".options", .process_set = set_});
  std::string difference = "they have become equal again";
  const auto& [first_rank, first] = all.front();
  for (const auto& [other_rank, other] : all) {
    const auto [mine, theirs] =
        std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    if (mine == first.end() || theirs == other.end()) continue;
    difference = text("rank ", first_rank, " has ", *mine, ", rank ", other_rank, " has ", *theirs);
    break;
  }
  throw DivergedError(text(
      wrapper_, " (", scope_, "): the options of the ranks are not the same: ", difference,
      "; expected the same on every rank, as each updates a part of the parameters. A scheduler "
      "that decides by a metric needs the same metric on every rank: allreduce() it first. "
      "(check_every, HVD_CHECK_EVERY)"));
}

void ParameterCheck::warn_of_nonfinite() {
  if (std::exchange(warned_of_nonfinite_, true)) return;
  TORCH_WARN(wrapper_, " (", scope_, "): after ", checked_cycle_,
             " reductions of gradients the parameters contain inf or nan on every rank, as the "
             "gradients of one rank did before. To find out which rank and parameter were the "
             "first, run again with DistributedOptimizerOptions::error_if_nonfinite");
}

void ParameterCheck::warn_of_statistics(const std::string& first, std::size_t others) {
  if (std::exchange(warned_of_statistics_, true) || set_.rank() != 0) return;
  TORCH_WARN(wrapper_, " (", scope_, "): after ", checked_cycle_,
             " reductions of gradients the ranks have different BatchNorm statistics, each of its "
             "own batches: '",
             first, "'", others > 0 ? text(" and ", others, " more buffers") : "",
             ". In eval() each rank then computes with another model. Convert the model with "
             "convert_sync_batchnorm(), or call broadcast_parameters() before an evaluation and "
             "before a checkpoint. (check_every, HVD_CHECK_EVERY)");
}

}  // namespace hvd::libtorch
