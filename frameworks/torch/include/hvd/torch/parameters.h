#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <concepts>
#include <memory>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "hvd/process_set.h"
#include "hvd/types.h"

namespace hvd {

using NamedParameters = torch::OrderedDict<std::string, torch::Tensor>;

/// Where this rank should compute: its GPU (hvd::gpu_index()) when hvd and LibTorch both can use
/// it, else cpu. @throws NotInitializedError.
torch::Device device();

/// loss / size of the set, so that gradients *summed* over ranks (see all_reduce) are those of the
/// average loss. Not for DistributedOptimizer's default average, which would divide twice: warns
/// once when one is alive. Differentiable, local.
torch::Tensor scale_loss(const torch::Tensor& loss, const ProcessSet& process_set = {});

/// Reduces the parameters' `.grad` in place, all in one group, also under the name
/// allreduce_gradients(). Blocks. The same parameters in the same order on every rank. An undefined
/// `.grad` of a parameter that requires grad counts as zeros, and is defined afterwards if any rank
/// had one; a parameter without grad and without requires_grad is left out.
/// @throws UsageError for a sparse gradient, for a tensor that is the result of a computation (a
/// loss: use allreduce()), and when no tensor requires grad or has one; MismatchError,
/// StalledError, PeerLostError, ShutdownError.
void all_reduce(const std::vector<torch::Tensor>& parameters, ReduceOp op = ReduceOp::kSum,
                const ProcessSet& process_set = {});

/// all_reduce() under a name that cannot be taken for allreduce(), which reduces a tensor itself.
inline void allreduce_gradients(const std::vector<torch::Tensor>& parameters,
                                ReduceOp op = ReduceOp::kSum, const ProcessSet& process_set = {}) {
  all_reduce(parameters, op, process_set);
}

/// Overwrites the parameters and buffers of every rank of the set with the root's, all in one
/// group, whatever their dtype. Collective over the set, blocks. `root_rank` is a world rank.
/// @throws UsageError for a module that has none; MismatchError naming the tensor when the models
/// differ; and as every collective.
void broadcast_parameters(const torch::nn::Module& module, int root_rank = 0);
void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set);
/// The same for given tensors; undefined ones are left out.
void broadcast_parameters(const NamedParameters& parameters, int root_rank = 0);
void broadcast_parameters(const NamedParameters& parameters, int root_rank,
                          const ProcessSet& process_set);

/// Overwrites the buffers alone: the running statistics of BatchNorm, which each rank takes from
/// its own batches. Before an evaluation in which all ranks take part, so that they evaluate one
/// model; as often as DistributedDataParallel does, before every forward pass, it costs a
/// synchronous broadcast each time. Otherwise as broadcast_parameters().
void broadcast_buffers(const torch::nn::Module& module, int root_rank = 0,
                       const ProcessSet& process_set = {});

namespace libtorch {

/// @throws UsageError for a null pointer  @param who begins the message
template <std::derived_from<torch::nn::Module> Module>
const Module& module_in(const std::shared_ptr<Module>& module, const char* who) {
  if (!module) {
    throw UsageError(std::string(who) +
                     ": the shared_ptr to a module is null; expected one to a module");
  }
  return *module;
}

}  // namespace libtorch

/// Module holders (nn::Linear, nn::Sequential, everything from TORCH_MODULE) and shared pointers to
/// modules. @throws UsageError for a null pointer
template <class Impl>
void broadcast_parameters(const torch::nn::ModuleHolder<Impl>& module, int root_rank = 0,
                          const ProcessSet& process_set = {}) {
  broadcast_parameters(static_cast<const torch::nn::Module&>(*module), root_rank, process_set);
}
template <std::derived_from<torch::nn::Module> Module>
void broadcast_parameters(const std::shared_ptr<Module>& module, int root_rank = 0,
                          const ProcessSet& process_set = {}) {
  broadcast_parameters(
      static_cast<const torch::nn::Module&>(libtorch::module_in(module, "broadcast_parameters")),
      root_rank, process_set);
}
template <class Impl>
void broadcast_buffers(const torch::nn::ModuleHolder<Impl>& module, int root_rank = 0,
                       const ProcessSet& process_set = {}) {
  broadcast_buffers(static_cast<const torch::nn::Module&>(*module), root_rank, process_set);
}
template <std::derived_from<torch::nn::Module> Module>
void broadcast_buffers(const std::shared_ptr<Module>& module, int root_rank = 0,
                       const ProcessSet& process_set = {}) {
  broadcast_buffers(
      static_cast<const torch::nn::Module&>(libtorch::module_in(module, "broadcast_buffers")),
      root_rank, process_set);
}

/// Gives every rank of the set the root's optimizer state and options (learning rate, betas, ... of
/// each parameter group and the defaults). For every optimizer that can be saved: SGD, Adam, AdamW,
/// Adagrad, RMSprop, LBFGS and others with save() and load(). State that only other ranks have is
/// dropped. Collective over the set, blocks; `root_rank` is a world rank; not thread-safe with
/// respect to the optimizer. A DistributedOptimizer stands for the optimizer that it wraps. So does
/// a ShardedOptimizer: options, and state that the root was given since its last step(), as by
/// torch::load(); each rank keeps the part that it has if there is none.
/// @throws MismatchError on every rank when the parameter groups differ; UsageError for the
/// optimizer that a ShardedOptimizer wraps; and as every collective.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank = 0);
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const ProcessSet& process_set);

}  // namespace hvd
