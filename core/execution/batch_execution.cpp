#include "execution/batch_execution.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/kernels.h"
#include "control/validator.h"
#include "execution/packer.h"
#include "hvd/collectives.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

std::int64_t row_elements(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::span<const std::byte> input_bytes(const OperationPtr& operation) {
  const TensorView& input = operation->submission.input;
  return {input.data, input.bytes()};
}
std::span<std::byte> output_bytes(const OperationPtr& operation) {
  const TensorView& output = operation->submission.output;
  return {output.data, output.bytes()};
}

/// Parts of several tensors, rank by rank: all that concerns the first rank, then the second, ...
template <class Byte>
std::vector<std::span<Byte>> by_rank(std::vector<std::span<Byte>> tensors,
                                     const std::vector<std::vector<std::size_t>>& part_bytes) {
  std::vector<std::span<Byte>> pieces;
  for (std::size_t rank = 0; rank < part_bytes.front().size(); ++rank) {
    for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      const std::size_t size = part_bytes[tensor][rank];
      pieces.push_back(tensors[tensor].first(size));
      tensors[tensor] = tensors[tensor].subspan(size);
    }
  }
  return pieces;
}

}  // namespace

BatchExecution::BatchExecution(control::AgreedBatch batch, std::vector<OperationPtr> operations,
                               int world_rank)
    : batch_(std::move(batch)), operations_(std::move(operations)) {
  spec_.process_set = request().process_set;
  spec_.ranks = *batch_.members;
  const auto found = std::lower_bound(spec_.ranks.begin(), spec_.ranks.end(), world_rank);
  spec_.set_rank = static_cast<int>(found - spec_.ranks.begin());
  spec_.device = {request().device, 0};
  describe();
}

BatchExecution::BatchExecution(control::AgreedBatch batch, int world_rank)
    : BatchExecution(std::move(batch), {}, world_rank) {
  repeated_ = true;
  operations_.resize(batch_.operations.size());
}

std::string BatchExecution::title() const {
  return control::describe(
      operations_.empty() || !operations_.front() ? request() : operations_.front()->request);
}

void BatchExecution::let_go() noexcept {
  for (OperationPtr& operation : operations_) operation = {};
  input_buffer_ = {};
  output_buffer_ = {};
}

bool BatchExecution::in_place_kind() const noexcept {
  return collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kBroadcast;
}

void BatchExecution::describe() {
  const wire::Request& first = request();
  collective_.kind = first.kind;
  collective_.dtype = first.travels_as();
  collective_.op = first.op == ReduceOp::kAverage ? ReduceOp::kSum : first.op;
  const auto contributors = static_cast<std::int64_t>(spec_.ranks.size() - batch_.absent.size());
  collective_.scale = {first.prescale, first.postscale,
                       first.op == ReduceOp::kAverage ? contributors : 1};
  if (casts() || scales_early()) collective_.scale.prescale = 1.0;
  if (factor_out() != 1.0) collective_.scale.postscale = 1.0;
  if (first.kind == OpKind::kBroadcast || first.kind == OpKind::kGather) {
    const auto root = std::lower_bound(spec_.ranks.begin(), spec_.ranks.end(), first.root);
    collective_.root = static_cast<int>(root - spec_.ranks.begin());
  }
  if (wire::gathers(first.kind) || first.kind == OpKind::kReducescatter) {
    describe_rows();
  } else {
    for (const auto& operation : batch_.operations)
      collective_.count += operation.request.elements();
  }
  nothing_to_move_ = collective_.count == 0 && first.kind != OpKind::kAlltoall;
}

std::vector<std::int64_t> BatchExecution::rows_of(std::size_t tensor) const {
  const control::AgreedOperation& operation = batch_.operations[tensor];
  if (operation.request.kind != OpKind::kReducescatter) return operation.first_dims;
  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < size(); ++rank)
    rows.push_back(rows_of_member(operation.request.shape[0], size(), rank));
  return rows;
}

void BatchExecution::describe_rows() {
  counts_.resize(spec_.ranks.size());
  for (std::size_t tensor = 0; tensor < batch_.operations.size(); ++tensor) {
    const std::int64_t row = row_elements(batch_.operations[tensor].request.shape);
    const std::vector<std::int64_t> rows = rows_of(tensor);
    std::vector<std::size_t> parts;
    for (std::size_t rank = 0; rank < counts_.size(); ++rank) {
      counts_[rank] += rows[rank] * row;
      parts.push_back(static_cast<std::size_t>(rows[rank] * row) * size_of(request().dtype));
    }
    part_bytes_.push_back(std::move(parts));
  }
  collective_.count = std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
  if (collective_.kind == OpKind::kGather) {  // an exchange in which everybody sends to one
    collective_.kind = OpKind::kAlltoall;
    send_counts_.resize(counts_.size());
    send_counts_[static_cast<std::size_t>(collective_.root)] =
        counts_[static_cast<std::size_t>(spec_.set_rank)];
    if (!at_root()) counts_.assign(counts_.size(), 0);
    collective_.send_counts = send_counts_;
  }
  collective_.counts = counts_;
}

// A factor changes what an absent rank's contribution leaves unchanged (1 in a product), so it is
// applied before that comes in.
bool BatchExecution::scales_early() const noexcept {
  const ReduceOp op = request().op;
  return !casts() && !batch_.absent.empty() && request().prescale != 1.0 &&
         (op == ReduceOp::kMin || op == ReduceOp::kMax || op == ReduceOp::kProduct);
}

