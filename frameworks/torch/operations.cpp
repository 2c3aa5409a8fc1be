#include "hvd/torch/operations.h"

#include <torch/custom_class.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "tensor_adapter.h"

namespace hvd {
namespace {

using libtorch::Label;
using libtorch::Task;

enum class Place { kOut, kIn };

Task reduce_task(const torch::Tensor& tensor, const AllreduceOptions& options, std::string name,
                 Place place) {
  const Label label{"allreduce", name};
  place == Place::kIn ? libtorch::check_writable(tensor, label)
                      : libtorch::check_tensor(tensor, label);

  Task task;
  torch::Tensor input = libtorch::packed(tensor);
  torch::Tensor output;
  if (const auto wire = libtorch::wire_type(tensor.scalar_type(), options.compression)) {
    output = input = input.to(*wire);
  } else if (place == Place::kIn) {
    output = input;
  } else {
    output = torch::empty(tensor.sizes(), input.options());
  }
  if (place == Place::kIn) {
    libtorch::mark_written(tensor);
    task.finish = [tensor, output] {
      if (!output.is_alias_of(tensor)) tensor.detach().copy_(output);
      return tensor;
    };
  } else {
    task.finish = [output, type = tensor.scalar_type()] { return output.to(type); };
  }
  Submission& submission = task.submission;
  submission.name = std::move(name);
  submission.kind = OpKind::kAllreduce;
  submission.op = options.op;
  submission.input = libtorch::view_of(input);
  submission.output = libtorch::view_of(output);
  submission.prescale = options.prescale_factor;
  submission.postscale = options.postscale_factor;
  submission.process_set = options.process_set.id();
  submission.keep_alive = libtorch::keep_alive({tensor, input, output});
  return task;
}

Task broadcast_task(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options,
                    Place place) {
  const Label label{"broadcast", options.name};
  place == Place::kIn ? libtorch::check_writable(tensor, label)
                      : libtorch::check_tensor(tensor, label);

  Task task;
  const torch::Tensor input = libtorch::packed(tensor);
  const torch::Tensor output =
      place == Place::kIn ? input : torch::empty(tensor.sizes(), input.options());
  if (place == Place::kIn) {
    libtorch::mark_written(tensor);
    task.finish = [tensor, output] {
      if (!output.is_alias_of(tensor)) tensor.detach().copy_(output);
      return tensor;
    };
  } else {
    task.finish = [output] { return output; };
  }
  Submission& submission = task.submission;
  submission.name = options.name;
  submission.kind = OpKind::kBroadcast;
  submission.input = libtorch::view_of(input);
  submission.output = libtorch::view_of(output);
  submission.root = root_rank;
  submission.process_set = options.process_set.id();
  submission.keep_alive = libtorch::keep_alive({tensor, input, output});
  return task;
}

/// What an allgather produces. Written by the engine's thread before the operation is done, read
/// after.
struct Gathered {
  torch::Tensor input;
  torch::Tensor output;
  std::vector<std::int64_t> first_dims;
  std::string allocation_error;

