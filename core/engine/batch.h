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

/// What becomes of an element between its tensor and the collective.
struct Conversion {
  DataType tensor = DataType::kFloat32;
  DataType travels = DataType::kFloat32;
  double before =
      1.0;             ///< what it is multiplied by while it is packed; the collective has the rest
  double after = 1.0;  ///< and while it is unpacked

  /// The tensors are of fp32 and the collective is of a 16-bit type.
  bool casts() const noexcept { return tensor != travels; }
  /// The request's first factor is applied while packing though nothing is cast.
  bool scales_early() const noexcept { return !casts() && before != 1.0; }
};

/// What the ranks have agreed to do in one call of a backend, and this rank's side of it. A
/// description: it says the same whenever it is asked. How far it has got is an Execution's affair,
/// and how its bytes get into the collective and back a Staging's.
///
/// Used by the thread that drives the engine.
class Batch {
 public:
  /// @param operations this rank's side of each agreed operation; none when it is absent from the
  /// batch, or (of a replayed one) they are yet to be put()
  Batch(control::AgreedBatch, std::vector<OperationPtr> operations, int world_rank);
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  /// Of a replayed batch, before each use: this rank's side of an operation is there.
  void put(std::size_t index, OperationPtr operation) noexcept {
    operations_[index] = std::move(operation);
  }
  /// After each use: it holds no operation, and has room for as many as were agreed on.
  void release_operations() noexcept;

  const wire::Request& request() const noexcept { return agreed_.operations.front().request; }
  std::span<const wire::Response> agreed() const noexcept { return agreed_.operations; }
  std::span<const OperationPtr> operations() const noexcept { return operations_; }
  /// Of a join, or of a change of process sets: see control::AgreedBatch::result.
  std::int64_t result() const noexcept { return agreed_.result; }
  const ChannelSpec& spec() const noexcept { return spec_; }
  const Collective& collective() const noexcept { return collective_; }
  const Conversion& conversion() const noexcept { return conversion_; }
  /// For messages: what it is.
  std::string title() const;

  /// Every rank knows that there is nothing to move.
  bool nothing_to_move() const noexcept;
  /// An alltoall with splits, which finds its sizes out on its way and uses the callers' memory.
  bool exchanges_rows() const noexcept { return request().kind == OpKind::kAlltoall; }
  bool fused() const noexcept { return agreed_.operations.size() > 1; }
  /// It is of one tensor, whose elements do not lie side by side; see Submission::parts. Ranks
  /// agree on it by a group of one.
  bool in_parts() const noexcept;
  /// It goes through a buffer; otherwise the collective works on the callers' memory.
  bool buffered() const noexcept { return fused() || conversion_.casts() || in_parts(); }
  /// This rank has joined, and contributes what leaves the result as it is.
  bool absent_here() const noexcept { return agreed_.absent_here; }
  /// As many elements out as in, on every rank.
  bool in_place_kind() const noexcept;
  bool at_root() const noexcept { return spec_.set_rank == collective_.root; }
  /// This rank's tensors are read. Of a scatter only the root's are.
  bool reads_input() const noexcept { return request().kind != OpKind::kScatter || at_root(); }
  /// This rank has a result. Of a gather only the root has.
  bool has_output() const noexcept { return request().kind != OpKind::kGather || at_root(); }
  /// Of the collective.
  std::size_t in_bytes() const;
  std::size_t out_bytes() const;

  /// Asks for the outputs whose size has been agreed on, if there are such. @return when they may
  /// be written, for each that said so. @throws hvd::Error for one of the wrong size
  std::vector<EventPtr> allocate_outputs() const;
  /// This rank's tensors in the order in which they lie in a buffer. @param pieces filled anew
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
  std::vector<std::int64_t> counts_;  // what collective_ refers to
  std::vector<std::int64_t> send_counts_;
  std::vector<std::vector<std::size_t>>
      part_bytes_;  // [tensor][rank], of what is cut or joined by rows
};

}  // namespace hvd::runtime
