#include "hvd/torch/operations.h"

#include <algorithm>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

namespace hvd {
namespace {

using libtorch::allgather_task;
using libtorch::allreduce_task;
using libtorch::alltoall_task;
using libtorch::backward_name;
using libtorch::broadcast_task;
using libtorch::GatheredResult;
using libtorch::GatheredResultPtr;
using libtorch::Label;
using libtorch::member_name;
using libtorch::OperationTask;
using libtorch::reduce_task;
using libtorch::reducescatter_task;
using libtorch::scatter_task;

Handle start_in_background(OperationTask task) {
  return libtorch::start(std::move(task), Progress::kBackground);
}

torch::Tensor result_of(OperationTask task) {
  return libtorch::start(std::move(task), Progress::kCaller).wait();
}

/// Adds the results of a group to the graph by attach(input, result, name of the backward).
template <class Attach>
std::vector<torch::Tensor> attach_each(at::TensorList inputs, std::vector<torch::Tensor> results,
                                       const std::string& group, const Attach& attach) {
  for (std::size_t i = 0; i < results.size(); ++i)
    results[i] = attach(inputs[i], std::move(results[i]), backward_name(member_name(group, i)));
  return results;
}

Handle start_grouped_allreduce(at::TensorList tensors, const AllreduceOptions& options,
                               bool in_place, Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return allreduce_task(tensor, options, std::move(name),
                                                      in_place ? tensor : torch::Tensor());
                              });
}

std::vector<GatheredResultPtr> make_gathered(std::size_t count) {
  std::vector<GatheredResultPtr> gathered(count);
  for (GatheredResultPtr& one : gathered) one = std::make_shared<GatheredResult>();
  return gathered;
}

Handle start_grouped_allgather(at::TensorList tensors, const CollectiveOptions& options,
                               const std::vector<GatheredResultPtr>& gathered, Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t i) {
                                return allgather_task(tensor, options, std::move(name),
                                                      gathered[i]);
                              });
}

}  // namespace

Handle allreduce_async(const torch::Tensor& tensor, const AllreduceOptions& options) {
  libtorch::check_detached(tensor, "allreduce", options.name);
  return start_in_background(allreduce_task(tensor, options, options.name));
}

Handle allreduce_async_(torch::Tensor tensor, const AllreduceOptions& options) {
  return start_in_background(allreduce_task(tensor, options, options.name, tensor));
}

torch::Tensor allreduce(const torch::Tensor& tensor, const AllreduceOptions& options) {
  libtorch::check_differentiable(tensor, options, "allreduce");
  torch::Tensor output = result_of(allreduce_task(tensor, options, options.name));
  return libtorch::attach_allreduce(tensor, std::move(output), options,
                                    backward_name(options.name));
}

torch::Tensor allreduce_(torch::Tensor tensor, const AllreduceOptions& options) {
  return result_of(allreduce_task(tensor, options, options.name, tensor));
}

Handle allgather_async(const torch::Tensor& tensor, const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "allgather", options.name);
  return start_in_background(
      allgather_task(tensor, options, options.name, std::make_shared<GatheredResult>()));
}

torch::Tensor allgather(const torch::Tensor& tensor, const CollectiveOptions& options) {
  const auto gathered = std::make_shared<GatheredResult>();
  torch::Tensor output = result_of(allgather_task(tensor, options, options.name, gathered));
  return libtorch::attach_allgather(tensor, std::move(output), options, backward_name(options.name),
                                    *gathered);
}

Handle broadcast_async(const torch::Tensor& tensor, int root_rank,
                       const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "broadcast", options.name);
  return start_in_background(broadcast_task(tensor, root_rank, options));
}

Handle broadcast_async_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options) {
  return start_in_background(broadcast_task(tensor, root_rank, options, tensor));
}

torch::Tensor broadcast(const torch::Tensor& tensor, int root_rank,
                        const CollectiveOptions& options) {
  torch::Tensor output = result_of(broadcast_task(tensor, root_rank, options));
  return libtorch::attach_broadcast(tensor, std::move(output), root_rank, options);
}

torch::Tensor broadcast_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options) {
  return result_of(broadcast_task(tensor, root_rank, options, tensor));
}