  TensorView allocate(const OutputSizes& sizes) noexcept;
};

/// Runs on whatever thread drives the engine: it must neither throw nor inherit that thread's modes
/// (a waiting thread in inference mode would make an inference tensor for somebody else's
/// training).
TensorView Gathered::allocate(const OutputSizes& sizes) noexcept {
  try {
    const c10::InferenceMode inference(false);
    const torch::NoGradGuard no_grad;
    first_dims.assign(sizes.first_dims.begin(), sizes.first_dims.end());
    std::vector<std::int64_t> shape = input.sizes().vec();
    shape.front() = std::accumulate(first_dims.begin(), first_dims.end(), std::int64_t{0});
    output = torch::empty(shape, input.options());
    return libtorch::view_of(output);
  } catch (const c10::Error& error) {
    allocation_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    allocation_error = error.what();
  } catch (...) {
    allocation_error = "unknown exception";
  }
  // No memory for a result that is not empty: the runtime fails the operation, naming it.
  return {};
}

Task gather_task(const torch::Tensor& tensor, const CollectiveOptions& options, std::string name,
                 const std::shared_ptr<Gathered>& gathered) {
  libtorch::check_tensor(tensor, Label{"allgather", name});
  gathered->input = libtorch::packed(tensor);
  if (gathered->input.dim() == 0) gathered->input = gathered->input.reshape({1});
  Task task;
  task.finish = [gathered] {
    if (!gathered->output.defined()) {
      throw Error("allgather: the result could not be allocated: " + gathered->allocation_error);
    }
    return gathered->output;
  };
  Submission& submission = task.submission;
  submission.name = std::move(name);
  submission.kind = OpKind::kAllgather;
  submission.input = libtorch::view_of(gathered->input);
  submission.allocate_output = [gathered](const OutputSizes& sizes) {
    return gathered->allocate(sizes);
  };
  submission.process_set = options.process_set.id();
  submission.keep_alive = gathered;
  return task;
}

// Grouped operations.

/// Members of an unnamed group have no names either: the core numbers them.
std::string member_name(const std::string& group, std::size_t index) {
  return group.empty() ? group : group + "." + std::to_string(index);
}

Handle grouped_reduce(at::TensorList tensors, const AllreduceOptions& options, Place place,
                      Progress progress) {
  std::vector<Task> tasks;
  tasks.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tasks.push_back(reduce_task(tensors[i], options, member_name(options.name, i), place));
  }
  return libtorch::start_group(options.name, std::move(tasks), progress);
}

using GatheredPtr = std::shared_ptr<Gathered>;

std::vector<GatheredPtr> make_gathered(std::size_t count) {
  std::vector<GatheredPtr> gathered(count);
  for (GatheredPtr& one : gathered) one = std::make_shared<Gathered>();
  return gathered;
}

Handle grouped_gather(at::TensorList tensors, const CollectiveOptions& options,
                      const std::vector<GatheredPtr>& gathered, Progress progress) {
  std::vector<Task> tasks;
  tasks.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tasks.push_back(gather_task(tensors[i], options, member_name(options.name, i), gathered[i]));
  }
  return libtorch::start_group(options.name, std::move(tasks), progress);
}

// Differentiation. The collective runs first, outside autograd; the functions below only put its
// result into the graph.

bool differentiates(const torch::Tensor& tensor) {
  return torch::GradMode::is_enabled() && tensor.requires_grad();
}

std::string backward_name(const std::string& name) {
  return name.empty() ? name : name + ".backward";
}

/// What backward needs to know, carried through autograd's saved data.
struct Backward : torch::CustomClassHolder {
  torch::Tensor output;  ///< handed over once, to the graph
  AllreduceOptions options;
  int root = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
};
using BackwardPtr = c10::intrusive_ptr<Backward>;

template <class Rule>
struct AttachedFunction : torch::autograd::Function<AttachedFunction<Rule>> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& input, BackwardPtr state) {
    context->saved_data["shape"] = input.sizes().vec();
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return std::move(state->output);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto state =
        c10::static_intrusive_pointer_cast<Backward>(context->saved_data["state"].toCapsule());
    const auto shape = context->saved_data["shape"].toIntVector();
    return {Rule::apply(*state, gradients[0]).reshape(shape), torch::Tensor()};
  }
};

struct ReduceRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    return allreduce(gradient, state.options);
  }
};

struct GatherRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    return allreduce(gradient, state.options).narrow(0, state.first_row, state.rows);
  }
};

struct BroadcastRule {
  static torch::Tensor apply(const Backward& state, const torch::Tensor& gradient) {
    const torch::Tensor sum = allreduce(gradient, state.options);
    return rank() == state.root ? sum : torch::zeros_like(sum);
  }
};

template <class Rule>
torch::Tensor attach(const torch::Tensor& input, torch::Tensor output, BackwardPtr state) {
  state->output = std::move(output);
  return AttachedFunction<Rule>::apply(input, std::move(state));
}

void check_differentiable(const torch::Tensor& tensor, const AllreduceOptions& options) {
  if (options.op == ReduceOp::kSum || options.op == ReduceOp::kAverage) return;
  if (!tensor.defined() || !differentiates(tensor)) return;
  throw UsageError(Label{"allreduce", options.name}.str() + ": " +
                   std::string(to_string(options.op)) +
                   " is not differentiable, but the tensor requires grad; pass detach() or use a "
                   "sum or an average");
}

torch::Tensor attach_reduce(const torch::Tensor& input, torch::Tensor output,
                            const AllreduceOptions& options, std::string name) {
  if (!differentiates(input)) return output;
  auto state = c10::make_intrusive<Backward>();
  state->options = options;
  state->options.name = std::move(name);
  return attach<ReduceRule>(input, std::move(output), std::move(state));
}

