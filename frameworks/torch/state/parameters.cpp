#include "hvd/torch/parameters.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/object.h"
#include "operations/operation_tasks.h"
#include "optimizer/live_optimizers.h"
#include "reducer/gradient_exchange.h"
#include "reducer/reduced_parameter.h"
#include "state/optimizer_state.h"
#include "tensors/device_order.h"
#include "tensors/script_module.h"
#include "tensors/tensor_adapter.h"

namespace hvd {
namespace {

/// Autograd keeps no gradient of a computed tensor such as a loss, so there would be no gradient to
/// reduce.
void refuse_result(const torch::Tensor& tensor, std::size_t index) {
  if (tensor.is_leaf() || tensor.retains_grad()) return;
  throw UsageError("all_reduce: tensor " + std::to_string(index) + ", shape " +
                   shape_to_string(tensor.sizes().vec()) +
                   ", is the result of a computation and has no .grad, which is what all_reduce() "
                   "reduces; expected parameters; to reduce the tensor "
                   "itself, such as a loss, use hvd::allreduce(tensor.detach())");
}

/// Waits for all handles and then throws the first error, so that no tensor is in use when it
/// returns or throws.
void wait_for(const std::vector<Operation>& operations) {
  for (const Operation& operation : operations) wait_with_check(operation);
  for (const Operation& operation : operations) libtorch::current_stream_waits(operation);
  for (const Operation& operation : operations) operation.status().raise_if_error();
}

void broadcast_tensors(const std::string& group, const NamedParameters& tensors, int root_rank,
                       const ProcessSet& process_set) {
  std::vector<libtorch::OperationTask> tasks;
  for (const auto& item : tensors) {
    if (!item.value().defined()) continue;
    const std::string name = group + "." + item.key();
    const libtorch::Label label{"broadcast", name};
    libtorch::check_writable(item.value(), label, libtorch::Elements::kMovable);
    const torch::Tensor target = item.value();
    const torch::Tensor wire = libtorch::packed(target);
    libtorch::mark_written(target);
    libtorch::OperationTask task;
    Submission& submission = task.submission;
    submission.name = name;
    submission.parameters = Broadcast{root_rank};
    submission.input = submission.output = libtorch::view_of(wire);
    submission.process_set = process_set.id();
    submission.keep_alive = libtorch::keep_alive(target, wire);
    task.finish = [target, wire] { return libtorch::write_back(wire, target); };
    tasks.push_back(std::move(task));
  }
  libtorch::start_group(group, std::move(tasks), Progress::kCaller).wait_all();
}

/// @param without the error text for a module without tensors
void broadcast_module(const NamedParameters& parameters, const NamedParameters& buffers,
                      int root_rank, const ProcessSet& process_set, const std::string& without) {
  NamedParameters tensors;
  for (const auto& item : parameters) tensors.insert("parameters." + item.key(), item.value());
  for (const auto& item : buffers) tensors.insert("buffers." + item.key(), item.value());
  if (tensors.is_empty()) throw UsageError("broadcast_parameters: " + without);
  broadcast_tensors("broadcast_parameters", tensors, root_rank, process_set);
}

/// Throws the same MismatchError on every rank when any rank has an error.
void agree(const std::string& complaint, const ProcessSet& process_set) {
  const std::vector<std::string> all = allgather_object(
      complaint, {.name = "broadcast_optimizer_state.complaint", .process_set = process_set});
  const std::vector<int> ranks = process_set.ranks();
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) {
      throw MismatchError("broadcast_optimizer_state: rank " + std::to_string(ranks[r]) + ": " +
                          all[r] +
                          "; construct the same optimizer over the same parameters on every rank");
    }
  }
}

}  // namespace

torch::Device device() {
  const std::optional<int> gpu = gpu_index();
  if (!gpu || !c10::impl::hasDeviceGuardImpl(torch::kCUDA)) return torch::Device(torch::kCPU);
  // LibTorch may have been built for another driver, and then has no GPU.
  if (*gpu >= c10::impl::VirtualGuardImpl(torch::kCUDA).deviceCount())
    return torch::Device(torch::kCPU);
  return torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(*gpu));
}

torch::Tensor scale_loss(const torch::Tensor& loss, const ProcessSet& process_set) {
  if (!loss.defined()) throw UsageError("scale_loss: the loss is undefined; expected a tensor");
  if (libtorch::LiveOptimizers::instance().averaging() > 0) {
    TORCH_WARN_ONCE(
        "hvd::scale_loss is for gradients that are summed (hvd::all_reduce). A "
        "DistributedOptimizer that averages is "
        "alive, which divides by the number of ranks too: leave scale_loss out, or use "
        "ReduceOp::kSum.");
  }
  return loss / process_set.size();
}

