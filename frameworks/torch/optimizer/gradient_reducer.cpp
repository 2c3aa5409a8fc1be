#include "optimizer/gradient_reducer.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/operations.h"
#include "optimizer/gradient_guard.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

using torch::autograd::variable_list;

class LambdaPreHook : public torch::autograd::FunctionPreHook {
 public:
  explicit LambdaPreHook(std::function<void()> run) : run_(std::move(run)) {}
  variable_list operator()(const variable_list& gradients) override {
    run_();
    return gradients;
  }

 private:
  std::function<void()> run_;
};

/// Older LibTorch cannot take a post hook away; what stays finds its reducer gone and does nothing.
template <class Node>
void delete_post_hook(Node& node, std::uintptr_t key) {
  if constexpr (requires { node.del_post_hook(key); }) node.del_post_hook(key);
}

}  // namespace

GradientReducer::GradientReducer(std::string scope, std::vector<Parameter> parameters,
                                 GradientReduction how, int passes_per_step)
    : scope_(std::move(scope)), how_(how), passes_per_step_(passes_per_step), check_(how) {
  for (Parameter& parameter : parameters) {
    Slot slot;
    slot.name = std::move(parameter.name);
    slot.label = scope_ + "." + slot.name;
    slot.transfer = GradientTransfer(std::move(parameter.tensor));
    slot.group = parameter.group;
    parameters_.push_back(slot.transfer.parameter());
    checked_.push_back(parameters_.back());
    checked_names_.push_back(slot.name);
    known_.insert(parameters_.back().unsafeGetTensorImpl());
    slots_.push_back(std::move(slot));
  }
  add_units_without_bucket();
}

/// As the user has grouped the parameters.
void GradientReducer::add_units_without_bucket() {
  std::map<int, std::size_t> unit_of_group;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].transfer.view().defined()) continue;
    const int group = slots_[i].group;
    const auto [known, added] = unit_of_group.try_emplace(group, units_.size());
    const bool alone = group < 0;
    slots_[i].unit = alone ? units_.size() : known->second;
    if (alone || added) {
      units_.push_back(
          {.group = alone ? "" : scope_ + ".group" + std::to_string(group), .slots = {}});
    }
    units_[slots_[i].unit].slots.push_back(i);
  }
}

void GradientReducer::compare_also(
    const torch::OrderedDict<std::string, torch::Tensor>& parameters) {
  for (const auto& item : parameters) {
    const torch::Tensor& tensor = item.value();
    if (!tensor.defined() || tensor.layout() != torch::kStrided || has(tensor)) continue;
    checked_.push_back(tensor);
    checked_names_.push_back(item.key());
  }
}

void GradientReducer::install_hooks() {
  const std::lock_guard lock(mutex_);
  if (buckets_ == Buckets::kUsed && !buckets_fit()) forget_buckets();
  for (Unit& unit : units_) unit.ready = 0;  // a parameter may have become active
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.active()) continue;
    // Module::to() with another dtype replaces a parameter's accumulator.
    if (slot.accumulator && torch::autograd::impl::try_get_grad_accumulator(
                                slot.transfer.parameter()) == slot.accumulator) {
      continue;
    }
    unhook(slot);
    hook(i);
  }
}

void GradientReducer::hook(std::size_t index) {
  Slot& slot = slots_[index];
  slot.accumulator = torch::autograd::impl::grad_accumulator(slot.transfer.parameter());
  const std::weak_ptr<GradientReducer> weak = weak_from_this();
  auto before = std::make_unique<LambdaPreHook>([weak, index] {
    if (const auto self = weak.lock()) self->before_accumulate(index);
  });
  slot.pre_hook = before.get();
  slot.accumulator->add_pre_hook(std::move(before));
  slot.post_hook =
      slot.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [weak, index](const variable_list& outputs, const variable_list& gradients) {
            if (const auto self = weak.lock()) self->after_accumulate(index, gradients);
            return outputs;
          }));
}

void GradientReducer::unhook(Slot& slot) noexcept {
  if (!slot.accumulator) return;
  auto& hooks = slot.accumulator->pre_hooks();
  std::erase_if(hooks, [&](const auto& hook) { return hook.get() == slot.pre_hook; });
  delete_post_hook(*slot.accumulator, slot.post_hook);
  slot.accumulator = {};
}

void GradientReducer::remove_hooks() noexcept {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    unhook(slot);
    slot.transfer.release();
  }
}

