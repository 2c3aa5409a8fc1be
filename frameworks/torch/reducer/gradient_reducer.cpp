#include "reducer/gradient_reducer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/distributed_optimizer.h"
#include "operations/membership.h"
#include "reducer/prefetch.h"
#include "tensors/device_order.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

using torch::autograd::variable_list;
using Parameters = std::vector<ReducedParameter>;

Parameters in_scope_of(Parameters parameters, const GradientReduction& how) {
  for (ReducedParameter& parameter : parameters) parameter.set_scope(how);
  return parameters;
}

std::vector<std::string> names_of(const Parameters& parameters) {
  std::vector<std::string> names;
  for (const auto& parameter : parameters) names.push_back(parameter.name());
  return names;
}

std::vector<torch::Tensor> tensors_of(const Parameters& parameters) {
  std::vector<torch::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.tensor());
  return tensors;
}

std::shared_ptr<const GradientReducer::Identities> identities_of(const Parameters& parameters) {
  const auto identities = std::make_shared<GradientReducer::Identities>();
  for (const auto& parameter : parameters) {
    identities->ordered.push_back(parameter.tensor().unsafeGetTensorImpl());
    identities->all.insert(identities->ordered.back());
  }
  return identities;
}

}  // namespace

GradientReducer::GradientReducer(Parameters parameters, GradientReduction how, int passes_per_step)
    : GradientReducer(std::move(parameters), std::move(how), passes_per_step,
                      std::make_shared<std::atomic<int>>(0)) {}

GradientReducer::GradientReducer(Parameters parameters, const GradientReducer& former)
    : GradientReducer(std::move(parameters), former.how_, former.readiness_.passes_per_step(),
                      former.no_sync_depth_) {
  weights_ = former.weights_;
  if (former.has_reduced()) check_.continue_after_updates();
}

namespace {

Parameters made_anew(const Parameters& parameters) {
  Parameters anew;
  for (const auto& parameter : parameters)
    anew.emplace_back(parameter.name(), parameter.tensor(), parameter.group());
  return anew;
}

GradientReduction in_scope(GradientReduction how, std::string scope) {
  how.scope = std::move(scope);
  return how;
}

}  // namespace

GradientReducer::GradientReducer(const GradientReducer& former, std::string scope)
    : GradientReducer(made_anew(former.parameters_), in_scope(former.how_, std::move(scope)),
                      former.readiness_.passes_per_step(), former.no_sync_depth_) {
  restored_reference_ = former.restored_reference_;
  if (restored_reference_) weights_.adopt_reference(*restored_reference_);
}

GradientReducer::GradientReducer(Parameters parameters, GradientReduction how, int passes_per_step,
                                 std::shared_ptr<std::atomic<int>> no_sync_depth)
    : how_(std::move(how)),
      no_sync_depth_(std::move(no_sync_depth)),
      known_(identities_of(parameters)),
      parameters_(in_scope_of(std::move(parameters), how_)),
      hooks_(tensors_of(parameters_)),
      readiness_(parameters_.size(), passes_per_step,
                 [this](std::size_t i) { return parameters_[i].active(); }),
      agreement_(how_, parameters_),
      units_(how_, parameters_, agreement_),
      weights_(how_.wrapper, how_.scope, membership_of(how_.process_set).ranks,
               membership_of(how_.process_set).position),
      check_(how_, names_of(parameters_), tensors_of(parameters_)),
      finite_(how_),
      exchange_(how_, parameters_, units_, readiness_, check_, weights_) {
  readiness_.set_units(units_.members());
}

void GradientReducer::skip_reduction(const std::weak_ptr<SharedReducer>& self) {
  if (!SingleRankPasses::suffice(how_)) return;
  single_rank_passes_ = std::make_shared<SingleRankPasses>(
      how_.wrapper, parameters_, no_sync_depth_, readiness_.passes_per_step());
  hooks_.remove();
  install_hooks(self);
}