void all_reduce(const std::vector<torch::Tensor>& parameters, ReduceOp op,
                const ProcessSet& process_set) {
  constexpr const char* kGroup = "all_reduce";
  const libtorch::GradientReduction how{.scope = kGroup, .op = op, .process_set = process_set};
  std::vector<libtorch::ReducedParameter> reduced;
  std::vector<Submission> submissions;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const torch::Tensor& parameter = parameters[i];
    if (!parameter.defined()) continue;
    refuse_result(parameter, i);
    if (!parameter.requires_grad() && !parameter.grad().defined()) continue;
    reduced.emplace_back(std::to_string(reduced.size()), parameter);
    reduced.back().set_scope(how);
    std::vector<Submission> own = reduced.back().prepare(how);
    std::move(own.begin(), own.end(), std::back_inserter(submissions));
  }
  if (parameters.empty()) return;
  if (reduced.empty()) {
    throw UsageError("all_reduce: none of the " + std::to_string(parameters.size()) +
                     " tensors requires grad or has a .grad, which is what all_reduce() reduces; "
                     "expected the parameters of a model; to reduce a tensor "
                     "itself, such as a loss, use hvd::allreduce()");
  }
  libtorch::GradientReduction flags_how = how;
  if (op != ReduceOp::kSum && !is_average(op)) flags_how.op = ReduceOp::kMax;
  libtorch::UsedFlags flags;
  submissions.push_back(flags.prepare(flags_how, reduced.front().tensor(), reduced.size(),
                                      [&](std::size_t i) { return reduced[i].has_gradient(); }));
  libtorch::make_group(kGroup, submissions);
  libtorch::begin_after_current_stream(submissions);
  wait_for(submit_all(std::move(submissions), Progress::kCaller));
  flags.read();
  const torch::NoGradGuard no_grad;
  std::vector<libtorch::ReducedParameter*> sharing;
  for (libtorch::ReducedParameter& parameter : reduced)
    if (!parameter.shared_memory().empty()) sharing.push_back(&parameter);
  libtorch::separate_overlapping(std::move(sharing));
  for (std::size_t i = 0; i < reduced.size(); ++i) reduced[i].complete(flags.used(i));
}

void broadcast_parameters(const NamedParameters& parameters, int root_rank,
                          const ProcessSet& process_set) {
  broadcast_tensors("broadcast_parameters", parameters, root_rank, process_set);
}

void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                          const ProcessSet& process_set) {
  broadcast_module(module.named_parameters(), module.named_buffers(), root_rank, process_set,
                   "the module " + module.name() +
                       " has no parameters and no buffers; expected one whose layers are "
                       "registered (register_module)");
}

void broadcast_parameters(const torch::jit::Module& module, int root_rank,
                          const ProcessSet& process_set) {
  constexpr const char* kCaller = "broadcast_parameters";
  const NamedParameters parameters = libtorch::script_parameters(module, kCaller);
  broadcast_module(parameters, libtorch::script_buffers(module, kCaller), root_rank, process_set,
                   "the module " + libtorch::script_name(module) +
                       " has no parameters and no buffers; expected one that was not frozen");
}

void broadcast_parameters(const NamedParameters& parameters, int root_rank) {
  broadcast_parameters(parameters, root_rank, {});
}

void broadcast_parameters(const torch::nn::Module& module, int root_rank) {
  broadcast_parameters(module, root_rank, {});
}

void broadcast_buffers(const torch::nn::Module& module, int root_rank,
                       const ProcessSet& process_set) {
  broadcast_tensors("broadcast_buffers", module.named_buffers(), root_rank, process_set);
}

void broadcast_buffers(const torch::jit::Module& module, int root_rank,
                       const ProcessSet& process_set) {
  constexpr const char* kCaller = "broadcast_buffers";
  broadcast_tensors(kCaller, libtorch::script_buffers(module, kCaller), root_rank, process_set);
}

std::vector<torch::Tensor> parameters_of(const torch::jit::Module& module) {
  std::vector<torch::Tensor> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : libtorch::script_parameters(module, "parameters_of"))
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) parameters.push_back(item.value());
  return parameters;
}

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                               const ProcessSet& process_set) {
  libtorch::refuse_sharded(optimizer, "broadcast_optimizer_state");
  const CollectiveOptions naming{.name = "broadcast_optimizer_state", .process_set = process_set};
  const libtorch::OptimizerLayout own = libtorch::layout_of(optimizer);
  agree(libtorch::difference(
            broadcast_object(own, root_rank,
                             {.name = naming.name + ".layout", .process_set = process_set}),
            own, "the root's"),
        process_set);
  const std::string bytes = libtorch::broadcast_bytes(
      [&] { return libtorch::save_optimizer(optimizer); }, "optimizer state", root_rank, naming);
  std::string complaint;
  if (rank() != root_rank) {
    try {
      libtorch::load_optimizer(optimizer, bytes);
    } catch (const c10::Error& error) {
      complaint = std::string("cannot load the root's state: ") + error.what_without_backtrace();
    } catch (const std::exception& error) {
      complaint = std::string("cannot load the root's state: ") + error.what();
    }
  }
  agree(complaint, process_set);
}

void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank) {
  broadcast_optimizer_state(optimizer, root_rank, {});
}

}  // namespace hvd
