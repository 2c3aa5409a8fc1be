#include "reducer/gradient_exchange.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/device.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "hvd/reconfigure.h"
#include "hvd/torch/handle.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"
#include "reducer/guarded_gradient.h"
#include "reducer/reduced_parameter.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {

GradientExchange::GradientExchange(const GradientReduction& how,
                                   std::span<ReducedParameter> parameters, GradientUnits& units,
                                   GradientReadiness& readiness, ParameterCheck& check,
                                   GradientWeights& weights)
    : how_(how),
      parameters_(parameters),
      units_(units),
      readiness_(readiness),
      check_(check),
      weights_(weights),
      hooked_(how, parameters) {}

void GradientExchange::submit(std::size_t unit) {
  if (how_.hook) return call_hook(false);
  // All gradients are known when the last unit is submitted.
  const bool with_flags = !flags_submitted_ && readiness_.last_unit(unit);
  submit_units({&unit, 1}, with_flags, Progress::kBackground);
}

void GradientExchange::close_weights() {
  if (!parameters_.empty())
    weights_.close(UsedFlags::precision(how_, parameters_.front().tensor()));
}

void GradientExchange::reduce_flags_first() {
  submit_units({}, !flags_submitted_, Progress::kCaller);
  const Operation& flags = operations_[flags_operation_];
  flags.wait();
  flags.status().ok() ? read_flags() : weights_.use_no_reference();
}

void GradientExchange::submit_rest() {
  if (how_.hook) call_hook(true);
  submit_units(readiness_.units_left(), !flags_submitted_ && !parameters_.empty(),
               Progress::kCaller);
}

/// Calls the hook in the order of the units, since its operations need the same order on all ranks.
void GradientExchange::call_hook(bool for_all) {
  for (const std::size_t unit : readiness_.units_left()) {
    if (!for_all && !readiness_.unit_ready(unit)) return;
    follow_streams(units_[unit]);
    hooked_.start(unit, units_[unit], readiness_);
    readiness_.mark_submitted(unit);
  }
}

// Buckets and flags are the same from step to step, so that a steady step does not allocate here.
void GradientExchange::submit_units(std::span<const std::size_t> units, bool with_flags,
                                    Progress progress) {
  std::vector<Submission> others;
  for (const std::size_t u : units) {
    if (!units_[u].bucket) {
      add_submissions(units_[u], others);
      continue;
    }
    submit_bucket(units_[u], progress);
    readiness_.mark_submitted(u);
  }
  begin_after_current_stream(others);  // first: it throws if the stream is being captured
  if (with_flags) {
    const Submission& flags = prepare_flags();
    flags_operation_ = operations_.size() + others.size();
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
      if (!units_[u].bucket) readiness_.mark_submitted(u);
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
      // A parameter without a gradient contributes zeros.
      if (parameter.active() && !readiness_.marked_ready(i)) parameter.place(how_);
    }
  }
  begin_after_current_stream(unit.bucket->submission());
  submit_one(unit.bucket->submission(), progress);
}

void GradientExchange::gather(GradientUnit& unit) {
  unit.bucket->release_gradients(true);  // left over from a failed attempt
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

/// Returns at once on the CPU.
void GradientExchange::follow_streams(GradientUnit& unit) {
  for (const std::size_t i : unit.members) unit.stream.follow(parameters_[i].tensor());
}

// The flags of the ParameterCheck follow those of the parameters, and the flags of the weights
// those of the ParameterCheck.
constexpr std::size_t kCheckFlags = 3;

bool GradientExchange::check_flag(std::size_t number) const {
  if (number == 0) return check_.is_due();
  if (number == 1) return check_.has_updates();
  return !check_.under_way();
}

float GradientExchange::own_flag(std::size_t number) const {
  const std::size_t parameters = parameters_.size();
  if (number >= parameters + kCheckFlags) return weights_.flag(number - parameters - kCheckFlags);
  const bool set =
      number < parameters ? parameters_[number].has_gradient() : check_flag(number - parameters);
  return set ? 1.0F : 0.0F;
}

const Submission& GradientExchange::prepare_flags() {
  close_weights();
  return flags_.prepare(how_, parameters_.front().tensor(),
                        parameters_.size() + kCheckFlags + weights_.flags(),
                        [this](std::size_t i) { return own_flag(i); });
}

void GradientExchange::read_flags() {
  flags_.read();
  weights_.read(
      [this](std::size_t i) { return flags_.value(parameters_.size() + kCheckFlags + i); });
}

void GradientExchange::wait_with_check() const {
  for (const Operation& operation : operations_) hvd::wait_with_check(operation);
}

void GradientExchange::wait_on_host() const {
  if (elastic::generation() == 0 && !has_reconfigured()) return;
  for (const Operation& operation : operations_) hvd::wait_on_host(operation.output_ready());
}

void GradientExchange::wait() const {
  for (const Operation& operation : operations_) operation.wait();
  for (const Operation& operation : operations_) current_stream_waits(operation);
}

/// Whether no operation is under way.
bool GradientExchange::over() const {
  return std::all_of(operations_.begin(), operations_.end(),
                     [](const Operation& operation) { return operation.done(); });
}

bool GradientExchange::succeeded() const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  return std::all_of(operations_.begin(), operations_.end(),
                     [](const Operation& operation) { return operation.status().ok(); });
}