void GradientReducer::compare_frozen(
    const torch::OrderedDict<std::string, torch::Tensor>& parameters) {
  for (const auto& item : parameters) {
    const torch::Tensor& tensor = item.value();
    // A parameter that requires grad and does not belong to this optimizer is trained by another
    // optimizer, and may differ between ranks.
    if (!tensor.defined() || tensor.layout() != torch::kStrided || tensor.requires_grad() ||
        known_->contains(tensor.unsafeGetTensorImpl()))
      continue;
    check_.add_frozen(item.key(), tensor);
  }
}

void GradientReducer::open_device_queue() {
  const auto on_gpu = [](const ReducedParameter& parameter) {
    return parameter.tensor().is_cuda();
  };
  const auto first = std::find_if(parameters_.begin(), parameters_.end(), on_gpu);
  if (first == parameters_.end()) return;
  const auto number =
      torch::zeros({1}, torch::TensorOptions(torch::kFloat32).device(first->tensor().device()));
  std::vector<Submission> submissions;
  submissions.push_back(reduction_in_place(
      how_.scope + ".open", {.op = ReduceOp::kSum, .process_set = how_.process_set}, number));
  begin_after_current_stream(submissions);
  opening_ = std::move(submit_all(std::move(submissions)).front());
}

void GradientReducer::install_hooks(const std::weak_ptr<SharedReducer>& self) {
  if (single_rank_passes_) {
    if (hooks_.complete_so_far()) return;
    const auto count = [passes = single_rank_passes_](std::size_t parameter,
                                                      const variable_list& /*gradients*/) {
      passes->begin_pass(parameter);
      return GradientHooks::Next::kAdd;
    };
    return hooks_.install(count, nullptr);
  }
  readiness_.recheck_expected();
  if (hooks_.complete()) return;  // without allocating the functions
  hooks_.install(
      [self](std::size_t parameter, const variable_list& gradients) {
        const auto alive = self.lock();
        return alive ? locked(*alive, &GradientReducer::before_accumulate, parameter, gradients)
                     : GradientHooks::Next::kAdd;
      },
      [self](std::size_t parameter, const variable_list& gradients) {
        if (const auto alive = self.lock())
          locked(*alive, &GradientReducer::after_accumulate, parameter, gradients);
      });
}

void GradientReducer::remove_hooks() noexcept {
  hooks_.remove();
  for (ReducedParameter& parameter : parameters_) parameter.release();
}

void GradientReducer::drop_gradients() {
  for (const ReducedParameter& parameter : parameters_) parameter.tensor().mutable_grad().reset();
}

/// Refuses create_graph: the graph of a reduced gradient would have to include the other ranks.
void GradientReducer::refuse_create_graph(const ReducedParameter& parameter) const {
  if (!torch::GradMode::is_enabled() || no_sync_depth_->load() > 0) return;
  throw graph_would_be_lost(how_.wrapper, parameter.name());
}

GradientHooks::Next GradientReducer::before_accumulate(std::size_t index,
                                                       const variable_list& gradients) {
  ReducedParameter& parameter = parameters_[index];
  refuse_create_graph(parameter);
  // Module::zero_grad(), or zero_grad() of the wrapped optimizer, has reset the gradients.
  if (was_reset()) abandon();
  if (parameter.was_reset()) {
    readiness_.forget_passes(index);
    weights_.forget_earlier_passes();
  }
  if (!parameter.has_gradient()) parameter.forget_result();
  // This hook runs before the addition, so the gradient that is being reduced is not modified.
  if (readiness_.marked_ready(index))
    throw too_many_passes(how_.wrapper, parameter.name(), readiness_.passes_per_step());
  refuse_scattered(parameter);
  weights_.count_pass();
  if (keeps_results() && parameter.holds_result()) parameter.keep_result();
  if (weights_.drops_gradients()) return GradientHooks::Next::kDrop;
  if (weights_.weighted()) parameter.begin_weighted_pass(weights_.current());
  const bool only_pass = readiness_.passes_per_step() == 1 && no_sync_depth_->load() == 0;
  if (!only_pass || !hooks_.alone(index)) return GradientHooks::Next::kAdd;
  follow_parameters();  // take() copies into the bucket of the current plan
  if (!parameter.take(gradients.front())) return GradientHooks::Next::kAdd;
  finish_pass(index, gradients, /*placed=*/true);
  return GradientHooks::Next::kTaken;
}

