#pragma once

#include <c10/util/Synchronized.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/process_set.h"
#include "hvd/torch/gradient_hook.h"
#include "hvd/torch/parameters.h"
#include "hvd/types.h"

namespace hvd {

namespace libtorch {
class GradientReducer;
class ReducedParameter;
struct GradientReduction;
}  // namespace libtorch

/// @addtogroup train
/// @{

/// The parameters of the ranks differ, so each rank would train a separate model. Raised on every
/// rank of the optimizer's set. The runtime remains usable.
class DivergedError : public Error {
 public:
  using Error::Error;
};

/// Gradients of some ranks contain inf or nan (see
/// DistributedOptimizerOptions::error_if_nonfinite). Raised on every rank of the optimizer's set;
/// parameters are unchanged and the runtime remains usable.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

/// How a DistributedOptimizer reduces gradients.
struct DistributedOptimizerOptions {
  /// kAverage, kSum or kAdasum.
  ReduceOp op = ReduceOp::kAverage;
  /// Sends float32 and float64 gradients as 16 bits; `.grad` keeps its dtype. float32 is cast while
  /// it is copied into the runtime's buffer, so no extra copy of the tensor is needed (see
  /// hvd::Allreduce::compression).
  Compression compression = Compression::kNone;
  /// Number of backward passes whose gradients add up before they are reduced.
  int backward_passes_per_step = 1;
  /// A factor f: gradients are multiplied by 1/f before the sum and by f/size after it, which keeps
  /// the sum in range. kAverage only.
  double gradient_predivide_factor = 1;
  /// Names of parameters whose gradients are reduced together, one list for each group. Other
  /// gradients are reduced as they become ready.
  std::vector<std::vector<std::string>> groups = {};
  /// Turns sparse gradients into dense ones before they are reduced. Otherwise they stay sparse
  /// (see sparse_allreduce(); average and sum only).
  bool sparse_as_dense = false;
  /// Reduces gradients in buckets from the second step on. On the CPU `.grad` tensors are then
  /// views of buffers that are reduced in place: results are not copied back, and gradients are not
  /// copied in if they are zeroed instead of dropped (`zero_grad(false)`). If the program keeps a
  /// `.grad` tensor from one step, the next step overwrites it. On a GPU gradients stay where
  /// autograd has put them, and one kernel launch packs a bucket. Results are the same, up to
  /// roundings on a GPU. Members of groups, sparse gradients and compressed float64 gradients are
  /// reduced outside of buckets. Adasum uses no buckets.
  bool gradient_as_bucket_view = true;
  /// Size of a bucket in bytes, the same on every rank. A larger gradient has a bucket of its own.
  /// Large buckets need fewer operations. With small buckets the first reduction begins earlier,
  /// and less remains to reduce when backward has ended. 0: on the CPU, an eighth of all gradients,
  /// at most 8 MiB; on a GPU, a quarter of them, from 1 to 25 MiB, with at most 1 MiB in the last
  /// bucket.
  std::int64_t bucket_bytes = 0;
  ProcessSet process_set = {};
  /// Divides an average by the size of the set. Otherwise the divisor is the number of ranks that
  /// contribute, which is smaller while a rank has joined.
  bool divide_by_size = false;
  /// kAdasum only: combines the changes of the parameters instead of the gradients, as Horovod
  /// does. Every rank updates by its own gradients, which are not reduced; step() then adds the
  /// Adasum of all ranks' changes to the parameters as they were before. Momentum and Adam's
  /// averages therefore differ between ranks.
  bool adasum_delta = false;
  /// A function of the program that reduces the gradients in place of hvd, for example with its own
  /// compression. Sparse gradients are made dense. The tensors that it returns become the
  /// gradients; `op` then applies only to the loss of a closure. Not with Adasum, compression or
  /// gradient_predivide_factor.
  GradientHook gradient_hook = {};
  /// How often the ranks compare their parameters, up to roundings: after every `check_every`
  /// reductions of gradients. They also compare them before the first update, bit for bit. step()
  /// throws DivergedError if they differ. If the wrapper is constructed with a module, the
  /// comparison covers BatchNorm statistics too, and rank 0 warns once if they differ. 0: never.
  /// Not set: HVD_CHECK_EVERY, else 100.
  std::optional<int> check_every = std::nullopt;
  /// Finds the source of inf and nan: every rank searches its own gradients for them before they
  /// are reduced, and step() throws NonFiniteError with the ranks and parameters. Costs a pass over
  /// the gradients and a small operation in each step. Not with a GradScaler, which overflows on
  /// purpose.
  bool error_if_nonfinite = false;
};

/// While this guard exists, backward passes accumulate without communication. See
/// OptimizerWrapper::no_sync(). Move-only.
class [[nodiscard]] NoSync {
 public:
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&&) = delete;