Handle grouped_allreduce_async(at::TensorList tensors, const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "allreduce", options.name);
  return start_grouped_allreduce(tensors, options, /*in_place=*/false, Progress::kBackground);
}

Handle grouped_allreduce_async_(at::TensorList tensors, const AllreduceOptions& options) {
  return start_grouped_allreduce(tensors, options, /*in_place=*/true, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allreduce(at::TensorList tensors,
                                             const AllreduceOptions& options) {
  for (const torch::Tensor& tensor : tensors)
    libtorch::check_differentiable(tensor, options, "allreduce");
  return attach_each(
      tensors,
      start_grouped_allreduce(tensors, options, /*in_place=*/false, Progress::kCaller).wait_all(),
      options.name, [&](const torch::Tensor& input, torch::Tensor output, std::string name) {
        return libtorch::attach_allreduce(input, std::move(output), options, std::move(name));
      });
}

void grouped_allreduce_(at::TensorList tensors, const AllreduceOptions& options) {
  start_grouped_allreduce(tensors, options, /*in_place=*/true, Progress::kCaller).wait_all();
}

Handle grouped_allgather_async(at::TensorList tensors, const CollectiveOptions& options) {
  libtorch::check_detached(tensors, "allgather", options.name);
  return start_grouped_allgather(tensors, options, make_gathered(tensors.size()),
                                 Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allgather(at::TensorList tensors,
                                             const CollectiveOptions& options) {
  const std::vector<GatheredResultPtr> gathered = make_gathered(tensors.size());
  std::vector<torch::Tensor> results =
      start_grouped_allgather(tensors, options, gathered, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] =
        libtorch::attach_allgather(tensors[i], std::move(results[i]), options,
                                   backward_name(member_name(options.name, i)), *gathered[i]);
  }
  return results;
}

namespace {

Handle start_grouped_reducescatter(at::TensorList tensors, const AllreduceOptions& options,
                                   Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return reducescatter_task(tensor, options, std::move(name));
                              });
}

/// The handle has two results: the received rows, and the number of rows from each rank.
Handle start_alltoall(const torch::Tensor& tensor, const torch::Tensor& splits,
                      const CollectiveOptions& options, Progress progress) {
  const auto gathered = std::make_shared<GatheredResult>();
  OperationTask task = alltoall_task(tensor, splits, options, gathered);
  std::vector<Submission> submissions;
  submissions.push_back(std::move(task.submission));
  return libtorch::start(
      std::move(submissions),
      {std::move(task.finish),
       [gathered] { return torch::tensor(gathered->first_dims, torch::kInt64); }},
      progress);
}

}  // namespace

Handle reducescatter_async(const torch::Tensor& tensor, const AllreduceOptions& options) {
  libtorch::check_detached(tensor, "reducescatter", options.name);
  return start_in_background(reducescatter_task(tensor, options, options.name));
}

torch::Tensor reducescatter(const torch::Tensor& tensor, const AllreduceOptions& options) {
  torch::Tensor output = result_of(reducescatter_task(tensor, options, options.name));
  return libtorch::attach_reducescatter(tensor, std::move(output), options,
                                        backward_name(options.name));
}

Handle grouped_reducescatter_async(at::TensorList tensors, const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "reducescatter", options.name);
  return start_grouped_reducescatter(tensors, options, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_reducescatter(at::TensorList tensors,
                                                 const AllreduceOptions& options) {
  return attach_each(
      tensors, start_grouped_reducescatter(tensors, options, Progress::kCaller).wait_all(),
      options.name, [&](const torch::Tensor& input, torch::Tensor output, std::string name) {
        return libtorch::attach_reducescatter(input, std::move(output), options, std::move(name));
      });
}

Handle alltoall_async(const torch::Tensor& tensor, const torch::Tensor& splits,
                      const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "alltoall", options.name);
  return start_alltoall(tensor, splits, options, Progress::kBackground);
}

AlltoallResult alltoall(const torch::Tensor& tensor, const torch::Tensor& splits,
                        const CollectiveOptions& options) {
  std::vector<torch::Tensor> results =
      start_alltoall(tensor, splits, options, Progress::kCaller).wait_all();
  return {.output = libtorch::attach_alltoall(tensor, std::move(results[0]), results[1], options),
          .received_splits = results[1]};
}

Handle gather_async(const torch::Tensor& tensor, int dst_rank, const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "gather", options.name);
  return start_in_background(
      libtorch::gather_task(tensor, dst_rank, options, std::make_shared<GatheredResult>()));
}

