#include "operations/operation_tasks.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstddef>
#include <functional>
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

/// Packs the tensor, and gives a scalar the shape [1].
torch::Tensor with_rows(const torch::Tensor& tensor) {
  torch::Tensor rows = packed(tensor);
  return rows.dim() == 0 ? rows.reshape({1}) : rows;
}

/// The common part of allgather, gather, scatter and alltoall, whose results get their size from
/// the negotiation.
OperationTask concatenation_task(OperationParameters parameters, const CollectiveOptions& options,
                                 std::string name, const GatheredResultPtr& gathered) {
  gathered->stream = current_stream_of(gathered->input);
  OperationTask task;
  Submission& submission = task.submission;
  submission.parameters = std::move(parameters);
  task.finish = [gathered, kind = submission.kind(),
                 label = gathered->target.defined()
                             ? Label{to_string(submission.kind()), name}.str()
                             : std::string()] {
    if (!gathered->output.defined()) {
      throw Error(std::string(to_string(kind)) +
                  ": the result could not be allocated: " + gathered->allocation_error);
    }
    if (!gathered->target_error.empty())
      throw UsageError(label + ": output: " + gathered->target_error);
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

/// The number of rows of `tensor` that each member receives. @throws UsageError for splits that do
/// not fit
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

/// Returns whether two contiguous tensors overlap in memory.
bool share_memory(const torch::Tensor& a, const torch::Tensor& b) {
  const auto* const begin_a = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* const begin_b = static_cast<const std::byte*>(b.const_data_ptr());
  const std::less<const std::byte*> before;
  return a.numel() > 0 && b.numel() > 0 && before(begin_a, begin_b + b.nbytes()) &&
         before(begin_b, begin_a + a.nbytes());
}

/// The memory of a result: the caller's tensor if it has the right dtype, otherwise a new tensor.
torch::Tensor output_tensor(const torch::Tensor& target, at::IntArrayRef shape,
                            const torch::Tensor& like) {
  if (target.defined() && target.scalar_type() == like.scalar_type()) return target.detach();
  return torch::empty(shape, like.options());
}

/// Casts a reduced tensor to the caller's dtype.
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

void check_output(const torch::Tensor& output, const torch::Tensor& input, at::IntArrayRef shape,
                  const Label& label) {
  const std::string who = label.str() + ": output: ";
  if (!output.defined()) throw UsageError(who + "the tensor is undefined; expected one with data");
  if (output.scalar_type() != input.scalar_type() || output.device() != input.device()) {
    throw UsageError(who + "expected the input's dtype and device, " +
                     c10::toString(input.scalar_type()) + " on " + input.device().str() + ", got " +
                     c10::toString(output.scalar_type()) + " on " + output.device().str());
  }
  check_writable(output, label, Elements::kMovable);
  const bool fits = output.dim() == static_cast<std::int64_t>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), output.sizes().begin(),
                               [](std::int64_t expected, std::int64_t got) {
                                 return expected < 0 || expected == got;
                               });
  if (!fits) {
    std::string expected = shape_to_string(shape.vec());
    if (!shape.empty() && shape[0] < 0) expected.replace(1, 2, "*");
    throw UsageError(who + "expected shape " + expected + ", got " +
                     shape_to_string(output.sizes().vec()));
  }
  if (!output.is_contiguous() || output.is_conj() || output.is_neg())
    throw UsageError(who + "expected a contiguous tensor; pass one, or use the call without it");
}

namespace {

/// @throws UsageError for an input or a target that the operation cannot use
void check_target(const torch::Tensor& tensor, const torch::Tensor& target, Elements elements,
                  const Label& label) {
  if (target.is_same(tensor)) return check_writable(tensor, label, elements);
  check_tensor(tensor, label, elements);
  if (target.defined()) check_output(target, tensor, tensor.sizes(), label);
}

void check_reduction(const torch::Tensor& tensor, const torch::Tensor& target,
                     const AllreduceOptions& options, const Label& label) {
  check_target(tensor, target, Elements::kAddable, label);
  if (tensor.is_complex() && options.op != ReduceOp::kSum && !is_average(options.op)) {
    throw UsageError(label.str() + ": op: expected sum or average of complex numbers, got " +
                     std::string(to_string(options.op)));
  }
}

/// Sets the task's `finish`, which copies `output` to the target, or without a target casts it to
/// the caller's dtype.
void finish_with(OperationTask& task, const torch::Tensor& output, const torch::Tensor& target,
                 torch::ScalarType type) {
  if (target.defined()) {
    mark_written(target);
    task.finish = [target, output] { return write_back(output, target); };
  } else {
    task.finish = [output, type] { return converted(output, type); };
  }
}

}  // namespace