/// Refuses to add to a scattered gradient, unless the program has reset it.
void GradientReducer::refuse_scattered(const ReducedParameter& parameter) const {
  if (!scattered_ || !parameter.has_gradient()) return;
  throw UsageError(std::string(how_.wrapper) + ": backward() reached parameter '" +
                   parameter.name() +
                   "' after its gradient was reduced for this step, of which this rank has only "
                   "the part that it updates; expected step() or zero_grad() of the " +
                   how_.wrapper +
                   " first; to add up several backward passes, run all but the last under "
                   "no_sync() before synchronize() or a function that clips");
}

/// Whether a result is set aside before the next reduction. The average of equal gradients is the
/// same gradient, but their sum is not, and a weighted mean has another divisor. The operation of a
/// GradientHook is unknown.
bool GradientReducer::keeps_results() const {
  if (weights_.weighted()) return true;
  return (how_.op != ReduceOp::kAverage || how_.hook) && !how_.reduces_changes &&
         how_.process_set.size() > 1;
}

/// Sets aside the results of parameters that no backward pass has reached. A tensor that the
/// program itself has assigned to `.grad` is a gradient to be reduced.
void GradientReducer::keep_results() {
  if (!keeps_results()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    ReducedParameter& parameter = parameters_[i];
    if (!parameter.active() || readiness_.marked_ready(i)) continue;
    if (parameter.holds_untouched_result() || (reached_ && parameter.holds_result()))
      parameter.keep_result();
  }
}

void GradientReducer::after_accumulate(std::size_t index, const variable_list& gradients) {
  finish_pass(index, gradients, /*placed=*/false);
}

void GradientReducer::finish_pass(std::size_t index, const variable_list& gradients, bool placed) {
  readiness_.set_reduced(false);
  reached_ = true;
  parameters_[index].record_pass();
  if (no_sync_depth_->load() > 0) return;
  if (!readiness_.count_pass(index)) return;
  try {
    prepare_gradient(index, gradients, placed);
    // Until the ranks have compared their parameters, another rank might not have this parameter.
    const std::size_t unit = readiness_.unit_of(index);
    // Weighted gradients cannot be sent until the ranks have agreed on a reference.
    const bool may_submit =
        agreement_.same_parameters() && (!weights_.weighted() || weights_.agreed());
    prefetch_next(unit);
    if (may_submit && readiness_.unit_ready(unit)) exchange_.submit(unit);
  } catch (...) {
    readiness_.withdraw(index);
    parameters_[index].release();
    throw;
  }
}

/// The tensors of a large model have left the cache since the last step. Loads those of the next
/// gradients in stages while autograd computes them, because each stage follows pointers that the
/// stage before has loaded.
void GradientReducer::prefetch_next(std::size_t unit) const noexcept {
  if (const auto next = readiness_.likely_next(unit, 0)) parameters_[*next].prefetch_memory();
  if (const auto second = readiness_.likely_next(unit, 1)) parameters_[*second].prefetch();
  if (const auto third = readiness_.likely_next(unit, 2)) {
    const auto* const begin = reinterpret_cast<const char*>(&parameters_[*third]);
    __builtin_prefetch(begin);
    __builtin_prefetch(begin + kCacheLine);
  }
}

/// Changes the units if the program has frozen, unfrozen or replaced parameters.
void GradientReducer::follow_parameters() {
  if (!readiness_.in_cycle() && units_.follow_parameters()) readiness_.set_units(units_.members());
}

void GradientReducer::prepare_gradient(std::size_t index, const variable_list& gradients,
                                       bool placed) {
  ReducedParameter& parameter = parameters_[index];
  if (!placed) follow_parameters();
  units_[readiness_.unit_of(index)].stream.follow(parameter.tensor());
  if (!agreement_.same_parameters()) refuse_capture(parameter);
  if (how_.error_if_nonfinite) finite_.inspect(index, parameter.tensor().grad());
  if (weights_.weighted() && weights_.agreed())
    parameter.weigh(weights_.current(), weights_.reference());
  if (!parameter.view().defined()) {
    parameter.detect_sharing(gradients);
  } else if (!placed) {
    parameter.place(how_);
  }
  parameter.guard();
  readiness_.mark_ready(index, agreement_.waits_for_layout(parameter));
  if (!first_with_gradient_ && parameter.had_gradient()) first_with_gradient_ = index;
}