torch::Tensor gather(const torch::Tensor& tensor, int dst_rank, const CollectiveOptions& options) {
  if (libtorch::differentiates(tensor)) {
    throw UsageError(Label{"gather", options.name}.str() +
                     ": gather is not differentiable (only the destination has a result), but the "
                     "tensor requires grad; pass detach() or use allgather");
  }
  return result_of(
      libtorch::gather_task(tensor, dst_rank, options, std::make_shared<GatheredResult>()));
}

torch::Tensor all_gather_into_tensor(const torch::Tensor& tensor, std::int64_t dim,
                                     const CollectiveOptions& options) {
  const Label label{"all_gather_into_tensor", options.name};
  libtorch::check_tensor(tensor, label);
  const std::int64_t dims = std::max<std::int64_t>(tensor.dim(), 1);
  if (dim < -dims || dim >= dims) {
    throw UsageError(label.str() + ": dim: expected " + std::to_string(-dims) + " to " +
                     std::to_string(dims - 1) + " for a tensor of shape " +
                     shape_to_string(tensor.sizes().vec()) + ", got " + std::to_string(dim));
  }
  if (dim < 0) dim += dims;
  if (dim == 0) return allgather(tensor, options);
  return allgather(tensor.movedim(dim, 0), options).movedim(0, dim).contiguous();
}

namespace {

Handle start_grouped_scatter(at::TensorList tensors, int root_rank,
                             const CollectiveOptions& options, Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return scatter_task(tensor, root_rank, options, std::move(name),
                                                    std::make_shared<GatheredResult>());
                              });
}

Handle start_grouped_reduce(at::TensorList tensors, int root_rank, const AllreduceOptions& options,
                            Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return reduce_task(tensor, root_rank, options, std::move(name));
                              });
}

}  // namespace

Handle reduce_async(const torch::Tensor& tensor, int root_rank, const AllreduceOptions& options) {
  libtorch::check_detached(tensor, "reduce", options.name);
  return start_in_background(reduce_task(tensor, root_rank, options, options.name));
}

Handle reduce_async_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options) {
  return start_in_background(reduce_task(tensor, root_rank, options, options.name, tensor));
}

torch::Tensor reduce(const torch::Tensor& tensor, int root_rank, const AllreduceOptions& options) {
  libtorch::check_differentiable(tensor, options, "reduce");
  torch::Tensor output = result_of(reduce_task(tensor, root_rank, options, options.name));
  return libtorch::attach_reduce(tensor, std::move(output), root_rank, options,
                                 backward_name(options.name));
}

torch::Tensor reduce_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options) {
  return result_of(reduce_task(tensor, root_rank, options, options.name, tensor));
}

std::vector<torch::Tensor> grouped_reduce(at::TensorList tensors, int root_rank,
                                          const AllreduceOptions& options) {
  for (const torch::Tensor& tensor : tensors)
    libtorch::check_differentiable(tensor, options, "reduce");
  return attach_each(
      tensors, start_grouped_reduce(tensors, root_rank, options, Progress::kCaller).wait_all(),
      options.name, [&](const torch::Tensor& input, torch::Tensor output, std::string name) {
        return libtorch::attach_reduce(input, std::move(output), root_rank, options,
                                       std::move(name));
      });
}

Handle grouped_reduce_async(at::TensorList tensors, int root_rank,
                            const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "reduce", options.name);
  return start_grouped_reduce(tensors, root_rank, options, Progress::kBackground);
}

Handle scatter_async(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "scatter", options.name);
  return start_in_background(
      scatter_task(tensor, root_rank, options, options.name, std::make_shared<GatheredResult>()));
}