torch::Tensor attach_gather(const torch::Tensor& input, torch::Tensor output,
                            const CollectiveOptions& options, std::string name,
                            const Gathered& gathered) {
  if (!differentiates(input)) return output;
  const auto own = static_cast<std::size_t>(options.process_set.rank());
  auto state = c10::make_intrusive<Backward>();
  state->options = {
      .name = std::move(name), .op = ReduceOp::kSum, .process_set = options.process_set};
  state->first_row =
      std::accumulate(gathered.first_dims.begin(),
                      gathered.first_dims.begin() + options.process_set.rank(), std::int64_t{0});
  state->rows = gathered.first_dims[own];
  return attach<GatherRule>(input, std::move(output), std::move(state));
}

}  // namespace

Handle allreduce_async(const torch::Tensor& tensor, const AllreduceOptions& options) {
  return libtorch::start(reduce_task(tensor, options, options.name, Place::kOut),
                         Progress::kBackground);
}

Handle allreduce_async_(torch::Tensor tensor, const AllreduceOptions& options) {
  return libtorch::start(reduce_task(tensor, options, options.name, Place::kIn),
                         Progress::kBackground);
}

torch::Tensor allreduce(const torch::Tensor& tensor, const AllreduceOptions& options) {
  check_differentiable(tensor, options);
  Task task = reduce_task(tensor, options, options.name, Place::kOut);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return attach_reduce(tensor, std::move(output), options, backward_name(options.name));
}

torch::Tensor allreduce_(torch::Tensor tensor, const AllreduceOptions& options) {
  return libtorch::start(reduce_task(tensor, options, options.name, Place::kIn), Progress::kCaller)
      .wait();
}

Handle allgather_async(const torch::Tensor& tensor, const CollectiveOptions& options) {
  return libtorch::start(gather_task(tensor, options, options.name, std::make_shared<Gathered>()),
                         Progress::kBackground);
}

torch::Tensor allgather(const torch::Tensor& tensor, const CollectiveOptions& options) {
  const auto gathered = std::make_shared<Gathered>();
  Task task = gather_task(tensor, options, options.name, gathered);
  torch::Tensor output = libtorch::start(std::move(task), Progress::kCaller).wait();
  return attach_gather(tensor, std::move(output), options, backward_name(options.name), *gathered);
}

Handle broadcast_async(const torch::Tensor& tensor, int root_rank,
                       const CollectiveOptions& options) {
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
  if (!differentiates(tensor)) return output;
  auto state = c10::make_intrusive<Backward>();
  state->options = {.name = backward_name(options.name),
                    .op = ReduceOp::kSum,
                    .process_set = options.process_set};
  state->root = root_rank;
  return attach<BroadcastRule>(tensor, std::move(output), std::move(state));
}

torch::Tensor broadcast_(torch::Tensor tensor, int root_rank, const CollectiveOptions& options) {
  return libtorch::start(broadcast_task(tensor, root_rank, options, Place::kIn), Progress::kCaller)
      .wait();
}

Handle grouped_allreduce_async(at::TensorList tensors, const AllreduceOptions& options) {
  return grouped_reduce(tensors, options, Place::kOut, Progress::kBackground);
}

Handle grouped_allreduce_async_(at::TensorList tensors, const AllreduceOptions& options) {
  return grouped_reduce(tensors, options, Place::kIn, Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allreduce(at::TensorList tensors,
                                             const AllreduceOptions& options) {
  for (const torch::Tensor& tensor : tensors) check_differentiable(tensor, options);
  std::vector<torch::Tensor> results =
      grouped_reduce(tensors, options, Place::kOut, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = attach_reduce(tensors[i], std::move(results[i]), options,
                               backward_name(member_name(options.name, i)));
  }
  return results;
}

void grouped_allreduce_(at::TensorList tensors, const AllreduceOptions& options) {
  grouped_reduce(tensors, options, Place::kIn, Progress::kCaller).wait_all();
}

Handle grouped_allgather_async(at::TensorList tensors, const CollectiveOptions& options) {
  return grouped_gather(tensors, options, make_gathered(tensors.size()), Progress::kBackground);
}

std::vector<torch::Tensor> grouped_allgather(at::TensorList tensors,
                                             const CollectiveOptions& options) {
  const std::vector<GatheredPtr> gathered = make_gathered(tensors.size());
  std::vector<torch::Tensor> results =
      grouped_gather(tensors, options, gathered, Progress::kCaller).wait_all();
  for (std::size_t i = 0; i < results.size(); ++i) {
    results[i] = attach_gather(tensors[i], std::move(results[i]), options,
                               backward_name(member_name(options.name, i)), *gathered[i]);
  }
  return results;
}

}  // namespace hvd