void GradientExchange::raise_if_error() const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  for (const Operation& operation : operations_) operation.status().raise_if_error();
}

void GradientExchange::raise_if_written() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  const std::string* written = nullptr;
  for (const std::size_t i : readiness_.submitted()) {
    if (parameters_[i].release() && written == nullptr) written = &parameters_[i].name();
  }
  if (written == nullptr) return;
  throw UsageError(std::string(how_.wrapper) + ": the gradient of '" + *written +
                   "' was written to or replaced between backward() and step(), while it was being "
                   "reduced over the ranks; " +
                   right_order(how_.wrapper) +
                   "; to change gradients before they are reduced, run backward() under "
                   "no_sync()");
}

void GradientExchange::explain_mismatch() const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  if (!flags_submitted_ || operations_[flags_operation_].status().code != StatusCode::kMismatch)
    return;
  agree({.name = how_.scope + ".weighted",
         .title = text(how_.wrapper, " (", how_.scope, ")"),
         .process_set = how_.process_set,
         .verb = "has set",
         .expected = "expected set_weight(), or the weight of Accelerator::backward(), before each "
                     "backward pass on every rank (0 on a rank without samples), or on no rank",
         .without_joined = true},
        "", {{"", weights_.weighted() ? "a weight for this step" : "no weight for this step"}});
}

void GradientExchange::check_parameters() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over() && succeeded());
  if (parameters_.empty()) return;
  read_flags();
  const std::size_t first = parameters_.size();
  check_.end_cycle(flags_.used(first), flags_.used(first + 1), !flags_.used(first + 2));
}

bool GradientExchange::any_used() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (flags_.used(i)) return true;
  }
  return false;
}

/// Buckets are multiplied as a whole, and the other gradients together.
void GradientExchange::scale_results(double factor) {
  if (factor == 1) return;
  const torch::NoGradGuard no_grad;
  for (const GradientUnit& unit : units_.all()) {
    if (unit.bucket && !unit.bucket->gathers()) unit.bucket->own_rows().mul_(factor);
  }
  std::vector<torch::Tensor> together;
  for (const std::size_t i : readiness_.submitted()) {
    if (parameters_[i].view().defined()) continue;
    const torch::Tensor wire = parameters_[i].dense_wire();
    if (wire.defined()) {
      together.push_back(wire);
    } else {
      parameters_[i].set_result_factor(factor);
    }
  }
  if (!together.empty()) at::_foreach_mul_(together, factor);
}

void separate_overlapping(std::vector<ReducedParameter*> sharing) {
  const torch::NoGradGuard no_grad;
  const std::less<const std::byte*> before;
  std::sort(sharing.begin(), sharing.end(), [before](const auto* a, const auto* b) {
    return before(a->shared_memory().data(), b->shared_memory().data());
  });
  const std::byte* end = nullptr;
  for (ReducedParameter* const parameter : sharing) {
    const std::span<const std::byte> memory = parameter->shared_memory();
    if (before(memory.data(), end)) parameter->separate();
    end = std::max(end, memory.data() + memory.size(), before);
  }
}

void GradientExchange::separate_gradients() {
  std::vector<ReducedParameter*> sharing;
  for (const std::size_t i : readiness_.submitted()) {
    if (!parameters_[i].shared_memory().empty()) sharing.push_back(&parameters_[i]);
  }
  separate_overlapping(std::move(sharing));
}

void GradientExchange::complete() {
  const torch::NoGradGuard no_grad;
  hooked_.finish();
  scale_results(weights_.factor());
  separate_gradients();
  for (const std::size_t i : readiness_.submitted()) parameters_[i].complete(flags_.used(i));
  completed_ = true;
}

void GradientExchange::drop_results() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  hooked_.drop();
  if (how_.hook || !succeeded()) return;
  for (const std::size_t i : readiness_.submitted()) {
    parameters_[i].release();
    parameters_[i].remember_dropped_result();
  }
}

void GradientExchange::end_cycle() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(over());
  const torch::NoGradGuard no_grad;
  for (ReducedParameter& parameter : parameters_) parameter.end_cycle();
  for (const GradientUnit& unit : units_.all()) {
    if (unit.bucket && unit.bucket->gathers()) unit.bucket->release_gradients(completed_);
  }
  operations_.clear();
  flags_submitted_ = false;
  completed_ = false;
}