/// A graph of a gradient would have to lead through the other ranks. Under no_sync() it does not.
void GradientReducer::refuse_create_graph(const Slot& slot) const {
  if (!torch::GradMode::is_enabled() || no_sync_depth_->load() > 0) return;
  throw UsageError(
      "DistributedOptimizer: backward(create_graph = true) reached parameter '" + slot.name +
      "', whose gradient would be reduced and lose its graph; expected a backward() without "
      "create_graph; compute what needs the graph with "
      "torch::autograd::grad(), or under no_sync() and detach_() the gradients before step()");
}

void GradientReducer::before_accumulate(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  refuse_create_graph(slot);
  // The gradients were reset behind our back (Module::zero_grad, or the wrapped optimizer's): so is
  // their cycle.
  if (was_reset()) abandon();
  if (!slot.transfer.has_gradient()) slot.passes = 0;
  if (slot.phase == Phase::kIdle) return;
  // Nothing has been added yet: the gradient that is being reduced stays intact.
  throw UsageError("DistributedOptimizer: backward() reached parameter '" + slot.name +
                   "' again after its gradient was handed over for this step (expected " +
                   std::to_string(passes_per_step_) +
                   " backward pass(es) per step); call step() or zero_grad() first, raise "
                   "backward_passes_per_step, or "
                   "accumulate under no_sync()");
}

void GradientReducer::after_accumulate(std::size_t index, const variable_list& gradients) {
  const std::lock_guard lock(mutex_);
  synchronized_ = false;
  if (no_sync_depth_->load() > 0) return check_stays_in_place(index);
  Slot& slot = slots_[index];
  if (++slot.passes < passes_per_step_) return;
  try {
    hand_over(slot, gradients);
    if (!first_ready_) first_ready_ = index;
    if (buckets_ == Buckets::kUnknown) arrivals_.push_back(index);
    // Before the ranks have compared their parameters nothing is sent that another rank might not
    // have.
    if (!same_parameters_ || !unit_ready(units_[slot.unit])) return;
    submit_units({&slot.unit, 1}, all_ready_after(slot.unit), Progress::kBackground);
  } catch (...) {
    slot.phase = Phase::kIdle;
    slot.transfer.release();
    units_[slot.unit].ready = 0;
    throw;
  }
}

void GradientReducer::hand_over(Slot& slot, const variable_list& gradients) {
  units_[slot.unit].stream.follow(slot.transfer.parameter());
  if (!same_parameters_) refuse_capture(slot);
  if (slot.transfer.view().defined()) {
    slot.transfer.place(slot.label, how_);
  } else {
    slot.transfer.note_sharing(gradients);
  }
  slot.transfer.guard(slot.name);
  slot.phase = Phase::kReady;
}

/// What is not submitted yet could not be later, if a graph is being captured now.
void GradientReducer::refuse_capture(const Slot& slot) const {
  const torch::Tensor& parameter = slot.transfer.parameter();
  if (!parameter.is_cuda() || !is_supported(parameter.scalar_type())) return;
  Submission probe = reduction_in_place(slot.label, how_, view_of(parameter));
  begin_after_current_stream(probe);
}

/// A graph that is being captured writes where this gradient is now, at every replay; buckets would
/// take its place sooner or later. One parameter of a pass stands for all.
void GradientReducer::check_stays_in_place(std::size_t index) const {
  const torch::Tensor& parameter = slots_[index].transfer.parameter();
  const auto first =
      std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.active(); });
  if (!parameter.is_cuda() || first - slots_.begin() != static_cast<std::ptrdiff_t>(index)) return;
  const bool stays =
      !wants_buckets() || std::none_of(slots_.begin(), slots_.end(),
                                       [this](const Slot& slot) { return might_fit_bucket(slot); });
  if (stays) return;
  try {
    record_current_stream();
  } catch (const UsageError&) {
    throw UsageError(
        "DistributedOptimizer: a backward() under no_sync() is being captured into a CUDA graph, "
        "and gradients are views of buckets, "
        "which later steps may replace; expected gradients that stay where a replay writes them; "
        "construct the optimizer "
        "with gradient_as_bucket_view = false");
  }
}

/// Looks at each slot once in a cycle, since a bucket may have a thousand.
bool GradientReducer::unit_ready(Unit& unit) const {
  while (unit.ready < unit.slots.size()) {
    const Slot& slot = slots_[unit.slots[unit.ready]];
    if (slot.active() && (slot.phase != Phase::kReady || waits_for_layout(slot))) return false;
    ++unit.ready;
  }
  return true;
}

