#include "optimizer/optimizer_options.h"

#include <utility>

#include "hvd/error.h"
#include "hvd/options.h"

namespace hvd::libtorch {
namespace {

int check_every(const DistributedOptimizerOptions& options) {
  constexpr int kDefault = 100;
  return options.check_every ? *options.check_every : requested_check_interval().value_or(kDefault);
}

}  // namespace

void check_options(const DistributedOptimizerOptions& options, const std::string& who) {
  if (options.op != ReduceOp::kAverage && options.op != ReduceOp::kSum &&
      options.op != ReduceOp::kAdasum) {
    throw UsageError(who + ": op: expected average, sum or adasum, got " +
                     std::string(to_string(options.op)));
  }
  if (options.backward_passes_per_step < 1) {
    throw UsageError(who + ": backward_passes_per_step: expected at least 1, got " +
                     std::to_string(options.backward_passes_per_step));
  }
  if (!(options.gradient_predivide_factor > 0)) {
    throw UsageError(who + ": gradient_predivide_factor: expected a positive number, got " +
                     std::to_string(options.gradient_predivide_factor));
  }
  if (options.gradient_predivide_factor != 1 && options.op != ReduceOp::kAverage) {
    throw UsageError(
        who + ": gradient_predivide_factor splits the division of an average, but op is " +
        std::string(to_string(options.op)) + "; use ReduceOp::kAverage or leave the factor at 1");
  }
  if (options.adasum_delta && options.op != ReduceOp::kAdasum) {
    throw UsageError(who + ": adasum_delta: expected op to be adasum, got " +
                     std::string(to_string(options.op)));
  }
  const bool hvd_reduces = options.op == ReduceOp::kAdasum ||
                           options.compression != Compression::kNone ||
                           options.gradient_predivide_factor != 1;
  if (options.gradient_hook && hvd_reduces) {
    throw UsageError(who +
                     ": gradient_hook reduces gradients itself; expected op to be average or sum, "
                     "no compression and a gradient_predivide_factor of 1");
  }
  if (options.bucket_bytes < 0) {
    throw UsageError(who +
                     ": bucket_bytes: expected a number of bytes, or 0 for as many as is usually "
                     "best, got " +
                     std::to_string(options.bucket_bytes));
  }
  if (options.check_every.value_or(0) < 0) {
    throw UsageError(who + ": check_every: expected a number of reductions, or 0 for never, got " +
                     std::to_string(*options.check_every));
  }
  if (!options.process_set.included()) {
    throw UsageError(who + ": this rank is not in process set " +
                     std::to_string(options.process_set.id()));
  }
}

std::shared_ptr<const void> counted_scope(std::shared_ptr<std::atomic<int>> depth) {
  ++*depth;
  return {depth.get(), [depth](const void*) { --*depth; }};
}

GradientReduction reduction_of(const DistributedOptimizerOptions& options, std::string scope) {
  return {.scope = std::move(scope),
          .op = options.op,
          .prescale = 1 / options.gradient_predivide_factor,
          .postscale = options.gradient_predivide_factor,
          .compression = options.compression,
          .process_set = options.process_set,
          .sparse = options.sparse_as_dense || options.gradient_hook
                        ? SparseGradients::kMakeDense
                        : SparseGradients::kReduceSparse,
          .bucket_views = options.gradient_as_bucket_view,
          .bucket_bytes = options.bucket_bytes,
          .check_every = check_every(options),
          .error_if_nonfinite = options.error_if_nonfinite,
          .of_changes = options.adasum_delta,
          .hook = options.gradient_hook};
}

}  // namespace hvd::libtorch
