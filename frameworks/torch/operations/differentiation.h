#pragma once

#include <torch/types.h>

#include <string>
#include <string_view>

#include "hvd/torch/operations.h"
#include "operations/operation_tasks.h"

/// Autograd for collectives. A collective runs first, outside autograd. If grad mode is on and the
/// input requires grad, attach_*() then adds its result to the graph, with a backward that
/// communicates under the name `name`.
namespace hvd::libtorch {

/// Returns whether autograd records operations on the tensor.
bool differentiates(const torch::Tensor& tensor);

std::string backward_name(const std::string& name);

/// @throws UsageError for a reduction without a derivative, if the tensor requires grad
void check_differentiable(const torch::Tensor& tensor, const AllreduceOptions& options,
                          std::string_view operation);

/// @throws UsageError when autograd would record an asynchronous operation, which is not supported
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
                               const GatheredResult& gathered);
torch::Tensor attach_broadcast(const torch::Tensor& input, torch::Tensor output, int root_rank,
                               const CollectiveOptions& options);
torch::Tensor attach_alltoall(const torch::Tensor& input, torch::Tensor output,
                              torch::Tensor received_splits, const CollectiveOptions& options);

}  // namespace hvd::libtorch
