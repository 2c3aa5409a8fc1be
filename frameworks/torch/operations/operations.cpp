#include "hvd/torch/operations.h"

#include <utility>

#include "operations/differentiation.h"
#include "operations/operation_tasks.h"

namespace hvd {
namespace {

using libtorch::allgather_task;
using libtorch::allreduce_task;
using libtorch::backward_name;
using libtorch::broadcast_task;
using libtorch::Gathered;
using libtorch::GatheredPtr;
using libtorch::member_name;
using libtorch::Place;
using libtorch::Task;

Handle grouped_reduce(at::TensorList tensors, const AllreduceOptions& options, Place place,
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

Handle grouped_gather(at::TensorList tensors, const CollectiveOptions& options,
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
  return grouped_reduce(tensors, options, Place::kOut, Progress::kBackground);
}

Handle grouped_allreduce_async_(at::TensorList tensors, const AllreduceOptions& options) {
  return grouped_reduce(tensors, options, Place::kIn, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allreduce(at::TensorList tensors,
                                             const AllreduceOptions& options) {
  for (const torch::Tensor& tensor : tensors)
    libtorch::check_differentiable(tensor, options, "allreduce");
  std::vector<torch::Tensor> results =
      grouped_reduce(tensors, options, Place::kOut, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = libtorch::attach_allreduce(tensors[i], std::move(results[i]), options,
                                            backward_name(member_name(options.name, i)));
  }
  return results;
}

void grouped_allreduce_(at::TensorList tensors, const AllreduceOptions& options) {
  grouped_reduce(tensors, options, Place::kIn, Progress::kCaller).wait_all();
}

Handle grouped_allgather_async(at::TensorList tensors, const CollectiveOptions& options) {
  libtorch::check_detached(tensors, "allgather", options.name);
  return grouped_gather(tensors, options, make_gathered(tensors.size()), Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allgather(at::TensorList tensors,
                                             const CollectiveOptions& options) {
  const std::vector<GatheredPtr> gathered = make_gathered(tensors.size());
  std::vector<torch::Tensor> results =
      grouped_gather(tensors, options, gathered, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] =
        libtorch::attach_allgather(tensors[i], std::move(results[i]), options,
                                   backward_name(member_name(options.name, i)), *gathered[i]);
  }
  return results;
}

}  // namespace hvd