 private:
  friend class GradientSynchronizer;
  friend class OptimizerWrapper;
  explicit NoSync(std::shared_ptr<const void> scope) : scope_(std::move(scope)) {}

  std::shared_ptr<const void> scope_;
};

/// Reduces the gradients of parameters for an optimizer that is not one of LibTorch's, such as
/// Python's: the part of a DistributedOptimizer that does not update. A hook on each parameter
/// submits its gradient as soon as backward has produced it. The rules of DistributedOptimizer hold
/// for `.grad`, the options, the names and the order of construction. For each step:
///
///     loss.backward();
///     gradients.synchronize();
///     update();                // of the program, from `.grad`
///     gradients.end_step();
///     gradients.discard();     // and drop or zero `.grad`
///
/// One thread at a time, apart from the hooks. The destructor removes the hooks, and does not
/// communicate. Parameters must not belong to a DistributedOptimizer as well. In an elastic job it
/// survives changes of the ranks, as a DistributedOptimizer does.
class GradientSynchronizer {
 public:
  /// Local. @param options those of DistributedOptimizer, without adasum_delta
  /// @throws UsageError if there are no parameters, a group names an unknown parameter or one
  /// twice, an option is out of range, or this rank is not in the process set; NotInitializedError
  /// before init()
  explicit GradientSynchronizer(const NamedParameters& parameters,
                                const DistributedOptimizerOptions& options = {});
  GradientSynchronizer(const GradientSynchronizer&) = delete;
  GradientSynchronizer& operator=(const GradientSynchronizer&) = delete;
  ~GradientSynchronizer();

  /// Returns when every gradient is final: at once if it was called since the last backward.
  /// @throws as DistributedOptimizer::step()
  void synchronize();
  /// Call it after the update. The next synchronize() reduces, even if no backward pass has run on
  /// this rank. Hooks parameters that require grad since the last call.
  void end_step();
  /// Call it before `.grad` is dropped or zeroed. Waits for gradients that are still being reduced,
  /// and drops the accumulated passes. @throws as synchronize()
  void discard();
  /// Whether gradients are being reduced.
  bool in_flight() const;
  /// Whether synchronize() would return at once.
  bool synchronized() const;
  /// While the guard exists, backward passes accumulate locally and do not count as passes.
  NoSync no_sync();
  /// @throws UsageError if `passes` is less than 1
  void set_backward_passes_per_step(int passes);

 private:
  friend class OptimizerWrapper;
  using SharedReducer = c10::Synchronized<std::unique_ptr<libtorch::GradientReducer>>;

  /// @param named further parameters, of which the ranks compare the frozen ones
  GradientSynchronizer(std::vector<libtorch::ReducedParameter> parameters,
                       libtorch::GradientReduction how, int passes_per_step,
                       const NamedParameters& named);
  /// Replaces `former` between steps, and removes its hooks. Only the parameters differ.
  GradientSynchronizer(std::vector<libtorch::ReducedParameter> parameters,
                       GradientSynchronizer& former, const NamedParameters& named);
  void begin_generation();

  std::shared_ptr<SharedReducer> reducer_;
  NamedParameters named_;
  /// This object, for the function that each generation of an elastic job calls. An object that
  /// replaces another one takes its place in the order of these functions.
  std::shared_ptr<GradientSynchronizer*> self_;
  std::shared_ptr<const void> generations_;
};

/// For bindings of other languages: a function that is called while an exception of a gradient's
/// hook is being handled, on a thread of autograd. It may throw another one in its place, which
/// backward() then throws. Process-wide; null: none.
void set_gradient_error_handler(void (*handler)()) noexcept;

/// @}

}  // namespace hvd
