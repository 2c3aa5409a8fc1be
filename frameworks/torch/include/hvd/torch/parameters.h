#pragma once

#include <torch/csrc/jit/api/module.h>
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

/// @addtogroup train
/// @{

/// Tensors with their names, as Module::named_parameters() returns them.
using NamedParameters = torch::OrderedDict<std::string, torch::Tensor>;

/// This rank's GPU (hvd::gpu_index()) if hvd and LibTorch can use it, otherwise the CPU.
/// @throws NotInitializedError
torch::Device device();

/// Returns loss / size of the set, so that the *sum* of the gradients over ranks (see all_reduce)
/// is the gradient of the average loss. Do not use it with DistributedOptimizer's default average,
/// which would divide twice; hvd warns once if there is such an optimizer. Differentiable, local.
torch::Tensor scale_loss(const torch::Tensor& loss, const ProcessSet& process_set = {});

/// Reduces the parameters' `.grad` in place, in one group. Every rank passes the same parameters in
/// the same order. An undefined `.grad` of a parameter that requires grad counts as zeros, and is
/// defined afterwards if another rank had one. Parameters without `.grad` that do not require grad
/// are left out. Blocks.
/// @throws UsageError for a sparse gradient, for a tensor that is the result of a computation (such
/// as a loss: use allreduce()), and when no tensor requires grad or has a gradient; MismatchError,
/// StalledError, PeerLostError, ShutdownError
void all_reduce(const std::vector<torch::Tensor>& parameters, ReduceOp op = ReduceOp::kSum,
                const ProcessSet& process_set = {});

/// Another name for all_reduce(), to distinguish it from allreduce(), which reduces a tensor
/// itself.
inline void allreduce_gradients(const std::vector<torch::Tensor>& parameters,
                                ReduceOp op = ReduceOp::kSum, const ProcessSet& process_set = {}) {
  all_reduce(parameters, op, process_set);
}

/// Overwrites the parameters and buffers of every rank of the set with the root's, in one group,
/// for any dtype. `root_rank` is a world rank. Collective over the set; blocks.
/// @throws UsageError for a module without tensors; MismatchError with the tensor's name when the
/// models differ; and as every collective
void broadcast_parameters(const torch::nn::Module& module, int root_rank = 0);
void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set);
/// The same for a module that Python has exported (torch::jit::load()).
/// @throws UsageError also for a default-constructed module
void broadcast_parameters(const torch::jit::Module& module, int root_rank = 0,
                          const ProcessSet& process_set = {});
/// The same for a list of tensors; undefined ones are left out.
void broadcast_parameters(const NamedParameters& parameters, int root_rank = 0);
void broadcast_parameters(const NamedParameters& parameters, int root_rank,
                          const ProcessSet& process_set);

/// Overwrites only the buffers, such as the running statistics of BatchNorm, which differ between
/// ranks. Call it before an evaluation in which all ranks take part. DistributedDataParallel does
/// the same before every forward pass. Otherwise like broadcast_parameters().
void broadcast_buffers(const torch::nn::Module& module, int root_rank = 0,
                       const ProcessSet& process_set = {});
void broadcast_buffers(const torch::jit::Module& module, int root_rank = 0,
                       const ProcessSet& process_set = {});

/// The parameters of a module that Python has exported, for an optimizer of LibTorch:
///
///     torch::jit::Module net = torch::jit::load("net.pt");
///     torch::optim::AdamW adamw(hvd::parameters_of(net));
///
/// Each parameter occurs once, as in Python's parameters(), even if it has several names (tied
/// weights). Local.
/// @throws UsageError for a default-constructed module
std::vector<torch::Tensor> parameters_of(const torch::jit::Module& module);

namespace libtorch {

/// @param who begins the error text @throws UsageError for a null pointer
template <std::derived_from<torch::nn::Module> Module>
const Module& module_in(const std::shared_ptr<Module>& module, const char* who) {
  if (!module) {
    throw UsageError(std::string(who) +
                     ": the shared_ptr to a module is null; expected one to a module");
  }
  return *module;
}

}  // namespace libtorch

/// The same for module holders (nn::Linear and others from TORCH_MODULE) and shared pointers to
/// modules. @throws UsageError also for a null pointer
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

/// Replaces the optimizer's state and options (learning rate, betas, ... of each parameter group
/// and the defaults) on every rank of the set with the root's. For SGD, Adam, AdamW, Adagrad,
/// RMSprop, LBFGS and other optimizers with save() and load(). State that the root does not have is
/// removed. `root_rank` is a world rank. Collective over the set; blocks. Other threads must not
/// use the optimizer. For a DistributedOptimizer it acts on the wrapped optimizer. For a
/// ShardedOptimizer it sends the options, and the state that the root has loaded since its last
/// step() (as by torch::load()); without such state each rank keeps its part.
/// @throws MismatchError on every rank when the parameter groups differ; UsageError for the
/// optimizer that a ShardedOptimizer wraps; and as every collective
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank = 0);
void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const ProcessSet& process_set);

/// @}

}  // namespace hvd
