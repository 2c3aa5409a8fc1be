#include "hvd/torch/operations.h"

#include <algorithm>
#include <utility>

#include "hvd/error.h"
#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

namespace hvd {
namespace {

using libtorch::allgather_task;
using libtorch::allreduce_task;
using libtorch::alltoall_task;
using libtorch::backward_name;
using libtorch::broadcast_task;
using libtorch::Gathered;
using libtorch::GatheredPtr;
using libtorch::Label;
using libtorch::member_name;
using libtorch::Place;
using libtorch::reduce_task;
using libtorch::reducescatter_task;
using libtorch::scatter_task;
using libtorch::Task;

Handle start_grouped_allreduce(at::TensorList tensors, const AllreduceOptions& options, Place place,
                               Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return allreduce_task(tensor, options, std::move(name), place);
                              });
}

std::vector<GatheredPtr> make_gathered(std::size_t count) {
  std::vector<GatheredPtr> gathered(count);
  for (GatheredPtr& one : gathered) one = std::make_shared<Gathered>();
  return gathered;
}

Handle start_grouped_allgather(at::TensorList tensors, const CollectiveOptions& options,
                               const std::vector<GatheredPtr>& gathered, Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t i) {
                                return allgather_task(tensor, options, std::move(name),
                                                      gathered[i]);
                              });
}

}  // namespace

Handle allreduce_async(const torch::Tensor& tensor, const AllreduceOptions& options) {
  libtorch::check_detached(tensor, "allreduce", options.name);
  return libtorch::start(allreduce_task(tensor, options, options.name, Place::kOut),
                         Progress::kBackground);
}

Handle allreduce_async_(torch::Tensor tensor, const AllreduceOptions& options) {
  return libtorch::start(allreduce_task(tensor, options, options.name, Place::kIn),
                         Progress::kBackground);
}

torch::Tensor allreduce(const torch::Tensor& tensor, const AllreduceOptions& options) {
  libtorch::check_differentiable(tensor, options, "allreduce");
  Task task = allreduce_task(tensor, options, options.name, Place::kOut);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return libtorch::attach_allreduce(tensor, std::move(output), options,
                                    backward_name(options.name));
}

torch::Tensor allreduce_(torch::Tensor tensor, const AllreduceOptions& options) {
  return libtorch::start(allreduce_task(tensor, options, options.name, Place::kIn),
                         Progress::kCaller)
      .wait();
}

Handle allgather_async(const torch::Tensor& tensor, const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "allgather", options.name);
  return libtorch::start(
      allgather_task(tensor, options, options.name, std::make_shared<Gathered>()),
      Progress::kBackground);
}

torch::Tensor allgather(const torch::Tensor& tensor, const CollectiveOptions& options) {
  const auto gathered = std::make_shared<Gathered>();
  Task task = allgather_task(tensor, options, options.name, gathered);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return libtorch::attach_allgather(tensor, std::move(output), options, backward_name(options.name),
                                    *gathered);
}

Handle broadcast_async(const torch::Tensor& tensor, int root_rank,
                       const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "broadcast", options.name);
  return libtorch::start(broadcast_task(tensor, root_rank, options, Place::kOut),
                         Progress::kBackground);
}

Handle broadcast_async_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options) {
  return libtorch::start(broadcast_task(tensor, root_rank, options, Place::kIn),
                         Progress::kBackground);
}

torch::Tensor broadcast(const torch::Tensor& tensor, int root_rank,
                        const CollectiveOptions& options) {
  Task task = broadcast_task(tensor, root_rank, options, Place::kOut);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return libtorch::attach_broadcast(tensor, std::move(output), root_rank, options);
}

torch::Tensor broadcast_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options) {
  return libtorch::start(broadcast_task(tensor, root_rank, options, Place::kIn), Progress::kCaller)
      .wait();
}

Handle grouped_allreduce_async(at::TensorList tensors, const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "allreduce", options.name);
  return start_grouped_allreduce(tensors, options, Place::kOut, Progress::kBackground);
}

