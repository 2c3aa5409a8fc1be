#pragma once

#include <torch/types.h>

#include <string>
#include <string_view>

#include "hvd/torch/operations.h"
#include "operations/operation_tasks.h"

/// Autograd for collectives. A collective runs first, outside autograd; attach_*() then puts its
/// result into the graph, with a backward that communicates, if grad mode is on and the input
/// requires grad. `name` is the backward's.
namespace hvd::libtorch {

/// Whether autograd is to record what happens to the tensor.
bool differentiates(const torch::Tensor& tensor);

std::string backward_name(const std::string& name);

/// @throws UsageError when the reduction has no derivative but one is asked for.
void check_differentiable(const torch::Tensor& tensor, const AllreduceOptions& options,
                          std::string_view operation);

/// @throws UsageError when autograd would record an asynchronous operation, which it cannot.
void check_detached(const torch::Tensor& tensor, std::string_view operation, std::string_view name);
void check_detached(at::TensorList tensors, std::string_view operation, std::string_view name);

torch::Tensor attach_allreduce(const torch::Tensor& input, torch::Tensor output,
                               const AllreduceOptions& options, std::string name);
torch::Tensor attach_reduce(const torch::Tensor& input, torch::Tensor output, int root_rank,
                            const AllreduceOptions& options, std::string name);
torch::Tensor attach_scatter(const torch::Tensor& input, torch::Tensor output, int root_rank,
                             const CollectiveOptions& options);
torch::Tensor attach_reducescatter(const torch::Tensor& input, torch::Tensor output,
                                   const AllreduceOptions& options, std::string name);
torch::Tensor attach_allgather(const torch::Tensor& input, torch::Tensor output,
                               const CollectiveOptions& options, std::string name,
                               const Gathered& gathered);
torch::Tensor attach_broadcast(const torch::Tensor& input, torch::Tensor output, int root_rank,
                               const CollectiveOptions& options);
torch::Tensor attach_alltoall(const torch::Tensor& input, torch::Tensor output,
                              torch::Tensor received_splits, const CollectiveOptions& options);

}  // namespace hvd::libtorch