OperationTask allreduce_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                             std::string name, const torch::Tensor& target) {
  check_reduction(tensor, target, options, Label{"allreduce", name});
  OperationTask task;
  torch::Tensor input = packed(tensor);
  torch::Tensor output;
  if (const auto wire = type_to_cast_to(tensor.scalar_type(), options.compression)) {
    output = input = input.to(*wire);
  } else {
    output = target.is_same(tensor) ? input : output_tensor(target, tensor.sizes(), input);
  }
  finish_with(task, output, target, tensor.scalar_type());
  task.submission =
      reduction(Allreduce{options.op, options.prescale_factor, options.postscale_factor,
                          compression_in_core(input.scalar_type(), options.compression)},
                options, std::move(name), input, output);
  task.submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

OperationTask reduce_task(const torch::Tensor& tensor, int root_rank,
                          const AllreduceOptions& options, std::string name,
                          const torch::Tensor& target) {
  check_reduction(tensor, target, options, Label{"reduce", name});
  torch::Tensor input = packed(tensor);
  if (const auto wire = wire_type(tensor.scalar_type(), options.compression))
    input = input.to(*wire);
  const torch::ScalarType type = tensor.scalar_type();
  const bool in_place = target.is_same(tensor);
  OperationTask task;
  torch::Tensor output;
  if (rank() != root_rank) {
    output = torch::empty(tensor.sizes(), input.options());  // scratch memory of the reduction
    if (in_place) {
      task.finish = [tensor] { return tensor; };
    } else {
      task.finish = [output, type] { return converted(output.zero_(), type); };
    }
  } else {
    output = in_place ? input : output_tensor(target, tensor.sizes(), input);
    finish_with(task, output, target, type);
  }
  task.submission =
      reduction(Reduce{options.op, options.prescale_factor, options.postscale_factor, root_rank},
                options, std::move(name), input, output);
  task.submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

OperationTask broadcast_task(const torch::Tensor& tensor, int root_rank,
                             const CollectiveOptions& options, const torch::Tensor& target) {
  check_target(tensor, target, Elements::kMovable, Label{"broadcast", options.name});
  OperationTask task;
  const torch::Tensor input = packed(tensor);
  const torch::Tensor output =
      target.is_same(tensor) ? input : output_tensor(target, tensor.sizes(), input);
  finish_with(task, output, target, tensor.scalar_type());
  Submission& submission = task.submission;
  submission.name = options.name;
  submission.parameters = Broadcast{root_rank};
  submission.input = view_of(input);
  submission.output = view_of(output);
  submission.process_set = options.process_set.id();
  submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

/// Runs on the thread that drives the engine. It must neither throw nor use that thread's modes: a
/// waiting thread in inference mode would make an inference tensor for another thread.
TensorView GatheredResult::allocate(const OutputSizes& sizes) noexcept {
  try {
    const c10::InferenceMode inference(false);
    const torch::NoGradGuard no_grad;
    first_dims.assign(sizes.first_dims.begin(), sizes.first_dims.end());
    std::vector<std::int64_t> shape = input.sizes().vec();
    shape.front() = std::accumulate(first_dims.begin(), first_dims.end(), std::int64_t{0});
    if (target.defined() && takes_target(shape)) {
      output = target;
      return view_of(output);
    }
    const c10::OptionalStreamGuard under(stream);
    output = torch::empty(shape, input.options());
    // The stream may still use the memory for another tensor.
    if (stream && sizes.writable != nullptr) *sizes.writable = record_current_stream();
    return view_of(output);
  } catch (const c10::Error& error) {
    allocation_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    allocation_error = error.what();
  } catch (...) {
    allocation_error = "unknown exception";
  }
  // Without memory the runtime fails the operation, unless the result is empty.
  return {};
}

namespace {

/// Checks the caller's output as far as possible before the ranks have agreed on the rows.
/// @param apart whether the output must not overlap the input, since other ranks may still read the
/// input while this rank writes the output
void check_target(const GatheredResult& gathered, bool apart, const Label& label) {
  if (!gathered.target.defined()) return;
  std::vector<std::int64_t> shape = gathered.input.sizes().vec();
  shape.front() = -1;
  check_output(gathered.target, gathered.input, shape, label);
  mark_written(gathered.target);
  if (apart && share_memory(gathered.input, gathered.target))
    throw UsageError(label.str() +
                     ": output: it shares memory with the input; expected none in common");
}

/// The input of an operation that distributes rows.
torch::Tensor rows_of(const torch::Tensor& tensor, const char* distributes, const Label& label) {
  check_tensor(tensor, label);
  if (tensor.dim() == 0) {
    throw UsageError(label.str() + ": a scalar has no rows to " + distributes +
                     "; expected at least one dimension");
  }
  return packed(tensor);
}

}  // namespace

/// Whether the result fits the target. If not, sets target_error, and the result goes to a new
/// tensor, since the other ranks have already agreed on the operation.
bool GatheredResult::takes_target(at::IntArrayRef shape) {
  if (target.sizes() != shape) {
    target_error = "expected shape " + shape_to_string(shape.vec()) + ", got " +
                   shape_to_string(target.sizes().vec());
    return false;
  }
  if (!share_memory(input, target)) return true;
  const std::int64_t rows =
      std::accumulate(first_dims.begin(),
                      first_dims.begin() + static_cast<std::ptrdiff_t>(position), std::int64_t{0});
  const auto* const own = static_cast<const std::byte*>(target.const_data_ptr()) +
                          rows * target.stride(0) * static_cast<std::int64_t>(target.itemsize());
  if (input.const_data_ptr() == own) return true;
  target_error = "it shares memory with the input; expected the input to be its rows from " +
                 std::to_string(rows) + " on, or no memory in common";
  return false;
}

OperationTask allgather_task(const torch::Tensor& tensor, const CollectiveOptions& options,
                             std::string name, const GatheredResultPtr& gathered) {
  const Label label{"allgather", name};
  check_tensor(tensor, label);
  gathered->input = with_rows(tensor);
  gathered->position = static_cast<std::size_t>(std::max(options.process_set.rank(), 0));
  check_target(*gathered, /*apart=*/false, label);
  return concatenation_task(Allgather{}, options, std::move(name), gathered);
}

OperationTask gather_task(const torch::Tensor& tensor, int dst_rank,
                          const CollectiveOptions& options, const GatheredResultPtr& gathered) {
  const Label label{"gather", options.name};
  check_tensor(tensor, label);
  gathered->input = with_rows(tensor);
  check_target(*gathered, /*apart=*/true, label);
  OperationTask task = concatenation_task(Gather{dst_rank}, options, options.name, gathered);
  if (rank() != dst_rank) task.finish = [] { return torch::Tensor(); };
  return task;
}

OperationTask scatter_task(const torch::Tensor& tensor, int root_rank,
                           const CollectiveOptions& options, std::string name,
                           const GatheredResultPtr& gathered) {
  const Label label{"scatter", name};
  gathered->input = rows_of(tensor, "scatter", label);
  check_target(*gathered, /*apart=*/true, label);
  return concatenation_task(Scatter{root_rank}, options, std::move(name), gathered);
}

OperationTask alltoall_task(const torch::Tensor& tensor, const torch::Tensor& splits,
                            const CollectiveOptions& options, const GatheredResultPtr& gathered) {
  const Label label{"alltoall", options.name};
  gathered->input = rows_of(tensor, "distribute", label);
  check_target(*gathered, /*apart=*/true, label);
  return concatenation_task(Alltoall{rows_to_send(tensor, splits, options)}, options, options.name,
                            gathered);
}

OperationTask reducescatter_task(const torch::Tensor& tensor, const AllreduceOptions& options,
                                 std::string name, const torch::Tensor& target) {
  const Label label{"reducescatter", name};
  check_tensor(tensor, label);
  if (options.op != ReduceOp::kSum && !is_average(options.op)) {
    throw UsageError(label.str() + ": op: expected sum or average, got " +
                     std::string(to_string(options.op)));
  }
  torch::Tensor input = rows_of(tensor, "scatter", label);
  if (const auto wire = wire_type(tensor.scalar_type(), options.compression))
    input = input.to(*wire);
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape.front() =
      rows_of_member(shape.front(), options.process_set.size(), options.process_set.rank());
  if (target.defined()) check_output(target, tensor, shape, label);
  const torch::Tensor output = output_tensor(target, shape, input);
  OperationTask task;
  finish_with(task, output, target, tensor.scalar_type());
  task.submission =
      reduction(Reducescatter{options.op, options.prescale_factor, options.postscale_factor},
                options, std::move(name), input, output);
  task.submission.keep_alive = keep_alive({tensor, input, output});
  return task;
}

}  // namespace hvd::libtorch