Handle grouped_allreduce_async_(at::TensorList tensors, const AllreduceOptions& options) {
  return start_grouped_allreduce(tensors, options, Place::kIn, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allreduce(at::TensorList tensors,
                                             const AllreduceOptions& options) {
  for (const torch::Tensor& tensor : tensors)
    libtorch::check_differentiable(tensor, options, "allreduce");
  std::vector<torch::Tensor> results =
      start_grouped_allreduce(tensors, options, Place::kOut, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = libtorch::attach_allreduce(tensors[i], std::move(results[i]), options,
                                            backward_name(member_name(options.name, i)));
  }
  return results;
}

void grouped_allreduce_(at::TensorList tensors, const AllreduceOptions& options) {
  start_grouped_allreduce(tensors, options, Place::kIn, Progress::kCaller).wait_all();
}

Handle grouped_allgather_async(at::TensorList tensors, const CollectiveOptions& options) {
  libtorch::check_detached(tensors, "allgather", options.name);
  return start_grouped_allgather(tensors, options, make_gathered(tensors.size()),
                                 Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allgather(at::TensorList tensors,
                                             const CollectiveOptions& options) {
  const std::vector<GatheredPtr> gathered = make_gathered(tensors.size());
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

/// The handle has two results: the received rows, and their number for each rank.
Handle start_alltoall(const torch::Tensor& tensor, const torch::Tensor& splits,
                      const CollectiveOptions& options, Progress progress) {
  const auto gathered = std::make_shared<Gathered>();
  Task task = alltoall_task(tensor, splits, options, gathered);
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
  return libtorch::start(reducescatter_task(tensor, options, options.name), Progress::kBackground);
}

torch::Tensor reducescatter(const torch::Tensor& tensor, const AllreduceOptions& options) {
  Task task = reducescatter_task(tensor, options, options.name);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return libtorch::attach_reducescatter(tensor, std::move(output), options,
                                        backward_name(options.name));
}

Handle grouped_reducescatter_async(at::TensorList tensors, const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "reducescatter", options.name);
  return start_grouped_reducescatter(tensors, options, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_reducescatter(at::TensorList tensors,
                                                 const AllreduceOptions& options) {
  std::vector<torch::Tensor> results =
      start_grouped_reducescatter(tensors, options, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = libtorch::attach_reducescatter(tensors[i], std::move(results[i]), options,
                                                backward_name(member_name(options.name, i)));
  }
  return results;
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
  return libtorch::start(
      libtorch::gather_task(tensor, dst_rank, options, std::make_shared<Gathered>()),
      Progress::kBackground);
}

torch::Tensor gather(const torch::Tensor& tensor, int dst_rank, const CollectiveOptions& options) {
  if (libtorch::differentiates(tensor)) {
    throw UsageError(Label{"gather", options.name}.str() +
                     ": gather is not differentiable (only the destination has a result to go back "
                     "from), but the tensor requires grad; pass detach() or use allgather");
  }
  Task task = libtorch::gather_task(tensor, dst_rank, options, std::make_shared<Gathered>());
  return libtorch::start(std::move(task), Progress::kCaller).wait();
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
                                                    std::make_shared<Gathered>());
                              });
}

Handle start_grouped_reduce(at::TensorList tensors, int root_rank, const AllreduceOptions& options,
                            Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return reduce_task(tensor, root_rank, options, std::move(name),
                                                   Place::kOut);
                              });
}

}  // namespace

Handle reduce_async(const torch::Tensor& tensor, int root_rank, const AllreduceOptions& options) {
  libtorch::check_detached(tensor, "reduce", options.name);
  return libtorch::start(reduce_task(tensor, root_rank, options, options.name, Place::kOut),
                         Progress::kBackground);
}

Handle reduce_async_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options) {
  return libtorch::start(reduce_task(tensor, root_rank, options, options.name, Place::kIn),
                         Progress::kBackground);
}

torch::Tensor reduce(const torch::Tensor& tensor, int root_rank, const AllreduceOptions& options) {
  libtorch::check_differentiable(tensor, options, "reduce");
  Task task = reduce_task(tensor, root_rank, options, options.name, Place::kOut);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return libtorch::attach_reduce(tensor, std::move(output), root_rank, options,
                                 backward_name(options.name));
}

torch::Tensor reduce_(torch::Tensor tensor, int root_rank, const AllreduceOptions& options) {
  return libtorch::start(reduce_task(tensor, root_rank, options, options.name, Place::kIn),
                         Progress::kCaller)
      .wait();
}

std::vector<torch::Tensor> grouped_reduce(at::TensorList tensors, int root_rank,
                                          const AllreduceOptions& options) {
  for (const torch::Tensor& tensor : tensors)
    libtorch::check_differentiable(tensor, options, "reduce");
  std::vector<torch::Tensor> results =
      start_grouped_reduce(tensors, root_rank, options, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = libtorch::attach_reduce(tensors[i], std::move(results[i]), root_rank, options,
                                         backward_name(member_name(options.name, i)));
  }
  return results;
}

Handle grouped_reduce_async(at::TensorList tensors, int root_rank,
                            const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "reduce", options.name);
  return start_grouped_reduce(tensors, root_rank, options, Progress::kBackground);
}

Handle scatter_async(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "scatter", options.name);
  return libtorch::start(
      scatter_task(tensor, root_rank, options, options.name, std::make_shared<Gathered>()),
      Progress::kBackground);
}

torch::Tensor scatter(const torch::Tensor& tensor, int root_rank,
                      const CollectiveOptions& options) {
  Task task = scatter_task(tensor, root_rank, options, options.name, std::make_shared<Gathered>());
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
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

}  // namespace hvd