bool GradientReducer::waits_for_layout(const Slot& slot) const {
  return how_.sparse == SparseGradients::kReduceSparse && !slot.transfer.agreed_layout() &&
         slot.transfer.own_layout().value_or(0) > 0;
}

/// Whether no active parameter is left over once this unit is submitted: the flags can then travel
/// with it.
bool GradientReducer::all_ready_after(std::size_t unit) const {
  return !flags_submitted_ && std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return !slot.active() || slot.phase == Phase::kSubmitted || slot.unit == unit;
  });
}

void GradientReducer::submit_one(const Submission& submission, Progress progress) {
  operations_.emplace_back();
  try {
    submit_all({&submission, 1}, {&operations_.back(), 1}, progress);
  } catch (...) {
    operations_.pop_back();
    throw;
  }
}

void GradientReducer::note_submitted(std::size_t unit) {
  units_[unit].submitted = true;
  for (const std::size_t i : units_[unit].slots) {
    if (!slots_[i].active()) continue;
    slots_[i].phase = Phase::kSubmitted;
    submitted_.push_back(i);
  }
}

// Buckets and flags are the same from step to step, so that a steady step allocates nothing here.
void GradientReducer::submit_units(std::span<const std::size_t> units, bool with_flags,
                                   Progress progress) {
  std::vector<Submission> others;
  for (const std::size_t u : units) {
    if (!units_[u].bucket) {
      add_submissions(u, others);
      continue;
    }
    follow_streams(units_[u]);
    place_in_bucket(units_[u]);
    begin_after_current_stream(units_[u].bucket->submission());
    submit_one(units_[u].bucket->submission(), progress);
    note_submitted(u);
  }
  begin_after_current_stream(
      others);  // first, as nothing may be read from a GPU whose stream is being captured
  if (with_flags) {
    const Submission& flags = flags_.prepare(
        scope_, how_, slots_.front().transfer.parameter(), slots_.size(),
        [this](std::size_t i) { return slots_[i].transfer.has_gradient(); },
        check_.room(parameters_.front()),
        [this](std::span<float> room) { check_.write(checked_, room); });
    if (others.empty()) {
      submit_one(flags, progress);
    } else {
      others.push_back(flags);  // in the same message as the rest
    }
  }
  if (!others.empty()) {
    for (Operation& operation : submit_all(std::move(others), progress))
      operations_.push_back(std::move(operation));
    for (const std::size_t u : units) {
      if (!units_[u].bucket) note_submitted(u);
    }
  }
  flags_submitted_ = flags_submitted_ || with_flags;
}

/// Nothing on the CPU.
void GradientReducer::follow_streams(Unit& unit) {
  for (const std::size_t i : unit.slots) unit.stream.follow(slots_[i].transfer.parameter());
}

/// What has no gradient counts as zeros.
void GradientReducer::place_in_bucket(const Unit& unit) {
  for (const std::size_t i : unit.slots) {
    Slot& slot = slots_[i];
    if (slot.active() && slot.phase != Phase::kReady) slot.transfer.place(slot.label, how_);
  }
}

void GradientReducer::add_submissions(std::size_t unit, std::vector<Submission>& submissions) {
  const std::size_t first = submissions.size();
  follow_streams(units_[unit]);
  for (const std::size_t i : units_[unit].slots) {
    Slot& slot = slots_[i];
    if (!slot.active()) continue;
    std::vector<Submission> parts = slot.transfer.prepare(slot.label, how_);
    if (parts.size() > 1) make_group(slot.label, parts);
    std::move(parts.begin(), parts.end(), std::back_inserter(submissions));
  }
  if (!units_[unit].group.empty())
    make_group(units_[unit].group, std::span(submissions).subspan(first));
}

void GradientReducer::submit_rest() {
  if (buckets_ == Buckets::kUsed && !in_cycle() && !buckets_fit()) forget_buckets();
  if (!same_parameters_) compare_parameters();
  if (layouts_in_doubt()) agree_on_layouts();
  std::vector<std::size_t> rest;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].submitted) rest.push_back(u);
  }
  submit_units(rest, !flags_submitted_ && !slots_.empty(), Progress::kCaller);
}

bool GradientReducer::was_reset() const {
  // Whoever resets gradients resets all, so one stands for them.
  return first_ready_ && !slots_[*first_ready_].transfer.has_gradient();
}

void GradientReducer::wait_all() const {
  for (const Operation& operation : operations_) operation.wait();
  for (const Operation& operation : operations_) current_stream_waits(operation);
}

