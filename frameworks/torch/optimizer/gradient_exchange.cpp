#include "optimizer/gradient_exchange.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "hvd/error.h"
#include "optimizer/gradient_guard.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

GradientExchange::GradientExchange(const GradientReduction& how,
                                   std::span<ReducedParameter> parameters, GradientUnits& units,
                                   GradientReadiness& readiness, ParameterCheck& check)
    : how_(how),
      parameters_(parameters),
      units_(units),
      readiness_(readiness),
      check_(check),
      hooked_(how, parameters) {}

void GradientExchange::submit(std::size_t unit) {
  if (how_.hook) return call_hook(false);
  // The flags say which gradients there are, and so travel with the last of them.
  const bool with_flags = !flags_submitted_ && readiness_.last_unit(unit);
  submit_units({&unit, 1}, with_flags, Progress::kBackground);
}

void GradientExchange::submit_rest() {
  if (how_.hook) call_hook(true);
  submit_units(readiness_.units_left(), !flags_submitted_ && !parameters_.empty(),
               Progress::kCaller);
}

/// In the order of the units, whichever is ready first, since what the hook does has to be in one
/// order on all ranks.
void GradientExchange::call_hook(bool for_all) {
  for (const std::size_t unit : readiness_.units_left()) {
    if (!for_all && !readiness_.unit_ready(unit)) return;
    follow_streams(units_[unit]);
    hooked_.start(unit, units_[unit], readiness_);
    readiness_.note_submitted(unit);
  }
}

// Buckets and flags are the same from step to step, so that a steady step allocates nothing here.
void GradientExchange::submit_units(std::span<const std::size_t> units, bool with_flags,
                                    Progress progress) {
  std::vector<Submission> others;
  for (const std::size_t u : units) {
    if (!units_[u].bucket) {
      add_submissions(units_[u], others);
      continue;
    }
    submit_bucket(units_[u], progress);
    readiness_.note_submitted(u);
  }
  begin_after_current_stream(
      others);  // first, as nothing may be read from a GPU whose stream is being captured
  if (with_flags) {
    const Submission& flags = prepare_flags();
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
      if (!units_[u].bucket) readiness_.note_submitted(u);
    }
  }
  flags_submitted_ = flags_submitted_ || with_flags;
}

void GradientExchange::submit_bucket(GradientUnit& unit, Progress progress) {
  follow_streams(unit);
  if (unit.bucket->gathers()) {
    gather(unit);
  } else {
    for (const std::size_t i : unit.members) {
      ReducedParameter& parameter = parameters_[i];
      // What has no gradient counts as zeros.
      if (parameter.active() && !readiness_.handed_over(i)) parameter.place(how_);
    }
  }
  begin_after_current_stream(unit.bucket->submission());
  submit_one(unit.bucket->submission(), progress);
}

void GradientExchange::gather(GradientUnit& unit) {
  unit.bucket->let_go(true);  // of an attempt that has failed
  for (const std::size_t i : unit.members) {
    ReducedParameter& parameter = parameters_[i];
    unit.bucket->add(parameter.active() ? parameter.gather(how_) : torch::Tensor());
  }
}

void GradientExchange::submit_one(const Submission& submission, Progress progress) {
  operations_.emplace_back();
  try {
    submit_all({&submission, 1}, {&operations_.back(), 1}, progress);
  } catch (...) {
    operations_.pop_back();
    throw;
  }
}

void GradientExchange::add_submissions(GradientUnit& unit, std::vector<Submission>& submissions) {
  const std::size_t first = submissions.size();
  follow_streams(unit);
  for (const std::size_t i : unit.members) {
    ReducedParameter& parameter = parameters_[i];
    if (!parameter.active()) continue;
    std::vector<Submission> parts = parameter.prepare(how_);
    if (parts.size() > 1) make_group(parameter.label(), parts);
    std::move(parts.begin(), parts.end(), std::back_inserter(submissions));
  }
  if (!unit.group.empty()) make_group(unit.group, std::span(submissions).subspan(first));
}

/// Nothing on the CPU.
void GradientExchange::follow_streams(GradientUnit& unit) {
  for (const std::size_t i : unit.members) unit.stream.follow(parameters_[i].tensor());
}

const Submission& GradientExchange::prepare_flags() {
  const torch::Tensor& like = parameters_.front().tensor();
  return flags_.prepare(
      how_, like, parameters_.size(),
      [this](std::size_t i) { return parameters_[i].has_gradient(); }, check_.room(like),
      [this](std::span<float> room) { check_.write(room); });
}

void GradientExchange::wait() const {
  for (const Operation& operation : operations_) operation.wait();
  for (const Operation& operation : operations_) current_stream_waits(operation);
}

/// Nothing is under way.
bool GradientExchange::over() const {
  return std::all_of(operations_.begin(), operations_.end(),
                     [](const Operation& operation) { return operation.done(); });
}

bool GradientExchange::succeeded() const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  return std::all_of(operations_.begin(), operations_.end(),
                     [](const Operation& operation) { return operation.status().ok(); });
}

/// Whoever has written to a gradient that was being reduced, or put another in its place, has
/// changed it on this rank only.
void GradientExchange::raise_if_error() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  for (const Operation& operation : operations_) operation.status().raise_if_error();
  const std::string* written = nullptr;
  for (const std::size_t i : readiness_.submitted()) {
    if (parameters_[i].release() && written == nullptr) written = &parameters_[i].name();
  }
  if (written == nullptr) return;
  throw UsageError(std::string(how_.who) + ": the gradient of '" + *written +
                   "' was written to or replaced between backward() and step(), while it was being "
                   "reduced over the ranks; " +
                   right_order(how_.who) +
                   "; what is to be changed before it is reduced, change after a backward() under "
                   "no_sync()");
}

void GradientExchange::check_parameters() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over() && succeeded());
  if (parameters_.empty()) return;
  flags_.read();
  check_.compare(flags_.room());
}

bool GradientExchange::any_used() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (flags_.used(i)) return true;
  }
  return false;
}

void GradientExchange::complete() {
  hooked_.finish();
  for (const std::size_t i : readiness_.submitted()) parameters_[i].complete(flags_.used(i));
  completed_ = true;
}

void GradientExchange::drop_results() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  hooked_.drop();
  if (how_.hook || !succeeded()) return;
  for (const std::size_t i : readiness_.submitted()) {
    parameters_[i].release();
    parameters_[i].note_dropped_result();
  }
}

void GradientExchange::end_cycle() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  for (ReducedParameter& parameter : parameters_) parameter.end_cycle();
  for (const GradientUnit& unit : units_.all()) {
    if (unit.bucket && unit.bucket->gathers()) unit.bucket->let_go(completed_);
  }
  operations_.clear();
  flags_submitted_ = false;
  completed_ = false;
}

}  // namespace hvd::libtorch
