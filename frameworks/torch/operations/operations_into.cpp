#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/operations.h"
#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

// Collectives that write their result to a tensor of the caller.

namespace hvd {
namespace {

using libtorch::Gathered;
using libtorch::GatheredPtr;
using libtorch::Label;
using libtorch::Place;
using libtorch::Task;

/// @throws UsageError
void check(const torch::Tensor& output, const torch::Tensor& input, const Label& label) {
  if (!output.defined()) {
    throw UsageError(label.str() +
                     ": output: the tensor is undefined; expected one for the result");
  }
  if (!libtorch::differentiates(input)) return;
  throw UsageError(
      label.str() +
      ": an operation that writes to a tensor of the caller is not differentiable, but the "
      "input requires grad; pass detach(), or use the call that returns its result");
}

GatheredPtr gathered_into(const torch::Tensor& output) {
  auto gathered = std::make_shared<Gathered>();
  gathered->target = output.detach();
  return gathered;
}

Task allreduce_into_task(const torch::Tensor& output, const torch::Tensor& input,
                         const AllreduceOptions& options) {
  check(output, input, Label{"allreduce", options.name});
  return libtorch::allreduce_task(input, options, options.name, Place::kOut, output);
}

Task allgather_into_task(const torch::Tensor& output, const torch::Tensor& input,
                         const CollectiveOptions& options) {
  check(output, input, Label{"allgather", options.name});
  return libtorch::allgather_task(input, options, options.name, gathered_into(output));
}

Task reducescatter_into_task(const torch::Tensor& output, const torch::Tensor& input,
                             const AllreduceOptions& options) {
  check(output, input, Label{"reducescatter", options.name});
  return libtorch::reducescatter_task(input, options, options.name, output);
}

Task broadcast_into_task(const torch::Tensor& output, const torch::Tensor& input, int root_rank,
                         const CollectiveOptions& options) {
  check(output, input, Label{"broadcast", options.name});
  return libtorch::broadcast_task(input, root_rank, options, Place::kOut, output);
}

Task alltoall_into_task(const torch::Tensor& output, const torch::Tensor& input,
                        const torch::Tensor& splits, const CollectiveOptions& options) {
  check(output, input, Label{"alltoall", options.name});
  return libtorch::alltoall_task(input, splits, options, gathered_into(output));
}

Task scatter_into_task(const torch::Tensor& output, const torch::Tensor& input, int root_rank,
                       const CollectiveOptions& options) {
  check(output, input, Label{"scatter", options.name});
  return libtorch::scatter_task(input, root_rank, options, options.name, gathered_into(output));
}

/// The output of the other ranks is neither checked nor written.
torch::Tensor output_at(int rank_with_result, const torch::Tensor& output) {
  return rank() == rank_with_result ? output : torch::Tensor();
}

Task reduce_into_task(const torch::Tensor& output, const torch::Tensor& input, int root_rank,
                      const AllreduceOptions& options) {
  check(rank() == root_rank ? output : input, input, Label{"reduce", options.name});
  return libtorch::reduce_task(input, root_rank, options, options.name, Place::kOut,
                               output_at(root_rank, output));
}

Task gather_into_task(const torch::Tensor& output, const torch::Tensor& input, int dst_rank,
                      const CollectiveOptions& options) {
  check(rank() == dst_rank ? output : input, input, Label{"gather", options.name});
  const GatheredPtr gathered =
      rank() == dst_rank ? gathered_into(output) : std::make_shared<Gathered>();
  return libtorch::gather_task(input, dst_rank, options, gathered);
}

/// Starts the task. The handle returns the caller's tensor.
Handle begin(Task task, const torch::Tensor& output, Progress progress) {
  task.finish = [finish = std::move(task.finish), output] {
    finish();
    return output;
  };
  return libtorch::start(std::move(task), progress);
}

}  // namespace

torch::Tensor allreduce_into(torch::Tensor output, const torch::Tensor& input,
                             const AllreduceOptions& options) {
  return begin(allreduce_into_task(output, input, options), output, Progress::kCaller).wait();
}

Handle allreduce_into_async(torch::Tensor output, const torch::Tensor& input,
                            const AllreduceOptions& options) {
  return begin(allreduce_into_task(output, input, options), output, Progress::kBackground);
}

torch::Tensor allgather_into(torch::Tensor output, const torch::Tensor& input,
                             const CollectiveOptions& options) {
  return begin(allgather_into_task(output, input, options), output, Progress::kCaller).wait();
}

Handle allgather_into_async(torch::Tensor output, const torch::Tensor& input,
                            const CollectiveOptions& options) {
  return begin(allgather_into_task(output, input, options), output, Progress::kBackground);
}

torch::Tensor reducescatter_into(torch::Tensor output, const torch::Tensor& input,
                                 const AllreduceOptions& options) {
  return begin(reducescatter_into_task(output, input, options), output, Progress::kCaller).wait();
}

Handle reducescatter_into_async(torch::Tensor output, const torch::Tensor& input,
                                const AllreduceOptions& options) {
  return begin(reducescatter_into_task(output, input, options), output, Progress::kBackground);
}

torch::Tensor broadcast_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                             const CollectiveOptions& options) {
  return begin(broadcast_into_task(output, input, root_rank, options), output, Progress::kCaller)
      .wait();
}

Handle broadcast_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                            const CollectiveOptions& options) {
  return begin(broadcast_into_task(output, input, root_rank, options), output,
               Progress::kBackground);
}

torch::Tensor alltoall_into(torch::Tensor output, const torch::Tensor& input,
                            const torch::Tensor& splits, const CollectiveOptions& options) {
  return begin(alltoall_into_task(output, input, splits, options), output, Progress::kCaller)
      .wait();
}

Handle alltoall_into_async(torch::Tensor output, const torch::Tensor& input,
                           const torch::Tensor& splits, const CollectiveOptions& options) {
  return begin(alltoall_into_task(output, input, splits, options), output, Progress::kBackground);
}

torch::Tensor scatter_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                           const CollectiveOptions& options) {
  return begin(scatter_into_task(output, input, root_rank, options), output, Progress::kCaller)
      .wait();
}

Handle scatter_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                          const CollectiveOptions& options) {
  return begin(scatter_into_task(output, input, root_rank, options), output, Progress::kBackground);
}

torch::Tensor reduce_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                          const AllreduceOptions& options) {
  return begin(reduce_into_task(output, input, root_rank, options), output, Progress::kCaller)
      .wait();
}

Handle reduce_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                         const AllreduceOptions& options) {
  return begin(reduce_into_task(output, input, root_rank, options), output, Progress::kBackground);
}

torch::Tensor gather_into(torch::Tensor output, const torch::Tensor& input, int dst_rank,
                          const CollectiveOptions& options) {
  return begin(gather_into_task(output, input, dst_rank, options), output, Progress::kCaller)
      .wait();
}

Handle gather_into_async(torch::Tensor output, const torch::Tensor& input, int dst_rank,
                         const CollectiveOptions& options) {
  return begin(gather_into_task(output, input, dst_rank, options), output, Progress::kBackground);
}

}  // namespace hvd
