#include "reducer/gradient_exchange.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <string>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/operations.h"
#include "reducer/reduced_parameter.h"
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

const Submission& UsedFlags::prepare(const GradientReduction& how, const torch::Tensor& like,
                                     std::size_t count,
                                     const std::function<bool(std::size_t)>& used, std::size_t room,
                                     const std::function<void(std::span<float>)>& fill) {
  const torch::NoGradGuard no_grad;
  const auto own = is_supported(like.scalar_type()) ? like.scalar_type() : torch::kFloat32;
  const auto dtype = type_to_cast_to(own, how.compression).value_or(own);
  count_ = count;
  read_ = false;
  if (!flags_.defined() || flags_.scalar_type() != dtype ||
      values_.numel() != static_cast<std::int64_t>(count + room)) {
    values_ = torch::zeros({static_cast<std::int64_t>(count + room)}, torch::kFloat32);
    flags_ = values_.to(dtype);
    GradientReduction reduction = how;
    if (how.op == ReduceOp::kAdasum) reduction.op = ReduceOp::kSum;
    submission_ = reduction_in_place(how.scope + ".used", reduction, flags_);
  }
  auto* const values = values_.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < count; ++i) values[i] = used(i) ? 1.0F : 0.0F;
  if (room > 0) fill({values + count, room});
  if (!flags_.is_same(values_)) flags_.copy_(values_);
  return submission_;
}

void UsedFlags::read() {
  read_ = true;
  const torch::NoGradGuard no_grad;
  if (!flags_.is_same(values_)) values_.copy_(flags_);
}

std::span<const float> UsedFlags::room() const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(read_);
  return {values_.const_data_ptr<float>() + count_,
          static_cast<std::size_t>(values_.numel()) - count_};
}

namespace {

/// @param dense without gaps
torch::Tensor row_of(const torch::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

std::string name_of(GradientUnit& unit, const ReducedParameter& first) {
  if (unit.bucket) return unit.bucket->submission().name;
  return unit.group.empty() ? first.label() : unit.group;
}

}  // namespace

void HookedBuckets::start(std::size_t index, GradientUnit& unit,
                          const GradientReadiness& readiness) {
  const torch::NoGradGuard no_grad;
  const bool in_bucket = unit.bucket && !unit.bucket->gathers();
  Started started;
  BucketGradients& bucket = started.bucket;
  std::int64_t end = 0;
  for (std::size_t m = 0; m < unit.members.size(); ++m) {
    const std::size_t i = unit.members[m];
    ReducedParameter& parameter = parameters_[i];
    if (!parameter.active()) continue;
    if (!in_bucket) {
      started.rows.push_back(row_of(parameter.gather(how_)));
    } else if (!readiness.handed_over(i)) {
      parameter.place(how_);
    }
    bucket.parameters.push_back(parameter.name());
    bucket.first.push_back(in_bucket ? unit.bucket->first()[m] : end);
    end += parameter.tensor().numel();
  }
  if (bucket.parameters.empty()) return;
  bucket.values = in_bucket                  ? unit.bucket->flat()
                  : started.rows.size() == 1 ? started.rows.front()
                                             : torch::cat(started.rows);
  bucket.name = name_of(unit, parameters_[unit.members.front()]);
  bucket.index = index;
  bucket.process_set = how_.process_set;
  started.finish = how_.hook(bucket);
  if (!started.finish) {
    throw UsageError(std::string(how_.who) + ": gradient_hook returned nothing for " + bucket.name +
                     "; expected a function that returns the reduced gradients");
  }
  started_.push_back(std::move(started));
}

// After an error too, all functions are called: the other ranks may wait for what they do.
std::exception_ptr HookedBuckets::finish_all(bool use) {
  const torch::NoGradGuard no_grad;
  std::exception_ptr first;
  for (const Started& started : std::exchange(started_, {})) {
    try {
      const torch::Tensor result = started.finish();
      if (use && !first) take_over(started, result);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  return first;
}

void HookedBuckets::finish() {
  if (const auto error = finish_all(true)) std::rethrow_exception(error);
}

void HookedBuckets::drop() { finish_all(false); }

void HookedBuckets::take_over(const Started& started, const torch::Tensor& result) const {
  const BucketGradients& bucket = started.bucket;
  if (!result.defined() || result.numel() != bucket.values.numel()) {
    throw UsageError(std::string(how_.who) + ": gradient_hook: expected " +
                     std::to_string(bucket.values.numel()) + " reduced gradients of " +
                     bucket.name + ", got " +
                     (result.defined() ? std::to_string(result.numel()) : "an undefined tensor"));
  }
  const torch::Tensor row = result.reshape({-1});
  if (!row.is_set_to(bucket.values)) bucket.values.copy_(row);
  if (started.rows.size() < 2) return;
  for (std::size_t i = 0; i < started.rows.size(); ++i)
    started.rows[i].copy_(bucket.values.narrow(0, bucket.first[i], started.rows[i].numel()));
}

}  // namespace hvd::libtorch
