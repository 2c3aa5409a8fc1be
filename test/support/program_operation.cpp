#include "support/program_operation.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "kernels/kernels.h"

namespace hvd::testing {
namespace {

// The data repeat after this many elements, because those of large tensors would take long to make
// and to reduce. It is a prime, so that parts of a tensor that the runtime moves separately begin
// with different data.
constexpr std::int64_t kPeriod = 4099;

std::int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

Bytes repeated(Bytes bytes, std::size_t size) {
  const std::size_t period = bytes.size();
  bytes.resize(size);
  for (std::size_t filled = period; filled < size; filled += std::min(filled, size - filled))
    std::copy_n(bytes.begin(), std::min(filled, size - filled),
                bytes.begin() + static_cast<std::ptrdiff_t>(filled));
  return bytes;
}

std::size_t position_of(int rank, const std::vector<int>& members) {
  return static_cast<std::size_t>(std::lower_bound(members.begin(), members.end(), rank) -
                                  members.begin());
}

void append_rows(const Bytes& from, std::int64_t first, std::int64_t rows, std::size_t row_bytes,
                 Bytes& to) {
  const auto row = static_cast<std::ptrdiff_t>(row_bytes);
  to.insert(to.end(), from.begin() + first * row, from.begin() + (first + rows) * row);
}

bool reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter || kind == OpKind::kReduce;
}

bool has_root(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kGather || kind == OpKind::kReduce ||
         kind == OpKind::kScatter;
}

void choose_sizes(ProgramOperation& operation, int ranks, const Draw& draw) {
  const OpKind kind = operation.parameters.kind;
  if (kind == OpKind::kAllgather || kind == OpKind::kGather || kind == OpKind::kScatter) {
    for (int rank = 0; rank < ranks; ++rank)
      operation.rows.push_back(static_cast<std::int64_t>(draw() % 4));
  }
  if (kind == OpKind::kScatter)
    operation.rows[static_cast<std::size_t>(operation.parameters.root)] =
        static_cast<std::int64_t>(draw() % 11);
  if (kind != OpKind::kAlltoall) return;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::int64_t> splits;
    for (std::size_t i = 0; i < operation.members.size(); ++i)
      splits.push_back(static_cast<std::int64_t>(draw() % 3));
    operation.rows.push_back(std::accumulate(splits.begin(), splits.end(), std::int64_t{0}));
    operation.splits.push_back(std::move(splits));
  }
}

}  // namespace

bool ProgramOperation::has_member(int rank) const {
  return std::binary_search(members.begin(), members.end(), rank);
}

std::size_t ProgramOperation::row_bytes() const {
  return static_cast<std::size_t>(form.input.shape[1]) * size_of(form.input.dtype);
}

std::int64_t ProgramOperation::rows_on(int rank) const {
  return rows.empty() ? form.input.shape[0] : rows[static_cast<std::size_t>(rank)];
}

std::pair<std::int64_t, std::int64_t> ProgramOperation::scattered_rows(int rank) const {
  const auto count = static_cast<int>(members.size());
  const auto own = static_cast<int>(position_of(rank, members));
  const std::int64_t all =
      parameters.kind == OpKind::kScatter ? rows_on(parameters.root) : form.input.shape[0];
  std::int64_t first = 0;
  for (int position = 0; position < own; ++position) first += rows_of_member(all, count, position);
  return {first, rows_of_member(all, count, own)};
}

Bytes ProgramOperation::input(int use, int rank) const {
  const std::int64_t count = rows_on(rank) * form.input.shape[1];
  return repeated(
      make_input(std::min(count, kPeriod), form.input.dtype, parameters.op, rank, data_seed(use)),
      static_cast<std::size_t>(count) * size_of(form.input.dtype));
}

Submission ProgramOperation::submission(int use, int rank,
                                        const std::shared_ptr<OperationMemory>& memory,
                                        bool in_place) const {
  Submission submission = form;
  AnyParameters own = parameters;
  if (!splits.empty()) own.splits = splits[static_cast<std::size_t>(rank)];
  submission.parameters = own.of_kind();
  if (is_barrier()) return submission;
  memory->input = input(use, rank);
  submission.input.shape[0] = rows_on(rank);
  submission.input.count = elements(submission.input.shape);
  submission.input.data = memory->input.data();
  if (!rows.empty()) {
    submission.allocate_output = [memory, like = submission.input](const OutputSizes& sizes) {
      TensorView view = like;
      view.shape[0] =
          std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0});
      view.count = elements(view.shape);
      memory->output.resize(view.bytes());
      view.data = memory->output.data();
      return view;
    };
    return submission;
  }
  submission.output = submission.input;
  if (parameters.kind == OpKind::kReducescatter)
    submission.output.shape[0] = scattered_rows(rank).second;
  submission.output.count = elements(submission.output.shape);
  if (in_place) {
    memory->output = memory->input;
    submission.input.data = memory->output.data();
  } else {
    memory->output.resize(submission.output.bytes());
  }
  submission.output.data = memory->output.data();
  return submission;
}

