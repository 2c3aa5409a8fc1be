#include <algorithm>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/operations.h"
#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

// The collectives whose ranks end up with different tensors, and allgather along any dimension.

namespace hvd {
namespace {

using libtorch::alltoall_task;
using libtorch::Gathered;
using libtorch::GatheredPtr;
using libtorch::Label;
using libtorch::member_name;
using libtorch::reducescatter_task;
using libtorch::Task;

Handle grouped_scatter(at::TensorList tensors, const AllreduceOptions& options, Progress progress) {
  return libtorch::start_each(tensors, options.name, progress,
                              [&](const torch::Tensor& tensor, std::string name, std::size_t) {
                                return reducescatter_task(tensor, options, std::move(name));
                              });
}

/// Two results: what was received and how many rows from each rank.
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
                                        libtorch::backward_name(options.name));
}

Handle grouped_reducescatter_async(at::TensorList tensors, const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "reducescatter", options.name);
  return grouped_scatter(tensors, options, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_reducescatter(at::TensorList tensors,
                                                 const AllreduceOptions& options) {
  std::vector<torch::Tensor> results =
      grouped_scatter(tensors, options, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] =
        libtorch::attach_reducescatter(tensors[i], std::move(results[i]), options,
                                       libtorch::backward_name(member_name(options.name, i)));
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

}  // namespace hvd
