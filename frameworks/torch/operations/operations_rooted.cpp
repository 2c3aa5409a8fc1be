#include <utility>

#include "hvd/torch/operations.h"
#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

// Collectives to one rank and from one: reduce and scatter.

namespace hvd {
namespace {

using libtorch::backward_name;
using libtorch::Gathered;
using libtorch::member_name;
using libtorch::Place;
using libtorch::reduce_task;
using libtorch::Task;

Handle start_group(at::TensorList tensors, int root_rank, const AllreduceOptions& options,
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
      start_group(tensors, root_rank, options, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = libtorch::attach_reduce(tensors[i], std::move(results[i]), root_rank, options,
                                         backward_name(member_name(options.name, i)));
  }
  return results;
}

Handle grouped_reduce_async(at::TensorList tensors, int root_rank,
                            const AllreduceOptions& options) {
  libtorch::check_detached(tensors, "reduce", options.name);
  return start_group(tensors, root_rank, options, Progress::kBackground);
}

Handle scatter_async(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options) {
  libtorch::check_detached(tensor, "scatter", options.name);
  return libtorch::start(
      libtorch::scatter_task(tensor, root_rank, options, std::make_shared<Gathered>()),
      Progress::kBackground);
}

torch::Tensor scatter(const torch::Tensor& tensor, int root_rank,
                      const CollectiveOptions& options) {
  Task task = libtorch::scatter_task(tensor, root_rank, options, std::make_shared<Gathered>());
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return libtorch::attach_scatter(tensor, std::move(output), root_rank, options);
}

}  // namespace hvd