/// Refuses a gradient during the capture of a graph, because it could not be submitted later.
void GradientReducer::refuse_capture(const ReducedParameter& parameter) const {
  const torch::Tensor& tensor = parameter.tensor();
  if (!tensor.is_cuda() || !is_supported(tensor.scalar_type())) return;
  Submission probe = reduction_in_place(parameter.label(), how_, tensor);
  begin_after_current_stream(probe);
}

void GradientReducer::submit_rest() {
  follow_parameters();
  if (!agreement_.same_parameters()) agreement_.compare_parameters();
  if (agreement_.layouts_in_doubt()) agreement_.agree_on_layouts();
  exchange_.close_weights();
  keep_results();
  if (how_.error_if_nonfinite) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].active() && !readiness_.marked_ready(i))
        finite_.inspect(i, parameters_[i].tensor().grad());
    }
  }
  if (weights_.weighted()) weigh_gradients();
  exchange_.submit_rest();
}

void GradientReducer::weigh_gradients() {
  if (!weights_.agreed()) exchange_.reduce_flags_first();
  for (ReducedParameter& parameter : parameters_) {
    if (parameter.active()) parameter.weigh(weights_.current(), weights_.reference());
  }
}

void GradientReducer::raise_if_nonfinite() {
  if (!how_.error_if_nonfinite) return;
  const std::string difference = finite_.difference(parameters_);
  if (difference.empty()) return;
  throw NonFiniteError(std::string(how_.wrapper) + " (" + how_.scope +
                       "): before they were reduced the gradients were not finite: " + difference +
                       "; expected numbers on every rank; look at that rank's batch and loss");
}

/// Programs reset all gradients at once, so one gradient represents all.
bool GradientReducer::was_reset() const {
  return first_with_gradient_ && parameters_[*first_with_gradient_].was_reset();
}

/// Ends the cycle of a set of one rank. @return false, without an effect, if a gradient is not
/// dense
bool GradientReducer::finish_alone() {
  bool any_gradient = false;
  for (const ReducedParameter& parameter : parameters_) {
    const torch::Tensor& gradient = parameter.tensor().grad();
    if (!gradient.defined()) continue;
    if (gradient.layout() != torch::kStrided) return false;
    any_gradient = true;
  }
  warn_without_gradients(any_gradient);
  check_.end_cycle(false, false, false);
  readiness_.end_cycle();
  single_rank_passes_->end_cycle();
  readiness_.set_reduced(true);
  return true;
}

void GradientReducer::synchronize() {
  if (reduced()) return;
  if (single_rank_passes_ && finish_alone()) return;
  dropped_in_a_row_ = 0;
  bool interruptible = false;
  try {
    submit_rest();
    interruptible = true;
    exchange_.wait_with_check();
    interruptible = false;
    exchange_.wait();
    raise_if_nonfinite();
    // This call and check_parameters() are collective, so they precede errors that only this rank
    // may have.
    exchange_.explain_mismatch();
    exchange_.raise_if_error();
    exchange_.wait_on_host();
    exchange_.check_parameters();
    weights_.raise_if_error();
    exchange_.raise_if_written();
    weights_.refuse_late();
    warn_without_gradients(exchange_.any_used());
    exchange_.complete();
  } catch (...) {
    if (interruptible) throw;  // the operations continue, and another call waits for them
    exchange_.wait();
    exchange_.drop_results();
    end_cycle();
    throw;
  }
  std::vector<std::size_t> order;
  if (units_.learning()) order = readiness_.order_of_arrival();
  end_cycle();
  // Set before buckets are made, which may throw, because gradients must not be reduced twice.
  readiness_.set_reduced(true);
  scattered_ = how_.sharded && how_.process_set.size() > 1;
  if (!order.empty() && units_.learn(std::move(order))) readiness_.set_units(units_.members());
}

