#include "operations/operation_tasks.h"

#include <c10/core/StreamGuard.h>

#include <numeric>
#include <utility>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "tensors/device_order.h"

namespace hvd::libtorch {
namespace {

Submission reduction(OperationParameters parameters, const AllreduceOptions& options,
                     std::string name, const torch::Tensor& input, const torch::Tensor& output) {
  Submission submission;
  submission.name = std::move(name);
  submission.parameters = std::move(parameters);
  submission.input = view_of(input);
  submission.output = view_of(output);
  submission.process_set = options.process_set.id();
  return submission;
}

/// A tensor as something to concatenate along dimension 0.
torch::Tensor with_rows(const torch::Tensor& tensor) {
  torch::Tensor rows = packed(tensor);
  return rows.dim() == 0 ? rows.reshape({1}) : rows;
}

/// Allgather, gather or alltoall: what is common to results whose size negotiation tells.
Task concatenation_task(OperationParameters parameters, const CollectiveOptions& options,
                        std::string name, const GatheredPtr& gathered) {
  gathered->stream = current_stream_of(gathered->input);
  Task task;
  Submission& submission = task.submission;
  submission.parameters = std::move(parameters);
  task.finish = [gathered, kind = submission.kind()] {
    if (!gathered->output.defined()) {
      throw Error(std::string(to_string(kind)) +
                  ": the result could not be allocated: " + gathered->allocation_error);
    }
    used_by_current_stream(gathered->output);
    return gathered->output;
  };
  submission.name = std::move(name);
  submission.input = view_of(gathered->input);
  submission.allocate_output = [gathered](const OutputSizes& sizes) {
    return gathered->allocate(sizes);
  };
  submission.process_set = options.process_set.id();
  submission.keep_alive = gathered;
  return task;
}

/// The rows of `tensor` that go to each member. @throws UsageError for splits that do not fit.
std::vector<std::int64_t> rows_to_send(const torch::Tensor& tensor, const torch::Tensor& splits,
                                       const CollectiveOptions& options) {
  const std::string who = Label{"alltoall", options.name}.str();
  const std::int64_t members = options.process_set.size();
  const std::int64_t rows = tensor.size(0);
  if (!splits.defined()) {
    if (rows % members != 0) {
      throw UsageError(who + ": without splits expected a first dimension that " +
                       std::to_string(members) + " ranks can share equally, got " +
                       std::to_string(rows) + " rows; pass splits");
    }
    return std::vector<std::int64_t>(static_cast<std::size_t>(members), rows / members);
  }
  const bool integers =
      splits.scalar_type() == torch::kInt64 || splits.scalar_type() == torch::kInt32;
  if (!integers || splits.layout() != torch::kStrided || !splits.is_cpu() || splits.dim() != 1 ||
      splits.size(0) != members) {
    throw UsageError(who + ": splits: expected a CPU tensor of int32 or int64 and shape " +
                     shape_to_string({members}) + ", one entry for each rank, got " +
                     c10::toString(splits.scalar_type()) + " " +
                     shape_to_string(splits.sizes().vec()) + " on " + splits.device().str());
  }
  const torch::Tensor wide = packed(splits).to(torch::kInt64);
  const auto* data = wide.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> counts(data, data + members);
  std::int64_t total = 0;
  for (const std::int64_t count : counts) {
    const bool overflow = __builtin_add_overflow(total, count, &total);
    if (count < 0 || overflow) {
      throw UsageError(who + ": splits: expected numbers of rows, got " + shape_to_string(counts));
    }
  }
  if (total != rows) {
    throw UsageError(who + ": splits: expected entries that add up to the tensor's " +
                     std::to_string(rows) + " rows, got " + shape_to_string(counts) +
                     ", which add up to " + std::to_string(total));
  }
  return counts;
}

/// A reduced wire tensor in the caller's type.
torch::Tensor converted(const torch::Tensor& wire, torch::ScalarType type) {
  used_by_current_stream(wire);
  return wire.to(type);
}

}  // namespace

torch::Tensor write_back(const torch::Tensor& result, const torch::Tensor& target) {
  if (result.is_alias_of(target)) return target;
  used_by_current_stream(result);
  target.detach().copy_(result);
  return target;
}

std::string derived_name(const std::string& name, std::string_view suffix) {
  return name.empty() ? name : name + "." + std::string(suffix);
}

std::string member_name(const std::string& group, std::size_t index) {
  return derived_name(group, std::to_string(index));
}

Task allreduce_task(const torch::Tensor& tensor, const AllreduceOptions& options, std::string name,
                    Place place) {
  const Label label{"allreduce", name};
  place == Place::kIn ? check_writable(tensor, label, Elements::kAddable)
                      : check_tensor(tensor, label, Elements::kAddable);
  if (tensor.is_complex() && options.op != ReduceOp::kSum && options.op != ReduceOp::kAverage) {
    throw UsageError(label.str() + ": op: expected sum or average of complex numbers, got " +
                     std::string(to_string(options.op)));
  }

  Task task;
  torch::Tensor input = packed(tensor);
  torch::Tensor output;
  if (const auto wire = type_to_cast_to(tensor.scalar_type(), options.compression)) {
    output = input = input.to(*wire);
  } else if (place == Place::kIn) {
    output = input;
  } else {
    output = torch::empty(tensor.sizes(), input.options());
  }
  if (place == Place::kIn) {
    mark_written(tensor);
    task.finish = [tensor, output] { return write_back(output, tensor); };
  } else {
    task.finish = [output, type = tensor.scalar_type()] { return converted(output, type); };
  }
  task.submission =
      reduction(Allreduce{options.op, options.prescale_factor, options.postscale_factor,
                          compression_in_core(view_of(input).dtype, options.compression)},
                options, std::move(name), input, output);
  task.submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

Task broadcast_task(const torch::Tensor& tensor, int root_rank, const CollectiveOptions& options,
                    Place place) {
  const Label label{"broadcast", options.name};
  place == Place::kIn ? check_writable(tensor, label, Elements::kMovable)
                      : check_tensor(tensor, label, Elements::kMovable);

  Task task;
  const torch::Tensor input = packed(tensor);
  const torch::Tensor output =
      place == Place::kIn ? input : torch::empty(tensor.sizes(), input.options());
  if (place == Place::kIn) {
    mark_written(tensor);
    task.finish = [tensor, output] { return write_back(output, tensor); };
  } else {
    task.finish = [output] { return output; };
  }
  Submission& submission = task.submission;
  submission.name = options.name;
  submission.parameters = Broadcast{root_rank};
  submission.input = view_of(input);
  submission.output = view_of(output);
  submission.process_set = options.process_set.id();
  submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

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
    const c10::OptionalStreamGuard under(stream);
    output = torch::empty(shape, input.options());
    // The memory may have been another tensor's, which the stream is not done with.
    if (stream && sizes.writable != nullptr) *sizes.writable = record_current_stream();
    return view_of(output);
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

Task allgather_task(const torch::Tensor& tensor, const CollectiveOptions& options, std::string name,
                    const GatheredPtr& gathered) {
  check_tensor(tensor, Label{"allgather", name});
  gathered->input = with_rows(tensor);
  return concatenation_task(Allgather{}, options, std::move(name), gathered);
}

Task gather_task(const torch::Tensor& tensor, int dst_rank, const CollectiveOptions& options,
                 const GatheredPtr& gathered) {
  check_tensor(tensor, Label{"gather", options.name});
  gathered->input = with_rows(tensor);
  Task task = concatenation_task(Gather{dst_rank}, options, options.name, gathered);
  if (rank() != dst_rank) task.finish = [] { return torch::Tensor(); };
  return task;
}

Task alltoall_task(const torch::Tensor& tensor, const torch::Tensor& splits,
                   const CollectiveOptions& options, const GatheredPtr& gathered) {
  const Label label{"alltoall", options.name};
  check_tensor(tensor, label);
  if (tensor.dim() == 0) {
    throw UsageError(label.str() +
                     ": a scalar has no rows to distribute; expected at least one dimension");
  }
  gathered->input = packed(tensor);
  return concatenation_task(Alltoall{rows_to_send(tensor, splits, options)}, options, options.name,
                            gathered);
}

Task reducescatter_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                        std::string name) {
  const Label label{"reducescatter", name};
  check_tensor(tensor, label);
  if (options.op != ReduceOp::kSum && options.op != ReduceOp::kAverage) {
    throw UsageError(label.str() + ": op: expected sum or average, got " +
                     std::string(to_string(options.op)));
  }
  if (tensor.dim() == 0) {
    throw UsageError(label.str() +
                     ": a scalar has no rows to scatter; expected at least one dimension");
  }
  torch::Tensor input = packed(tensor);
  if (const auto wire = wire_type(tensor.scalar_type(), options.compression))
    input = input.to(*wire);
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape.front() =
      rows_of_member(shape.front(), options.process_set.size(), options.process_set.rank());
  const torch::Tensor output = torch::empty(shape, input.options());
  Task task;
  task.finish = [output, type = tensor.scalar_type()] { return converted(output, type); };
  task.submission =
      reduction(Reducescatter{options.op, options.prescale_factor, options.postscale_factor},
                options, std::move(name), input, output);
  task.submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

}  // namespace hvd::libtorch
