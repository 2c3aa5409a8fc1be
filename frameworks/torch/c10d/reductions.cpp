#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>

#include "base/text.h"
#include "c10d/calls.h"
#include "c10d/group.h"
#include "c10d/work.h"
#include "hvd/error.h"
#include "hvd/torch/c10d_backend.h"
#include "hvd/torch/operations.h"
#include "operations/operation_tasks.h"

// The reductions of C10dBackend. Each is one of hvd's operations, or a group of them.

namespace hvd {
namespace {

using c10d::OpType;
using libtorch::OperationTask;

double factor_of(const c10d::ReduceOp& op) {
  const auto* const supplement =
      dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr)
    throw UsageError("C10dBackend: PREMUL_SUM without a factor; make it with makePreMulSum()");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
}

hvd::AllreduceOptions reduction_of(const c10d::ReduceOp& op, const ProcessSet& set) {
  hvd::AllreduceOptions options{.op = ReduceOp::kSum, .process_set = set};
  switch (op) {
    case c10d::ReduceOp::SUM:
      break;
    case c10d::ReduceOp::AVG:
      options.op = ReduceOp::kAverage;
      break;
    case c10d::ReduceOp::PRODUCT:
      options.op = ReduceOp::kProduct;
      break;
    case c10d::ReduceOp::MIN:
      options.op = ReduceOp::kMin;
      break;
    case c10d::ReduceOp::MAX:
      options.op = ReduceOp::kMax;
      break;
    case c10d::ReduceOp::BAND:
      options.op = ReduceOp::kBitAnd;
      break;
    case c10d::ReduceOp::BOR:
      options.op = ReduceOp::kBitOr;
      break;
    case c10d::ReduceOp::BXOR:
      options.op = ReduceOp::kBitXor;
      break;
    case c10d::ReduceOp::PREMUL_SUM:
      options.prescale_factor = factor_of(op);
      break;
    default:
      throw UsageError(text("C10dBackend: reduction ", static_cast<int>(op.op_),
                            " of c10d::ReduceOp is unknown to hvd"));
  }
  return options;
}

bool adds(const hvd::AllreduceOptions& options) {
  return options.op == ReduceOp::kSum || is_average(options.op);
}

/// A vector whose complex numbers are pairs of real ones.
torch::Tensor with_real_elements(const torch::Tensor& vector) {
  return vector.is_complex() ? torch::view_as_real(vector).view({-1}) : vector;
}

bool is_copied(const at::Tensor& tensor) {
  return !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg();
}

/// The task that reduces rows, one for each rank, and writes this rank's row to `output`.
OperationTask reduce_rows_task(const at::Tensor& output, const at::Tensor& input, int ranks,
                               const hvd::AllreduceOptions& options) {
  libtorch::check_writable(output, libtorch::Label{"reduce_scatter", {}},
                           libtorch::Elements::kAddable);
  if (input.numel() != output.numel() * ranks || input.scalar_type() != output.scalar_type())
    throw UsageError(text("C10dBackend: reduce_scatter: expected an output with one of ", ranks,
                          " equal parts of the input's ", input.numel(), " elements of ",
                          c10::toString(input.scalar_type()), ", got ", output.numel(), " of ",
                          c10::toString(output.scalar_type())));
  const torch::Tensor row =
      is_copied(output) ? torch::empty(output.sizes(), output.options()) : output.detach();
  const torch::Tensor from = with_real_elements(libtorch::packed(input).view({input.numel()}));
  const torch::Tensor to = with_real_elements(row.view({row.numel()}));
  OperationTask task = libtorch::reducescatter_task(from.view({ranks, to.numel()}), options, {},
                                                    to.view({1, to.numel()}));
  task.finish = [output, row, inner = std::move(task.finish)] {
    inner();
    return libtorch::write_back(row, output);
  };
  return task;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> C10dBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                      const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = libtorch::only_one(tensors, "allreduce");
  if (tensor.is_sparse()) return allreduce_sparse(tensors, options);
  return start({.type = OpType::ALLREDUCE,
                .title = "hvd:all_reduce",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(
                    libtorch::allreduce_task(tensor, reduction_of(options.reduceOp, group_->set()),
                                             {}, tensor),
                    options.asyncOp),
                .outputs = tensors,
                .copies = is_copied(tensor)});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::allreduce_sparse(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = libtorch::only_one(tensors, "allreduce_sparse");
  return start({.type = OpType::_ALLREDUCE_SPARSE,
                .title = "hvd:sparse_all_reduce",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::with_torch_errors([&] {
                  return sparse_allreduce_async(tensor.detach(),
                                                reduction_of(options.reduceOp, group_->set()));
                }),
                .outputs = tensors,
                .copies = true,
                .finish = [tensor](const std::vector<at::Tensor>& results) {
                  // detach() would copy the members of a sparse tensor.
                  const torch::NoGradGuard no_grad;
                  tensor.copy_(results[0]);
                }});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const hvd::AllreduceOptions reduction = reduction_of(options.reduceOp, group_->set());
  bool copies = false;
  for (const at::Tensor& tensor : tensors) copies = copies || is_copied(tensor);
  return start({.type = OpType::ALLREDUCE_COALESCED,
                .title = "hvd:all_reduce",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_coalesced(tensors, options.asyncOp,
                                                    [&](const at::Tensor& tensor, std::size_t) {
                                                      return libtorch::allreduce_task(
                                                          tensor, reduction, {}, tensor);
                                                    }),
                .outputs = tensors,
                .copies = copies});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reduce(std::vector<at::Tensor>& tensors,
                                                   const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = libtorch::only_one(tensors, "reduce");
  return start(
      {.type = OpType::REDUCE,
       .title = "hvd:reduce",
       .asynchronous = options.asyncOp,
       .timeout = options.timeout,
       .handle = libtorch::start_call(
           libtorch::reduce_task(tensor, group_->world_rank(options.rootRank),
                                 reduction_of(options.reduceOp, group_->set()), {}, tensor),
           options.asyncOp),
       .outputs = tensors,
       .copies = is_copied(tensor)});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reduce_shares(
    const at::Tensor& output, const std::vector<at::Tensor>& shares,
    const c10d::ReduceScatterOptions& options) {
  const hvd::AllreduceOptions reduction = reduction_of(options.reduceOp, group_->set());
  std::vector<torch::Tensor> parts;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    parts.push_back(libtorch::packed(shares[i]).view({-1}));
    if (i < static_cast<std::size_t>(getRank())) first += shares[i].numel();
  }
  const at::Tensor& own = shares[static_cast<std::size_t>(getRank())];
  if (own.numel() != output.numel() || own.scalar_type() != output.scalar_type())
    throw UsageError(text("C10dBackend: reduce_scatter: expected an output of this rank's share, ",
                          own.numel(), " elements of ", c10::toString(own.scalar_type()), ", got ",
                          output.numel(), " of ", c10::toString(output.scalar_type())));
  const libtorch::Label label{"reduce_scatter", {}};
  libtorch::check_writable(output, label, libtorch::Elements::kAddable);
  return start({.type = OpType::REDUCE_SCATTER,
                .title = "hvd:reduce_scatter",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(
                    libtorch::allreduce_task(torch::cat(parts), reduction, {}), options.asyncOp),
                .inputs = shares,
                .outputs = {output},
                .copies = true,
                .finish = [output, first](const std::vector<at::Tensor>& results) {
                  output.detach().copy_(
                      results[0].narrow(0, first, output.numel()).view(output.sizes()));
                }});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  at::Tensor& output = libtorch::only_one(outputs, "reduce_scatter");
  const std::vector<at::Tensor>& shares = libtorch::only_one(inputs, "reduce_scatter");
  libtorch::expect_one_for_each_rank(shares.size(), getSize(), "reduce_scatter");
  bool equal = true;  // the same on all ranks
  for (const at::Tensor& share : shares) equal = equal && share.numel() == shares[0].numel();
  if (!equal || !adds(reduction_of(options.reduceOp, group_->set())))
    return reduce_shares(output, shares, options);
  std::vector<torch::Tensor> parts;
  for (const at::Tensor& share : shares) parts.push_back(libtorch::packed(share).view({-1}));
  at::Tensor input = torch::cat(parts);
  return _reduce_scatter_base(output, input, options);
}

c10::intrusive_ptr<c10d::Work> C10dBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  const hvd::AllreduceOptions reduction = reduction_of(options.reduceOp, group_->set());
  if (!adds(reduction)) {
    const torch::Tensor flat = libtorch::packed(input).view({-1});
    return reduce_shares(output, flat.tensor_split(getSize()), options);
  }
  return start({.type = OpType::_REDUCE_SCATTER_BASE,
                .title = "hvd:_reduce_scatter_base",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(
                    reduce_rows_task(output, input, getSize(), reduction), options.asyncOp),
                .inputs = input,
                .outputs = {output},
                .copies = is_copied(output)});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  libtorch::expect_one_for_each_rank(outputs.size(), static_cast<int>(inputs.size()),
                                     "reduce_scatter_tensor_coalesced");
  const hvd::AllreduceOptions reduction = reduction_of(options.reduceOp, group_->set());
  return start({.type = OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                .title = "hvd:reduce_scatter_tensor_coalesced",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_coalesced(inputs, options.asyncOp,
                                                    [&](const at::Tensor& input, std::size_t i) {
                                                      return reduce_rows_task(outputs[i], input,
                                                                              getSize(), reduction);
                                                    }),
                .inputs = inputs,
                .outputs = outputs,
                .copies = true});
}

}  // namespace hvd