/// A closure may be evaluated several times before the step that uses the gradients.
void GradientReducer::begin_cycle() {
  readiness_.set_reduced(false);
  scattered_ =
      scattered_ && std::any_of(parameters_.begin(), parameters_.end(),
                                [](const auto& parameter) { return parameter.has_gradient(); });
}

/// Other ranks may have submitted more gradients, so the cycle is completed instead of cancelled.
void GradientReducer::abandon() {
  try {
    submit_rest();
    exchange_.wait();
    // These are the collectives of synchronize(), which other ranks may call, up to its first
    // error.
    const bool finite = !how_.error_if_nonfinite || finite_.difference(parameters_).empty();
    warn_of_dropped();
    if (finite) explain_dropped();
    if (finite && exchange_.succeeded()) exchange_.check_parameters();
    exchange_.drop_results();
  } catch (...) {
    exchange_.wait();
    exchange_.drop_results();
    end_cycle();
    throw;
  }
  end_cycle();
}

/// Takes part in the search for the ranks without a weight, and ignores its result, since this rank
/// drops the gradients.
void GradientReducer::explain_dropped() const {
  try {
    exchange_.explain_mismatch();
  } catch (const MismatchError&) {
    return;
  }
}

void GradientReducer::warn_of_dropped() {
  constexpr int kSuspicious = 5;
  if (++dropped_in_a_row_ != kSuspicious) return;
  TORCH_WARN(how_.wrapper, ": gradients were reduced over the ranks and then dropped ", kSuspicious,
             " times in a row, without a step() or synchronize() of this ", how_.wrapper,
             ". If parameters are updated all the same, every rank updates "
             "its own with gradients of its own: call step() of the ",
             how_.wrapper, ", not of the optimizer that it wraps. (", how_.scope, ")");
}

void GradientReducer::warn_without_gradients(bool any_gradient) {
  if (warned_without_gradients_ || any_gradient) return;
  const bool any_active = std::any_of(parameters_.begin(), parameters_.end(),
                                      [](const auto& parameter) { return parameter.active(); });
  if (!any_active) return;
  warned_without_gradients_ = true;
  TORCH_WARN(
      how_.wrapper, " (", how_.scope,
      "): step() without a gradient: no rank has one of any parameter. Expected a backward() "
      "since zero_grad(), through the parameters that the ",
      how_.wrapper,
      " was constructed with. Usual causes: it was not constructed again after the "
      "model was replaced; zero_grad() was called between backward() and step() instead of "
      "before backward()");
}

void GradientReducer::discard() {
  if (single_rank_passes_ && !readiness_.in_cycle()) {
    readiness_.end_cycle();
    return single_rank_passes_->end_cycle();
  }
  if (readiness_.in_cycle()) abandon();
  end_cycle();
  for (ReducedParameter& parameter : parameters_) parameter.forget_result();
  scattered_ = false;
}

void GradientReducer::end_cycle() {
  exchange_.end_cycle();
  units_.end_cycle();
  agreement_.end_cycle();
  readiness_.end_cycle();
  weights_.end_cycle();
  finite_.end_cycle();
  if (single_rank_passes_) single_rank_passes_->end_cycle();
  first_with_gradient_.reset();
  reached_ = false;
}

std::uint64_t GradientReducer::gradients_version() const { return readiness_.cycles(); }

bool GradientReducer::in_flight() const {
  return readiness_.in_cycle() || (single_rank_passes_ && single_rank_passes_->complete());
}

void GradientReducer::refuse_weight() const {
  if (how_.op == ReduceOp::kAverage) return;
  throw UsageError(
      std::string(how_.wrapper) + ": weight: a weighted mean over samples needs op average, got " +
      std::string(to_string(how_.op)) + "; use ReduceOp::kAverage, or do not set a weight");
}

void GradientReducer::set_weight(std::int64_t samples) {
  refuse_weight();
  weights_.set(samples);
}

void GradientReducer::begin_pass(std::optional<std::int64_t> samples) {
  if (samples) refuse_weight();
  weights_.begin_pass(samples);
}

void GradientReducer::set_passes_per_step(int passes) {
  readiness_.set_passes_per_step(passes);
  if (single_rank_passes_) single_rank_passes_->set_passes_per_step(passes);
}

}  // namespace hvd::libtorch