/// Whoever has written to a gradient that was being reduced has changed it on this rank only.
void GradientReducer::refuse_written() {
  const std::string* written = nullptr;
  for (const std::size_t i : submitted_) {
    if (slots_[i].transfer.release() && written == nullptr) written = &slots_[i].name;
  }
  if (written == nullptr) return;
  throw UsageError("DistributedOptimizer: the gradient of '" + *written +
                   "' was written to between backward() and step(), while it was being reduced "
                   "over the ranks; " +
                   right_order());
}

void GradientReducer::synchronize() {
  const std::lock_guard lock(mutex_);
  if (synchronized_) return;
  dropped_in_a_row_ = 0;
  try {
    submit_rest();
    wait_all();
    for (const Operation& operation : operations_) operation.status().raise_if_error();
    refuse_written();
    if (!slots_.empty()) {
      flags_.read();
      compare_checksums();
      for (const std::size_t i : submitted_) slots_[i].transfer.complete(flags_.used(i));
    }
  } catch (...) {
    wait_all();
    reset();
    throw;
  }
  std::vector<std::size_t> order;
  if (buckets_ == Buckets::kUnknown) order = order_of_arrival();
  reset();
  // Whatever becomes of the buckets: gradients must not be reduced twice.
  synchronized_ = true;
  if (!order.empty()) learn_buckets(order);
}

void GradientReducer::begin_cycle() {
  const std::lock_guard lock(mutex_);
  synchronized_ = false;
}

/// Other ranks may have submitted what this one has not, so the cycle is completed rather than cut
/// off.
void GradientReducer::abandon() {
  try {
    submit_rest();
    wait_all();
    warn_of_dropped();
    // Ranks that step do the same.
    const bool all_well =
        std::all_of(operations_.begin(), operations_.end(),
                    [](const Operation& operation) { return operation.status().ok(); });
    if (all_well && !slots_.empty()) {
      flags_.read();
      compare_checksums();
    }
  } catch (...) {
    wait_all();
    reset();
    throw;
  }
  reset();
}

void GradientReducer::warn_of_dropped() {
  constexpr int kSuspicious = 5;
  if (++dropped_in_a_row_ != kSuspicious) return;
  TORCH_WARN("DistributedOptimizer: gradients were reduced over the ranks and then dropped ",
             kSuspicious,
             " times in a row, without a step() or synchronize() of this DistributedOptimizer. If "
             "parameters are updated all the same, every rank updates "
             "its own with gradients of its own: call step() of the DistributedOptimizer, not of "
             "the optimizer that it wraps. (",
             scope_, ")");
}

/// Which parameters had a gradient first; those without one, last.
std::vector<std::size_t> GradientReducer::order_of_arrival() const {
  std::vector<std::size_t> order;
  std::vector<bool> known(slots_.size());
  for (const std::vector<std::size_t>* const some : {&arrivals_, &submitted_}) {
    for (const std::size_t i : *some) {
      if (!known[i]) order.push_back(i);
      known[i] = true;
    }
  }
  return order;
}

void GradientReducer::discard() {
  const std::lock_guard lock(mutex_);
  if (in_cycle()) abandon();
  reset();
}

/// A gradient has been handed over, though its unit may not be complete.
bool GradientReducer::in_cycle() const { return first_ready_ || !submitted_.empty(); }

void GradientReducer::reset() {
  for (Slot& slot : slots_) {
    slot.phase = Phase::kIdle;
    slot.passes = 0;
    slot.transfer.release();
    slot.transfer.drop();
  }
  for (Unit& unit : units_) {
    unit.submitted = false;
    unit.ready = 0;
    unit.stream.reset();
  }
  for (const std::size_t i : provisional_layouts_) slots_[i].transfer.agree(std::nullopt);
  provisional_layouts_.clear();
  operations_.clear();
  submitted_.clear();
  arrivals_.clear();
  first_ready_.reset();
  flags_submitted_ = false;
  synchronized_ = false;
  ++gradients_version_;
}

std::uint64_t GradientReducer::gradients_version() const {
  const std::lock_guard lock(mutex_);
  return gradients_version_;
}

bool GradientReducer::in_flight() const {
  const std::lock_guard lock(mutex_);
  return in_cycle();
}

void GradientReducer::set_passes_per_step(int passes) {
  const std::lock_guard lock(mutex_);
  passes_per_step_ = passes;
}

}  // namespace hvd::libtorch