torch::Tensor scatter(const torch::Tensor& tensor, int root_rank,
                      const CollectiveOptions& options) {
  torch::Tensor output = result_of(
      scatter_task(tensor, root_rank, options, options.name, std::make_shared<GatheredResult>()));
  return libtorch::attach_scatter(tensor, std::move(output), root_rank, options);
}

Handle grouped_scatter_async(at::TensorList tensors, int root_rank,
                             const CollectiveOptions& options) {
  libtorch::check_detached(tensors, "scatter", options.name);
  return start_grouped_scatter(tensors, root_rank, options, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_scatter(at::TensorList tensors, int root_rank,
                                           const CollectiveOptions& options) {
  std::vector<torch::Tensor> results =
      start_grouped_scatter(tensors, root_rank, options, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = libtorch::attach_scatter(
        tensors[i], std::move(results[i]), root_rank,
        {.name = member_name(options.name, i), .process_set = options.process_set});
  }
  return results;
}

// Collectives that write their result to a tensor of the caller.

namespace {

/// Starts an operation that writes to `output`. The handle returns `output`.
/// @param make makes the task for an alias of `output`, or for an undefined tensor unless `here`
/// @param here whether this rank has a result; otherwise `output` is neither checked nor written
/// @throws UsageError for an undefined output, for an input that autograd tracks, or as `make`
template <class MakeTask>
Handle start_into(const Label& label, const torch::Tensor& output, const torch::Tensor& input,
                  Progress progress, const MakeTask& make, bool here = true) {
  if (here && !output.defined()) {
    throw UsageError(label.str() +
                     ": output: the tensor is undefined; expected one for the result");
  }
  if (libtorch::differentiates(input)) {
    throw UsageError(
        label.str() +
        ": an operation that writes to a tensor of the caller is not differentiable, but the "
        "input requires grad; pass detach(), or use the call that returns its result");
  }
  OperationTask task = make(here ? output.detach() : torch::Tensor());
  task.finish = [finish = std::move(task.finish), output] {
    finish();
    return output;
  };
  return libtorch::start(std::move(task), progress);
}

GatheredResultPtr gathered_into(torch::Tensor output) {
  auto gathered = std::make_shared<GatheredResult>();
  gathered->target = std::move(output);
  return gathered;
}

Handle start_allreduce_into(const torch::Tensor& output, const torch::Tensor& input,
                            const AllreduceOptions& options, Progress progress) {
  return start_into(Label{"allreduce", options.name}, output, input, progress,
                    [&](const torch::Tensor& target) {
                      return allreduce_task(input, options, options.name, target);
                    });
}

Handle start_allgather_into(const torch::Tensor& output, const torch::Tensor& input,
                            const CollectiveOptions& options, Progress progress) {
  return start_into(Label{"allgather", options.name}, output, input, progress,
                    [&](const torch::Tensor& target) {
                      return allgather_task(input, options, options.name, gathered_into(target));
                    });
}

Handle start_reducescatter_into(const torch::Tensor& output, const torch::Tensor& input,
                                const AllreduceOptions& options, Progress progress) {
  return start_into(Label{"reducescatter", options.name}, output, input, progress,
                    [&](const torch::Tensor& target) {
                      return reducescatter_task(input, options, options.name, target);
                    });
}

Handle start_broadcast_into(const torch::Tensor& output, const torch::Tensor& input, int root_rank,
                            const CollectiveOptions& options, Progress progress) {
  return start_into(Label{"broadcast", options.name}, output, input, progress,
                    [&](const torch::Tensor& target) {
                      return broadcast_task(input, root_rank, options, target);
                    });
}

Handle start_alltoall_into(const torch::Tensor& output, const torch::Tensor& input,
                           const torch::Tensor& splits, const CollectiveOptions& options,
                           Progress progress) {
  return start_into(Label{"alltoall", options.name}, output, input, progress,
                    [&](const torch::Tensor& target) {
                      return alltoall_task(input, splits, options, gathered_into(target));
                    });
}

Handle start_scatter_into(const torch::Tensor& output, const torch::Tensor& input, int root_rank,
                          const CollectiveOptions& options, Progress progress) {
  return start_into(
      Label{"scatter", options.name}, output, input, progress, [&](const torch::Tensor& target) {
        return scatter_task(input, root_rank, options, options.name, gathered_into(target));
      });
}

Handle start_reduce_into(const torch::Tensor& output, const torch::Tensor& input, int root_rank,
                         const AllreduceOptions& options, Progress progress) {
  return start_into(
      Label{"reduce", options.name}, output, input, progress,
      [&](const torch::Tensor& target) {
        return reduce_task(input, root_rank, options, options.name, target);
      },
      rank() == root_rank);
}

Handle start_gather_into(const torch::Tensor& output, const torch::Tensor& input, int dst_rank,
                         const CollectiveOptions& options, Progress progress) {
  return start_into(
      Label{"gather", options.name}, output, input, progress,
      [&](const torch::Tensor& target) {
        return libtorch::gather_task(input, dst_rank, options, gathered_into(target));
      },
      rank() == dst_rank);
}

}  // namespace

torch::Tensor allreduce_into(torch::Tensor output, const torch::Tensor& input,
                             const AllreduceOptions& options) {
  return start_allreduce_into(output, input, options, Progress::kCaller).wait();
}

Handle allreduce_into_async(torch::Tensor output, const torch::Tensor& input,
                            const AllreduceOptions& options) {
  return start_allreduce_into(output, input, options, Progress::kBackground);
}

torch::Tensor allgather_into(torch::Tensor output, const torch::Tensor& input,
                             const CollectiveOptions& options) {
  return start_allgather_into(output, input, options, Progress::kCaller).wait();
}

Handle allgather_into_async(torch::Tensor output, const torch::Tensor& input,
                            const CollectiveOptions& options) {
  return start_allgather_into(output, input, options, Progress::kBackground);
}

torch::Tensor reducescatter_into(torch::Tensor output, const torch::Tensor& input,
                                 const AllreduceOptions& options) {
  return start_reducescatter_into(output, input, options, Progress::kCaller).wait();
}

Handle reducescatter_into_async(torch::Tensor output, const torch::Tensor& input,
                                const AllreduceOptions& options) {
  return start_reducescatter_into(output, input, options, Progress::kBackground);
}

torch::Tensor broadcast_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                             const CollectiveOptions& options) {
  return start_broadcast_into(output, input, root_rank, options, Progress::kCaller).wait();
}

Handle broadcast_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                            const CollectiveOptions& options) {
  return start_broadcast_into(output, input, root_rank, options, Progress::kBackground);
}

