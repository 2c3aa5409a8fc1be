#include "optimizer/hooked_buckets.h"

#include <exception>
#include <string>
#include <utility>

#include "hvd/error.h"

namespace hvd::libtorch {
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