Bytes ProgramOperation::expected_reduction(int use, const std::vector<int>& contributors) const {
  const std::int64_t count = elements(form.input.shape);
  std::vector<Bytes> inputs;
  for (const int rank : contributors) {
    inputs.push_back(make_input(std::min(count, kPeriod), form.input.dtype, parameters.op, rank,
                                data_seed(use)));
  }
  const bool average = parameters.op == ReduceOp::kAverage;
  const std::int64_t divisor = average ? static_cast<std::int64_t>(inputs.size()) : 1;
  Bytes period =
      parameters.compression != Compression::kNone
          ? reference_compressed(inputs, parameters.compression, parameters.op, parameters.prescale,
                                 parameters.postscale)
          : reference_reduce(inputs, form.input.dtype, average ? ReduceOp::kSum : parameters.op,
                             {parameters.prescale, parameters.postscale, divisor});
  return repeated(std::move(period), static_cast<std::size_t>(count) * size_of(form.input.dtype));
}

// Every member's block for this rank, in rank order.
Bytes ProgramOperation::expected_blocks(int use, int rank) const {
  const std::size_t to = position_of(rank, members);
  Bytes all;
  for (const int from : members) {
    const auto& sent = splits[static_cast<std::size_t>(from)];
    const auto first = std::accumulate(sent.begin(), sent.begin() + static_cast<std::ptrdiff_t>(to),
                                       std::int64_t{0});
    append_rows(input(use, from), first, sent[to], row_bytes(), all);
  }
  return all;
}

Bytes ProgramOperation::expected(int use, int rank, const std::vector<int>& contributors) const {
  Bytes all;
  switch (parameters.kind) {
    case OpKind::kBroadcast:
      return input(use, parameters.root);
    case OpKind::kAllreduce:
    case OpKind::kReduce:
      return expected_reduction(use, contributors);
    case OpKind::kScatter: {
      const auto [first, count] = scattered_rows(rank);
      append_rows(input(use, parameters.root), first, count, row_bytes(), all);
      return all;
    }
    case OpKind::kAlltoall:
      return expected_blocks(use, rank);
    case OpKind::kReducescatter: {
      const auto [first, count] = scattered_rows(rank);
      append_rows(expected_reduction(use, contributors), first, count, row_bytes(), all);
      return all;
    }
    case OpKind::kAllgather:
    case OpKind::kGather:
      if (parameters.kind == OpKind::kGather && rank != parameters.root) return all;
      for (const int from : contributors)
        append_rows(input(use, from), 0, rows_on(from), row_bytes(), all);
      return all;
    default:
      return all;
  }
}

std::string ProgramOperation::fault(int use, int rank, const std::vector<int>& contributors,
                                    const Bytes& output) const {
  if (is_barrier()) return {};
  if (parameters.kind == OpKind::kReduce && rank != parameters.root) return {};
  const Bytes right = expected(use, rank, contributors);
  if (output.size() != right.size())
    return std::to_string(output.size()) + " bytes, expected " + std::to_string(right.size());
  const auto at = first_difference(output.data(), right, form.input.dtype);
  return at < 0 ? "" : "element " + std::to_string(at) + " is wrong";
}

OpKind choose_kind(bool joins, const Draw& draw) {
  constexpr std::array kKinds = {OpKind::kBarrier,       OpKind::kAllgather,     OpKind::kAllgather,
                                 OpKind::kBroadcast,     OpKind::kAllreduce,     OpKind::kAllreduce,
                                 OpKind::kAllreduce,     OpKind::kAllreduce,     OpKind::kGather,
                                 OpKind::kReducescatter, OpKind::kReducescatter, OpKind::kReduce,
                                 OpKind::kScatter,       OpKind::kAlltoall};
  return kKinds[draw() % (kKinds.size() - (joins ? 1 : 0))];
}

void choose_form(ProgramOperation& operation, int ranks, bool joins, const Draw& draw) {
  AnyParameters& parameters = operation.parameters;
  // Rank 0 is a root that always stays to the end.
  if (has_root(parameters.kind))
    parameters.root = joins ? 0 : operation.members[draw() % operation.members.size()];
  choose_sizes(operation, ranks, draw);
  if (!reduces(parameters.kind)) return;
  constexpr std::array kReductions = {ReduceOp::kAverage, ReduceOp::kSum,     ReduceOp::kMin,
                                      ReduceOp::kMax,     ReduceOp::kProduct, ReduceOp::kBitAnd,
                                      ReduceOp::kBitOr,   ReduceOp::kBitXor};
  constexpr std::size_t kBitwise = 3;
  parameters.op = kReductions[draw() % (kReductions.size() -
                                        (is_floating(operation.form.input.dtype) ? kBitwise : 0))];
  if (operation.form.input.dtype == DataType::kBool && parameters.op == ReduceOp::kAverage)
    parameters.op = ReduceOp::kMax;
  if (operation.form.input.dtype != DataType::kFloat32) return;
  if (draw() % 2 == 0) parameters.prescale = 0.5;
  if (parameters.kind == OpKind::kAllreduce)
    parameters.compression = static_cast<Compression>(draw() % kCompressionCount);
}

}  // namespace hvd::testing