torch::Tensor alltoall_into(torch::Tensor output, const torch::Tensor& input,
                            const torch::Tensor& splits, const CollectiveOptions& options) {
  return start_alltoall_into(output, input, splits, options, Progress::kCaller).wait();
}

Handle alltoall_into_async(torch::Tensor output, const torch::Tensor& input,
                           const torch::Tensor& splits, const CollectiveOptions& options) {
  return start_alltoall_into(output, input, splits, options, Progress::kBackground);
}

torch::Tensor scatter_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                           const CollectiveOptions& options) {
  return start_scatter_into(output, input, root_rank, options, Progress::kCaller).wait();
}

Handle scatter_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                          const CollectiveOptions& options) {
  return start_scatter_into(output, input, root_rank, options, Progress::kBackground);
}

torch::Tensor reduce_into(torch::Tensor output, const torch::Tensor& input, int root_rank,
                          const AllreduceOptions& options) {
  return start_reduce_into(output, input, root_rank, options, Progress::kCaller).wait();
}

Handle reduce_into_async(torch::Tensor output, const torch::Tensor& input, int root_rank,
                         const AllreduceOptions& options) {
  return start_reduce_into(output, input, root_rank, options, Progress::kBackground);
}

torch::Tensor gather_into(torch::Tensor output, const torch::Tensor& input, int dst_rank,
                          const CollectiveOptions& options) {
  return start_gather_into(output, input, dst_rank, options, Progress::kCaller).wait();
}

Handle gather_into_async(torch::Tensor output, const torch::Tensor& input, int dst_rank,
                         const CollectiveOptions& options) {
  return start_gather_into(output, input, dst_rank, options, Progress::kBackground);
}

}  // namespace hvd