// What makes numbers smaller comes before they are rounded to 16 bits and what makes them larger
// after, so that neither leaves the range needlessly.
double BatchExecution::factor_out() const noexcept {
  return casts() && std::abs(request().postscale) > 1.0 ? request().postscale : 1.0;
}

std::size_t BatchExecution::in_bytes() const {
  const std::size_t element = size_of(collective_.dtype);
  if (in_place_kind() || collective_.kind == OpKind::kReducescatter)
    return static_cast<std::size_t>(collective_.count) * element;
  const auto own = static_cast<std::size_t>(spec_.set_rank);
  if (collective_.kind == OpKind::kAllgather)
    return static_cast<std::size_t>(counts_[own]) * element;
  return static_cast<std::size_t>(send_counts_[static_cast<std::size_t>(collective_.root)]) *
         element;
}

std::size_t BatchExecution::out_bytes() const {
  const std::size_t element = size_of(collective_.dtype);
  if (in_place_kind() || collective_.kind == OpKind::kAllgather)
    return static_cast<std::size_t>(collective_.count) * element;
  if (collective_.kind == OpKind::kReducescatter)
    return static_cast<std::size_t>(counts_[static_cast<std::size_t>(spec_.set_rank)]) * element;
  return static_cast<std::size_t>(
             std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0})) *
         element;
}

void BatchExecution::allocate_outputs() {
  for (std::size_t i = 0; i < operations_.size(); ++i) {
    Submission& submission = operations_[i]->submission;
    EventPtr writable;
    submission.output = submission.allocate_output({batch_.operations[i].first_dims, &writable});
    if (writable) writable_.push_back(std::move(writable));
    const std::size_t expected =
        std::accumulate(part_bytes_[i].begin(), part_bytes_[i].end(), std::size_t{0});
    if (submission.output.bytes() != expected ||
        (expected > 0 && submission.output.data == nullptr)) {
      throw Error("the allocated output has " + std::to_string(submission.output.bytes()) +
                  " bytes, expected " + std::to_string(expected));
    }
  }
}

void BatchExecution::ask_for_outputs() {
  writable_.clear();
  const bool receives =
      request().kind == OpKind::kAllgather || (request().kind == OpKind::kGather && at_root());
  if (receives) allocate_outputs();
}

void BatchExecution::prepare(FusionBufferPool& pool) {
  if (batch_.absent_here) return prepare_absent(pool);
  ask_for_outputs();
  if (request().kind == OpKind::kAlltoall) return;  // AlltoallWork takes care of it
  const bool packs = buffered() || scales_early();
  if (!buffered()) {
    in_ = input_bytes(operations_.front());
    if (request().kind != OpKind::kGather || at_root()) out_ = output_bytes(operations_.front());
  }
  if (!packs) return;
  if (buffered()) {
    output_buffer_ = pool.lease(out_bytes());
    out_ = output_buffer_.bytes();
  }
  if (collective_.kind == OpKind::kBroadcast && !at_root()) {
    in_ = out_;
    return;
  }
  std::span<std::byte> packed = out_;
  if (!in_place_kind()) {
    input_buffer_ = pool.lease(in_bytes());
    packed = input_buffer_.bytes();
  }
  in_ = packed;
  if (casts()) return pack_narrowed(input_pieces(), packed, collective_.dtype, factor_in());
  pack(input_pieces(), packed);
  if (!scales_early()) return;
  const std::byte* const source = packed.data();
  reduce({&source, 1}, packed.data(),
         static_cast<std::int64_t>(packed.size() / size_of(collective_.dtype)), collective_.dtype,
         collective_.op, {factor_in(), 1.0, 1});
}

void BatchExecution::prepare_absent(FusionBufferPool& pool) {
  output_buffer_ = pool.lease(out_bytes());
  out_ = output_buffer_.bytes();
  std::span<std::byte> contribution = out_;
  if (!in_place_kind()) {
    input_buffer_ = pool.lease(in_bytes());
    contribution = input_buffer_.bytes();
  }
  in_ = contribution;
  const bool reduces =
      collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kReducescatter;
  if (!reduces) return;  // the root, or a rank with rows, contributes itself
  const ReduceOp op = collective_.op == ReduceOp::kAdasum ? ReduceOp::kSum : collective_.op;
  fill_identity(contribution.data(),
                static_cast<std::int64_t>(contribution.size() / size_of(collective_.dtype)),
                collective_.dtype, op);
}

std::span<const std::span<const std::byte>> BatchExecution::input_pieces() {
  input_pieces_.clear();
  for (const auto& operation : operations_) input_pieces_.push_back(input_bytes(operation));
  if (collective_.kind == OpKind::kReducescatter)
    input_pieces_ = by_rank(std::move(input_pieces_), part_bytes_);
  return input_pieces_;
}

std::span<const std::span<std::byte>> BatchExecution::output_pieces() {
  output_pieces_.clear();
  for (const auto& operation : operations_) output_pieces_.push_back(output_bytes(operation));
  if (collective_.kind == OpKind::kAllgather)
    output_pieces_ = by_rank(std::move(output_pieces_), part_bytes_);
  return output_pieces_;
}

void BatchExecution::unpack() {
  if (!buffered() || batch_.absent_here) return;
  if (casts())
    return runtime::unpack_widened(output_buffer_.bytes(), output_pieces(), collective_.dtype,
                                   factor_out());
  runtime::unpack(output_buffer_.bytes(), output_pieces());
}

void BatchExecution::abandon_buffers() noexcept {
  input_buffer_.abandon();
  output_buffer_.abandon();
}

}  // namespace hvd::runtime
