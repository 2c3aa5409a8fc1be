#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/operations.h"
#include "negotiation/negotiator.h"

namespace hvd::runtime {

/// How elements are converted on the way from a tensor to the collective and back.
struct Conversion {
  DataType tensor = DataType::kFloat32;
  DataType wire_dtype = DataType::kFloat32;
  double before = 1.0;  ///< factor while packing; the collective applies the rest
  double after = 1.0;   ///< factor while unpacking

  /// Whether the tensors are fp32 and the collective uses a 16-bit type.
  bool casts() const noexcept { return tensor != wire_dtype; }
  /// Whether the request's first factor is applied while packing, without a cast.
  bool scales_early() const noexcept { return !casts() && before != 1.0; }
};

/// The operations that the ranks have agreed to run in one call of a backend, and this rank's side
/// of them. Immutable except for this rank's operations: an Execution records the progress, and a
/// Staging moves the bytes to the collective and back.
///
/// Used by the thread that drives the engine.
class Batch {
 public:
  /// @param operations this rank's side of each agreed operation; empty when this rank is absent
  /// from the batch; null for an operation that put() adds later
  Batch(control::AgreedBatch, std::vector<OperationPtr> operations, int world_rank);
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  /// Adds this rank's side of an operation. Called before each use of a replayed batch.
  void put(std::size_t index, OperationPtr operation) noexcept {
    operations_[index] = std::move(operation);
  }
  /// Drops the operations and keeps their places. Called after each use of a replayed batch.
  void release_operations() noexcept;

  const wire::Request& request() const noexcept { return agreed_.operations.front().request; }
  std::span<const wire::Response> agreed() const noexcept { return agreed_.operations; }
  std::span<const OperationPtr> operations() const noexcept { return operations_; }
  /// Result of a join or of a change of process sets: see control::AgreedBatch::result.
  std::int64_t result() const noexcept { return agreed_.result; }
  const ChannelSpec& spec() const noexcept { return spec_; }
  const Collective& collective() const noexcept { return collective_; }
  const Conversion& conversion() const noexcept { return conversion_; }
  /// For messages: kind and name.
  std::string title() const;

  /// Whether no rank has data to move. The answer is the same on every rank.
  bool nothing_to_move() const noexcept;
  /// Whether the batch is an alltoall with splits, which exchanges its sizes first and uses the
  /// callers' memory.
  bool exchanges_rows() const noexcept { return request().kind == OpKind::kAlltoall; }
  bool fused() const noexcept { return agreed_.operations.size() > 1; }
  /// Whether the batch has one tensor, whose elements are not contiguous; see Submission::parts.
  /// The agreed request marks it by a group of one, so all ranks treat it alike.
  bool in_parts() const noexcept;
  /// Whether the batch passes through a buffer. Otherwise the collective uses the callers' memory.
  bool buffered() const noexcept { return fused() || conversion_.casts() || in_parts(); }
  /// Whether this rank has joined. It then contributes values that do not change the result.
  bool absent_here() const noexcept { return agreed_.absent_here; }
  /// Whether input and output have the same size on every rank.
  bool in_place_kind() const noexcept;
  bool at_root() const noexcept { return spec_.set_rank == collective_.root; }
  /// Whether this rank's tensors are read. In a scatter only the root's are.
  bool reads_input() const noexcept { return request().kind != OpKind::kScatter || at_root(); }
  /// Whether this rank has a result. In a gather only the root has one.
  bool has_output() const noexcept { return request().kind != OpKind::kGather || at_root(); }
  /// Bytes of the collective on this rank.
  std::size_t in_bytes() const;
  std::size_t out_bytes() const;

  /// Allocates the outputs whose size has been agreed on. @return the events after which the
  /// outputs may be written; outputs that may be written at once have no event. @throws hvd::Error
  /// for an output of the wrong size
  std::vector<EventPtr> allocate_outputs() const;
  /// This rank's tensors, of a batch that is not buffered. Empty if it has no such tensor.
  std::span<const std::byte> input() const noexcept;
  std::span<std::byte> output() const noexcept;
  /// This rank's tensors in their order in a buffer. @param pieces overwritten
  void input_pieces(std::vector<std::span<const std::byte>>& pieces) const;
  void output_pieces(std::vector<std::span<std::byte>>& pieces) const;

 private:
  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  void describe();
  void describe_rows();
  void describe_gather();
  void describe_scatter();
  std::vector<std::int64_t> rows_of(std::size_t tensor) const;

  const control::AgreedBatch agreed_;
  std::vector<OperationPtr> operations_;
  ChannelSpec spec_;
  Conversion conversion_;
  Collective collective_;
  std::vector<std::int64_t> counts_;  // referred to by collective_
  std::vector<std::int64_t> send_counts_;
  std::vector<std::vector<std::size_t>>
      part_bytes_;  // [tensor][rank], of kinds that split or join tensors by rows
};

}  // namespace hvd::runtime
