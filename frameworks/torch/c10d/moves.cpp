#include <memory>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>

#include "base/text.h"
#include "c10d/calls.h"
#include "c10d/group.h"
#include "c10d/pieces.h"
#include "c10d/work.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/c10d_backend.h"
#include "operations/operation_tasks.h"

// The collectives of C10dBackend that only move elements. Tensors are sent as vectors of elements
// or bytes, so shapes may differ between ranks where c10d allows it.

namespace hvd {
namespace {

using c10d::OpType;
using libtorch::GatheredResult;
using libtorch::Label;
using libtorch::OperationTask;
using libtorch::Pieces;

std::shared_ptr<GatheredResult> gathered_into(torch::Tensor target) {
  auto gathered = std::make_shared<GatheredResult>();
  gathered->target = std::move(target);
  return gathered;
}

/// Adds to the end of a task: checks the received numbers of elements, and copies them to the
/// outputs.
void finish_with(OperationTask& task, const char* call, std::shared_ptr<GatheredResult> gathered,
                 Pieces outputs) {
  task.finish = [call, gathered, outputs = std::move(outputs), inner = std::move(task.finish)] {
    const torch::Tensor received = inner();
    if (gathered->first_dims != outputs.counts())
      throw UsageError(text("C10dBackend: ", call, ": the ranks sent ",
                            shape_to_string(gathered->first_dims),
                            " elements, but the outputs of rank ", rank(), " have ",
                            shape_to_string(outputs.counts()), "; make them equal"));
    if (received.numel() > 0 && !received.is_alias_of(outputs.whole()))
      outputs.whole().copy_(received);
    outputs.copy_back();
    return outputs.whole();
  };
}

torch::Tensor sent(const at::Tensor& input, const char* call) {
  libtorch::check_tensor(input, Label{call, {}}, libtorch::Elements::kMovable);
  return libtorch::elements_of(libtorch::packed(input));
}

OperationTask allgather_pieces(std::vector<at::Tensor> outputs, const at::Tensor& input,
                               const ProcessSet& set) {
  Pieces pieces(std::move(outputs), /*packs=*/false, Label{"all_gather", {}});
  const auto gathered = gathered_into(pieces.whole());
  OperationTask task =
      libtorch::allgather_task(sent(input, "all_gather"), {.process_set = set}, {}, gathered);
  finish_with(task, "all_gather", gathered, std::move(pieces));
  return task;
}

/// The task that writes the inputs of all ranks to `output`, in rank order.
OperationTask allgather_into(const at::Tensor& output, const at::Tensor& input,
                             const ProcessSet& set, int ranks) {
  if (output.numel() != input.numel() * ranks || output.scalar_type() != input.scalar_type())
    throw UsageError(text("C10dBackend: all_gather_into_tensor: expected an output with ", ranks,
                          " times the input's ", input.numel(), " elements of ",
                          c10::toString(input.scalar_type()), ", got ", output.numel(), " of ",
                          c10::toString(output.scalar_type())));
  Pieces pieces({output}, /*packs=*/false, Label{"all_gather_into_tensor", {}});
  const auto gathered = gathered_into(pieces.whole());
  OperationTask task = libtorch::allgather_task(sent(input, "all_gather_into_tensor"),
                                                {.process_set = set}, {}, gathered);
  task.finish = [pieces, inner = std::move(task.finish)] {
    inner();
    pieces.copy_back();
    return pieces.whole();
  };
  return task;
}

/// Numbers of elements of each rank's rows. @param splits rows; empty: equal shares
std::vector<std::int64_t> elements_of_splits(const at::Tensor& tensor,
                                             const std::vector<std::int64_t>& splits, int ranks,
                                             const char* which) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<std::int64_t> counts = splits;
  if (splits.empty()) {
    if (rows % ranks != 0)
      throw UsageError(text("C10dBackend: all_to_all_single: expected an ", which, " whose ", rows,
                            " rows ", ranks, " ranks can share equally; pass split sizes"));
    counts.assign(static_cast<std::size_t>(ranks), rows / ranks);
  }
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  if (counts.size() != static_cast<std::size_t>(ranks) || total != rows)
    throw UsageError(text("C10dBackend: all_to_all_single: expected ", ranks,
                          " split sizes that add up to the ", which, "'s ", rows, " rows, got ",
                          shape_to_string(counts)));
  const bool as_bytes = !libtorch::is_supported(tensor.scalar_type());
  const std::int64_t elements =
      rows == 0 ? 0
                : tensor.numel() / rows *
                      (as_bytes ? static_cast<std::int64_t>(tensor.element_size()) : 1);
  for (std::int64_t& count : counts) count *= elements;
  return counts;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> C10dBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                      const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = libtorch::only_one(tensors, "broadcast");
  return start({.type = OpType::BROADCAST,
                .title = "hvd:broadcast",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(
                    libtorch::broadcast_task(tensor, group_->world_rank(options.rootRank),
                                             {.process_set = group_->set()}, tensor),
                    options.asyncOp),
                .outputs = tensors,
                .copies = !tensor.is_contiguous()});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                      std::vector<at::Tensor>& inputs,
                                                      const c10d::AllgatherOptions& options) {
  const std::vector<at::Tensor>& list = libtorch::only_one(outputs, "all_gather");
  libtorch::expect_one_for_each_rank(list.size(), getSize(), "all_gather");
  return start({.type = OpType::ALLGATHER,
                .title = "hvd:all_gather",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(
                    allgather_pieces(list, libtorch::only_one(inputs, "all_gather"), group_->set()),
                    options.asyncOp),
                .inputs = inputs,
                .outputs = list,
                .copies = true});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& options) {
  return start({.type = OpType::_ALLGATHER_BASE,
                .title = "hvd:_all_gather_base",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(
                    allgather_into(output, input, group_->set(), getSize()), options.asyncOp),
                .inputs = input,
                .outputs = {output},
                .copies = !output.is_contiguous()});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  libtorch::expect_one_for_each_rank(outputs.size(), getSize(), "all_gather_coalesced");
  std::vector<at::Tensor> all;
  for (const std::vector<at::Tensor>& of_rank : outputs) {
    libtorch::expect_one_for_each_rank(of_rank.size(), static_cast<int>(inputs.size()),
                                       "all_gather_coalesced");
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  return start({.type = OpType::ALLGATHER_COALESCED,
                .title = "hvd:all_gather",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_coalesced(inputs, options.asyncOp,
                                                    [&](const at::Tensor& input, std::size_t i) {
                                                      std::vector<at::Tensor> of_input;
                                                      for (const auto& of_rank : outputs)
                                                        of_input.push_back(of_rank[i]);
                                                      return allgather_pieces(std::move(of_input),
                                                                              input, group_->set());
                                                    }),
                .inputs = inputs,
                .outputs = std::move(all),
                .copies = true});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  libtorch::expect_one_for_each_rank(outputs.size(), static_cast<int>(inputs.size()),
                                     "all_gather_into_tensor_coalesced");
  return start({.type = OpType::ALLGATHER_COALESCED,
                .title = "hvd:all_gather_into_tensor_coalesced",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_coalesced(
                    inputs, options.asyncOp,
                    [&](const at::Tensor& input, std::size_t i) {
                      return allgather_into(outputs[i], input, group_->set(), getSize());
                    }),
                .inputs = inputs,
                .outputs = outputs,
                .copies = true});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::gather(std::vector<std::vector<at::Tensor>>& outputs,
                                                   std::vector<at::Tensor>& inputs,
                                                   const c10d::GatherOptions& options) {
  const at::Tensor& input = libtorch::only_one(inputs, "gather");
  const int root = group_->world_rank(options.rootRank);
  std::vector<at::Tensor> list;
  auto gathered = std::make_shared<GatheredResult>();
  std::optional<Pieces> pieces;
  if (getRank() == options.rootRank) {
    list = libtorch::only_one(outputs, "gather");
    libtorch::expect_one_for_each_rank(list.size(), getSize(), "gather");
    pieces.emplace(list, /*packs=*/false, Label{"gather", {}});
    // The input may be one of the outputs, and other ranks may still read it.
    gathered->target =
        pieces->whole().is_alias_of(input) ? torch::empty_like(pieces->whole()) : pieces->whole();
  }
  OperationTask task =
      libtorch::gather_task(sent(input, "gather"), root, {.process_set = group_->set()}, gathered);
  if (pieces) finish_with(task, "gather", gathered, *pieces);
  return start({.type = OpType::GATHER,
                .title = "hvd:gather",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(std::move(task), options.asyncOp),
                .inputs = inputs,
                .outputs = std::move(list),
                .copies = true});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::scatter(std::vector<at::Tensor>& outputs,
                                                    std::vector<std::vector<at::Tensor>>& inputs,
                                                    const c10d::ScatterOptions& options) {
  const at::Tensor& output = libtorch::only_one(outputs, "scatter");
  Pieces own({output}, /*packs=*/false, Label{"scatter", {}});
  const std::int64_t size = own.counts()[0];
  torch::Tensor rows = torch::empty({0, size}, own.whole().options());
  if (getRank() == options.rootRank) {
    const std::vector<at::Tensor>& list = libtorch::only_one(inputs, "scatter");
    libtorch::expect_one_for_each_rank(list.size(), getSize(), "scatter");
    rows = Pieces(list, /*packs=*/true, Label{"scatter", {}}).rows();
    if (rows.size(1) != size || list[0].scalar_type() != output.scalar_type())
      throw UsageError(text("C10dBackend: scatter: expected inputs of the output's ", size,
                            " elements of ", c10::toString(output.scalar_type()), ", got ",
                            rows.size(1), " of ", c10::toString(list[0].scalar_type())));
    // The output may be one of the inputs.
    if (rows.is_alias_of(output)) rows = rows.clone();
  }
  const auto gathered = gathered_into(own.whole().view({1, size}));
  OperationTask task = libtorch::scatter_task(rows, group_->world_rank(options.rootRank),
                                              {.process_set = group_->set()}, {}, gathered);
  task.finish = [own, inner = std::move(task.finish)] {
    inner();
    own.copy_back();
    return own.whole();
  };
  return start({.type = OpType::SCATTER,
                .title = "hvd:scatter",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(std::move(task), options.asyncOp),
                .inputs = inputs.empty() ? at::TensorList() : at::TensorList(inputs.front()),
                .outputs = outputs,
                .copies = !output.is_contiguous()});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<std::int64_t>& output_splits,
                                                          std::vector<std::int64_t>& input_splits,
                                                          const c10d::AllToAllOptions& options) {
  const std::vector<std::int64_t> receives =
      elements_of_splits(output, output_splits, getSize(), "output");
  const std::vector<std::int64_t> sends =
      elements_of_splits(input, input_splits, getSize(), "input");
  Pieces pieces({output}, /*packs=*/false, Label{"all_to_all_single", {}});
  const auto gathered = gathered_into(pieces.whole());
  OperationTask task =
      libtorch::alltoall_task(sent(input, "all_to_all_single"), torch::tensor(sends, torch::kInt64),
                              {.process_set = group_->set()}, gathered);
  task.finish = [pieces, gathered, receives, inner = std::move(task.finish)] {
    inner();
    if (gathered->first_dims != receives)
      throw UsageError(text("C10dBackend: all_to_all_single: the ranks sent ",
                            shape_to_string(gathered->first_dims), " elements, but rank ", rank(),
                            " expected ", shape_to_string(receives),
                            "; its output_split_sizes must be the others' input_split_sizes"));
    pieces.copy_back();
    return pieces.whole();
  };
  return start({.type = OpType::ALLTOALL_BASE,
                .title = "hvd:all_to_all",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(std::move(task), options.asyncOp),
                .inputs = input,
                .outputs = {output},
                .copies = true});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::alltoall(std::vector<at::Tensor>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllToAllOptions& options) {
  libtorch::expect_one_for_each_rank(outputs.size(), getSize(), "all_to_all");
  libtorch::expect_one_for_each_rank(inputs.size(), getSize(), "all_to_all");
  const Pieces sends(inputs, /*packs=*/true, Label{"all_to_all", {}});
  Pieces receives(outputs, /*packs=*/false, Label{"all_to_all", {}});
  const auto gathered = gathered_into(receives.whole());
  OperationTask task =
      libtorch::alltoall_task(sends.whole(), torch::tensor(sends.counts(), torch::kInt64),
                              {.process_set = group_->set()}, gathered);
  finish_with(task, "all_to_all", gathered, std::move(receives));
  return start({.type = OpType::ALLTOALL,
                .title = "hvd:all_to_all",
                .asynchronous = options.asyncOp,
                .timeout = options.timeout,
                .handle = libtorch::start_call(std::move(task), options.asyncOp),
                .inputs = inputs,
                .outputs = outputs,
                .copies = true});
}

}  // namespace hvd
