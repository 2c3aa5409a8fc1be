#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/types.h"

namespace hvd {

using NamedParameters = torch::OrderedDict<std::string, torch::Tensor>;

/// Where this rank should compute: its GPU (hvd::gpu_index()) when hvd and LibTorch both can use it,
/// else cpu. @throws NotInitializedError.
torch::Device device();

/// loss / size of the set, so that gradients *summed* over ranks (see all_reduce) are those of the
/// average loss. Not for DistributedOptimizer's default average, which would divide twice: warns
/// once when one is alive. Differentiable, local.
torch::Tensor scale_loss(const torch::Tensor& loss, const ProcessSet& process_set = {});

/// Reduces the parameters' `.grad` in place, all in one group. Blocks. The same parameters in the
/// same order on every rank. An undefined
/// `.grad` of a parameter that requires grad counts as zeros, and is defined afterwards if any rank
/// had one; a parameter without grad and without requires_grad is left out.
/// @throws UsageError for a sparse gradient; MismatchError, StalledError, PeerLostError,
/// ShutdownError.
void all_reduce(const std::vector<torch::Tensor>& parameters, ReduceOp op = ReduceOp::kSum,
                const ProcessSet& process_set = {});

/// Overwrites the parameters and buffers of every rank with the root's, all in one group.
/// Collective over all ranks, blocks. `root_rank` is a world rank. @throws MismatchError naming the
/// tensor when the models differ; and as every collective.
void broadcast_parameters(const torch::nn::Module& module, int root_rank = 0);
/// The same for given tensors; undefined ones are left out.
void broadcast_parameters(const NamedParameters& parameters, int root_rank = 0);

/// Module holders: nn::Linear, nn::Sequential, everything from TORCH_MODULE.
template <class Impl>
void broadcast_parameters(const torch::nn::ModuleHolder<Impl>& module, int root_rank = 0) {
  broadcast_parameters(static_cast<const torch::nn::Module&>(*module), root_rank);
}
template <class Module, std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>, int> = 0>
void broadcast_parameters(const std::shared_ptr<Module>& module, int root_rank = 0) {
  broadcast_parameters(static_cast<const torch::nn::Module&>(*module), root_rank);
}

/// Gives every rank the root's optimizer state and options (learning rate, betas, ... of each
/// parameter group and the defaults). For every optimizer that can be saved: SGD, Adam, AdamW,
/// Adagrad, RMSprop, LBFGS and others with save() and load(). State that only other ranks have is
/// dropped. Collective over all ranks, blocks; not thread-safe with respect to the optimizer.
/// @throws MismatchError on every rank when the parameter groups differ; and as every collective.
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank = 0);

}  // namespace hvd