namespace {

torch::ScalarType dtype_of_flags(const GradientReduction& how, const torch::Tensor& like) {
  const auto own = is_supported(like.scalar_type()) ? like.scalar_type() : torch::kFloat32;
  return type_to_cast_to(own, how.compression).value_or(own);
}

}  // namespace

/// The core sends float32 as 16 bits if it compresses. Flags are read as float32 in any case.
int UsedFlags::precision(const GradientReduction& how, const torch::Tensor& like) {
  constexpr int kSingle = 24, kHalf = 11, kBrain = 8;
  const torch::ScalarType dtype = dtype_of_flags(how, like);
  const Compression in_core = compression_in_core(dtype, how.compression);
  if (dtype == torch::kBFloat16 || in_core == Compression::kBFloat16) return kBrain;
  if (dtype == torch::kFloat16 || in_core == Compression::kFloat16) return kHalf;
  return kSingle;
}

const Submission& UsedFlags::prepare(const GradientReduction& how, const torch::Tensor& like,
                                     std::size_t count,
                                     const std::function<float(std::size_t)>& own) {
  const torch::NoGradGuard no_grad;
  const torch::ScalarType dtype = dtype_of_flags(how, like);
  read_ = false;
  if (!flags_.defined() || flags_.scalar_type() != dtype ||
      values_.numel() != static_cast<std::int64_t>(count)) {
    values_ = torch::zeros({static_cast<std::int64_t>(count)}, torch::kFloat32);
    flags_ = values_.to(dtype);
    GradientReduction reduction = how;
    if (how.op == ReduceOp::kAdasum) reduction.op = ReduceOp::kSum;
    submission_ = reduction_in_place(how.scope + ".used", reduction, flags_);
  }
  auto* const values = values_.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < count; ++i) values[i] = own(i);
  if (!flags_.is_same(values_)) flags_.copy_(values_);
  return submission_;
}

void UsedFlags::read() {
  read_ = true;
  const torch::NoGradGuard no_grad;
  if (!flags_.is_same(values_)) values_.copy_(flags_);
}

namespace {

/// @param dense a tensor without gaps
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
  HookCall call;
  BucketGradients& bucket = call.bucket;
  std::int64_t end = 0;
  for (std::size_t m = 0; m < unit.members.size(); ++m) {
    const std::size_t i = unit.members[m];
    ReducedParameter& parameter = parameters_[i];
    if (!parameter.active()) continue;
    if (!in_bucket) {
      call.rows.push_back(row_of(parameter.gather(how_)));
    } else if (!readiness.marked_ready(i)) {
      parameter.place(how_);
    }
    bucket.parameters.push_back(parameter.name());
    bucket.first.push_back(in_bucket ? unit.bucket->first()[m] : end);
    end += parameter.tensor().numel();
  }
  if (bucket.parameters.empty()) return;
  bucket.values = in_bucket               ? unit.bucket->flat()
                  : call.rows.size() == 1 ? call.rows.front()
                                          : torch::cat(call.rows);
  bucket.name = name_of(unit, parameters_[unit.members.front()]);
  bucket.index = index;
  bucket.process_set = how_.process_set;
  call.finish = how_.hook(bucket);
  if (!call.finish) {
    throw UsageError(std::string(how_.wrapper) + ": gradient_hook returned nothing for " +
                     bucket.name + "; expected a function that returns the reduced gradients");
  }
  calls_.push_back(std::move(call));
}

// All functions are called even after an error: the other ranks may wait for their operations.
std::exception_ptr HookedBuckets::finish_all(bool use) {
  const torch::NoGradGuard no_grad;
  std::exception_ptr first;
  for (const HookCall& call : std::exchange(calls_, {})) {
    try {
      const torch::Tensor result = call.finish();
      if (use && !first) use_result(call, result);
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

void HookedBuckets::use_result(const HookCall& call, const torch::Tensor& result) const {
  const BucketGradients& bucket = call.bucket;
  if (!result.defined() || result.numel() != bucket.values.numel()) {
    throw UsageError(std::string(how_.wrapper) + ": gradient_hook: expected " +
                     std::to_string(bucket.values.numel()) + " reduced gradients of " +
                     bucket.name + ", got " +
                     (result.defined() ? std::to_string(result.numel()) : "an undefined tensor"));
  }
  const torch::Tensor row = result.reshape({-1});
  if (!row.is_set_to(bucket.values)) bucket.values.copy_(row);
  if (call.rows.size() < 2) return;
  for (std::size_t i = 0; i < call.rows.size(); ++i)
    call.rows[i].copy_(bucket.values.narrow(0, bucket.first[i], call.rows[i].numel()));
}

}  // namespace hvd::libtorch
