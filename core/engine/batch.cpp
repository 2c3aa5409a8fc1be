#include "engine/batch.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/text.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "negotiation/validator.h"

namespace hvd::runtime {
namespace {

std::int64_t row_elements(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
}

// A collective that scales would also scale an absent rank's neutral contribution (1 in a product).
// So the prescale of a minimum, maximum or product is applied while packing if a rank is absent. If
// elements are cast, the prescale is applied before they are rounded to 16 bits. A postscale of
// magnitude above 1 is applied after the cast back to fp32, so that 16-bit values do not overflow.
Conversion conversion_of(const wire::Request& request, bool rank_absent) {
  Conversion conversion{request.dtype, request.wire_dtype()};
  const bool scales_early =
      rank_absent && (request.op == ReduceOp::kMin || request.op == ReduceOp::kMax ||
                      request.op == ReduceOp::kProduct);
  if (conversion.casts() || scales_early) conversion.before = request.prescale;
  if (conversion.casts() && std::abs(request.postscale) > 1.0) conversion.after = request.postscale;
  return conversion;
}

/// The parts of several tensors, rank by rank: all parts of the first rank, then those of the
/// second, ...
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

Batch::Batch(control::AgreedBatch batch, std::vector<OperationPtr> operations, int world_rank)
    : agreed_(std::move(batch)), operations_(std::move(operations)) {
  spec_.process_set = request().process_set;
  spec_.ranks = *agreed_.members;
  const auto found = std::lower_bound(spec_.ranks.begin(), spec_.ranks.end(), world_rank);
  spec_.set_rank = static_cast<int>(found - spec_.ranks.begin());
  spec_.device = {request().device, 0};
  conversion_ = conversion_of(request(), !agreed_.absent.empty());
  describe();
}

std::string Batch::title() const {
  return control::describe(
      operations_.empty() || !operations_.front() ? request() : operations_.front()->request);
}

void Batch::release_operations() noexcept {
  for (OperationPtr& operation : operations_) operation = {};
}

bool Batch::nothing_to_move() const noexcept { return collective_.count == 0 && !exchanges_rows(); }

bool Batch::in_place_kind() const noexcept {
  return collective_.kind == OpKind::kAllreduce || collective_.kind == OpKind::kBroadcast;
}

bool Batch::in_parts() const noexcept {
  return spec_.device.type != DeviceType::kCpu && collective_.kind == OpKind::kAllreduce &&
         request().group_size == 1;
}

void Batch::describe() {
  const wire::Request& first = request();
  collective_.kind = first.kind;
  collective_.dtype = conversion_.wire_dtype;
  collective_.op = is_average(first.op) ? ReduceOp::kSum : first.op;
  const auto members = static_cast<std::int64_t>(spec_.ranks.size());
  const auto contributors = members - static_cast<std::int64_t>(agreed_.absent.size());
  collective_.scale = {first.prescale, first.postscale, 1};
  if (first.op == ReduceOp::kAverage) collective_.scale.divisor = contributors;
  if (first.op == ReduceOp::kAverageOfSet) collective_.scale.divisor = members;
  if (conversion_.casts() || conversion_.scales_early()) collective_.scale.prescale = 1.0;
  if (conversion_.after != 1.0) collective_.scale.postscale = 1.0;
  const bool has_root = first.kind == OpKind::kBroadcast || first.kind == OpKind::kGather ||
                        first.kind == OpKind::kReduce || first.kind == OpKind::kScatter;
  if (has_root) {
    const auto root = std::lower_bound(spec_.ranks.begin(), spec_.ranks.end(), first.root);
    collective_.root = static_cast<int>(root - spec_.ranks.begin());
  }
  if (first.kind == OpKind::kReduce) collective_.kind = OpKind::kAllreduce;
  if (wire::gathers(first.kind) || first.kind == OpKind::kReducescatter) return describe_rows();
  for (const auto& operation : agreed_.operations)
    collective_.count += operation.request.elements();
}

std::vector<std::int64_t> Batch::rows_of(std::size_t tensor) const {
  const wire::Response& operation = agreed_.operations[tensor];
  const OpKind kind = operation.request.kind;
  if (kind != OpKind::kReducescatter && kind != OpKind::kScatter) return operation.first_dims;
  const std::int64_t all = kind == OpKind::kReducescatter
                               ? operation.request.shape[0]
                               : operation.first_dims[static_cast<std::size_t>(collective_.root)];
  std::vector<std::int64_t> rows;
  for (int rank = 0; rank < size(); ++rank) rows.push_back(rows_of_member(all, size(), rank));
  return rows;
}

void Batch::describe_rows() {
  counts_.resize(spec_.ranks.size());
  for (std::size_t tensor = 0; tensor < agreed_.operations.size(); ++tensor) {
    const std::int64_t row = row_elements(agreed_.operations[tensor].request.shape);
    const std::vector<std::int64_t> rows = rows_of(tensor);
    std::vector<std::size_t> parts;
    for (std::size_t rank = 0; rank < counts_.size(); ++rank) {
      counts_[rank] += rows[rank] * row;
      parts.push_back(static_cast<std::size_t>(rows[rank] * row) * size_of(request().dtype));
    }
    part_bytes_.push_back(std::move(parts));
  }
  collective_.count = std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0});
  if (collective_.kind == OpKind::kGather) describe_gather();
  if (collective_.kind == OpKind::kScatter) describe_scatter();
  collective_.counts = counts_;
}

/// Describes a gather as an alltoall in which all members send to the root.
void Batch::describe_gather() {
  collective_.kind = OpKind::kAlltoall;
  send_counts_.resize(counts_.size());
  send_counts_[static_cast<std::size_t>(collective_.root)] =
      counts_[static_cast<std::size_t>(spec_.set_rank)];
  if (!at_root()) counts_.assign(counts_.size(), 0);
  collective_.send_counts = send_counts_;
}

/// Describes a scatter as an alltoall in which all members receive from the root.
void Batch::describe_scatter() {
  collective_.kind = OpKind::kAlltoall;
  const std::int64_t own = counts_[static_cast<std::size_t>(spec_.set_rank)];
  send_counts_.resize(counts_.size());
  if (at_root()) send_counts_ = counts_;
  counts_.assign(counts_.size(), 0);
  counts_[static_cast<std::size_t>(collective_.root)] = own;
  collective_.send_counts = send_counts_;
}

std::size_t Batch::in_bytes() const {
  const std::size_t element = size_of(collective_.dtype);
  if (in_place_kind() || collective_.kind == OpKind::kReducescatter)
    return static_cast<std::size_t>(collective_.count) * element;
  const auto own = static_cast<std::size_t>(spec_.set_rank);
  if (collective_.kind == OpKind::kAllgather)
    return static_cast<std::size_t>(counts_[own]) * element;
  return static_cast<std::size_t>(
             std::accumulate(send_counts_.begin(), send_counts_.end(), std::int64_t{0})) *
         element;
}

std::size_t Batch::out_bytes() const {
  const std::size_t element = size_of(collective_.dtype);
  if (in_place_kind() || collective_.kind == OpKind::kAllgather)
    return static_cast<std::size_t>(collective_.count) * element;
  if (collective_.kind == OpKind::kReducescatter)
    return static_cast<std::size_t>(counts_[static_cast<std::size_t>(spec_.set_rank)]) * element;
  return static_cast<std::size_t>(
             std::accumulate(counts_.begin(), counts_.end(), std::int64_t{0})) *
         element;
}

std::vector<EventPtr> Batch::allocate_outputs() const {
  std::vector<EventPtr> all_writable;
  const bool scatters = request().kind == OpKind::kScatter;
  if (absent_here() || !wire::gathers(request().kind) || !has_output()) return all_writable;
  const auto own = static_cast<std::size_t>(spec_.set_rank);
  for (std::size_t i = 0; i < operations_.size(); ++i) {
    Submission& submission = operations_[i]->submission;
    EventPtr writable;
    std::span<const std::int64_t> sizes = agreed_.operations[i].first_dims;
    const std::int64_t own_rows = scatters ? rows_of(i)[own] : 0;
    if (scatters) sizes = {&own_rows, 1};
    submission.output = submission.allocate_output({sizes, &writable});
    if (writable) all_writable.push_back(std::move(writable));
    const std::size_t expected =
        scatters ? part_bytes_[i][own]
                 : std::accumulate(part_bytes_[i].begin(), part_bytes_[i].end(), std::size_t{0});
    if (submission.output.bytes() != expected ||
        (expected > 0 && submission.output.data == nullptr)) {
      throw Error(text("the allocated output has ", submission.output.bytes(), " bytes, expected ",
                       expected));
    }
  }
  return all_writable;
}

std::span<const std::byte> Batch::input() const noexcept {
  if (!reads_input()) return {};
  const TensorView& input = operations_.front()->submission.input;
  return {input.data, input.bytes()};
}

std::span<std::byte> Batch::output() const noexcept {
  if (!has_output()) return {};
  const TensorView& output = operations_.front()->submission.output;
  return {output.data, output.bytes()};
}

void Batch::input_pieces(std::vector<std::span<const std::byte>>& pieces) const {
  pieces.clear();
  for (const auto& operation : operations_) {
    const TensorView& input = operation->submission.input;
    pieces.emplace_back(input.data, input.bytes());
  }
  if (collective_.kind == OpKind::kReducescatter) pieces = by_rank(std::move(pieces), part_bytes_);
}

void Batch::output_pieces(std::vector<std::span<std::byte>>& pieces) const {
  pieces.clear();
  for (const auto& operation : operations_) {
    const TensorView& output = operation->submission.output;
    pieces.emplace_back(output.data, output.bytes());
  }
  if (collective_.kind == OpKind::kAllgather) pieces = by_rank(std::move(pieces), part_bytes_);
}

}  // namespace hvd::runtime
