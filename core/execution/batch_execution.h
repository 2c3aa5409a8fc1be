#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "control/negotiator.h"
#include "execution/fusion_buffer.h"
#include "execution/operation_state.h"
#include "hvd/backend.h"

namespace hvd::runtime {

/// The execution of one agreed batch on a channel: its inputs, outputs and buffers. Used by the
/// thread that drives the engine.
class BatchExecution {
 public:
  /// @param operations this rank's side of each agreed operation; none when it is absent from the
  /// batch
  BatchExecution(control::AgreedBatch, std::vector<OperationPtr> operations, int world_rank);
  /// One that is replayed: it waits for its operations. See put().
  BatchExecution(control::AgreedBatch, int world_rank);
  BatchExecution(const BatchExecution&) = delete;
  BatchExecution& operator=(const BatchExecution&) = delete;

  /// Of a repeated execution, before it starts: this rank's side of an operation is there.
  void put(std::size_t index, OperationPtr operation) noexcept {
    operations_[index] = std::move(operation);
  }
  bool repeated() const noexcept { return repeated_; }

  const wire::Request& request() const noexcept { return batch_.operations.front().request; }
  const ChannelSpec& spec() const noexcept { return spec_; }
  /// For messages: what is running.
  std::string title() const;
  const Collective& collective() const noexcept { return collective_; }
  std::span<const control::AgreedOperation> agreed() const noexcept { return batch_.operations; }
  std::span<const OperationPtr> operations() const noexcept { return operations_; }
  /// Every rank knows that there is nothing to move.
  bool nothing_to_move() const noexcept { return nothing_to_move_; }

  /// Asks for the outputs whose size has been agreed on, and packs what has to be. @throws
  /// hvd::Error for an output of the wrong size.
  void prepare(FusionBufferPool&);
  std::span<const std::byte> in() const noexcept { return in_; }
  std::span<std::byte> out() const noexcept { return out_; }
  /// Brings the result to where the callers want it.
  void unpack();
  /// The transport may still use the buffers. See Note [Who frees the buffer].
  void abandon_buffers() noexcept;

  // What a batch on a device is put together from (device_batch.h) instead of prepare() and
  // unpack().
  bool on_device() const noexcept { return spec_.device.type != DeviceType::kCpu; }
  bool fused() const noexcept { return batch_.operations.size() > 1; }
  /// The tensors are of fp32 and the collective is of a 16-bit type.
  bool casts() const noexcept { return collective_.dtype != request().dtype; }
  /// It goes through a buffer; otherwise the collective works on the callers' memory.
  bool buffered() const noexcept { return fused() || casts(); }
  bool absent_here() const noexcept { return batch_.absent_here; }
  /// As many elements out as in, on every rank.
  bool in_place_kind() const noexcept;
  bool at_root() const noexcept { return spec_.set_rank == collective_.root; }
  /// The request's first factor is applied while packing, and is no part of the collective, though
  /// nothing is cast.
  bool scales_early() const noexcept;
  /// What elements are multiplied by while they are packed, and while they are unpacked; the
  /// collective has the rest.
  double factor_in() const noexcept { return casts() || scales_early() ? request().prescale : 1.0; }
  double factor_out() const noexcept;
  std::size_t in_bytes() const;
  std::size_t out_bytes() const;
  /// Asks for the outputs whose size has been agreed on, if there are such. @throws hvd::Error for
  /// one of the wrong size.
  void ask_for_outputs();
  /// After ask_for_outputs(): when they may be written, for each that said so.
  std::span<const EventPtr> writable() const noexcept { return writable_; }
  std::span<const std::span<const std::byte>> input_pieces();
  std::span<const std::span<std::byte>> output_pieces();

  /// Releases what it holds for one use.
  void let_go() noexcept;

  // The executor's.
  struct ChannelQueue* queue = nullptr;
  bool started = false;  ///< and has not ended
  bool launched = false;
  std::unique_ptr<Work> work = {};       ///< under way
  std::unique_ptr<Work> last_work = {};  ///< of the last use of a repeated execution
  TimePoint agreed_at = {};
  TimePoint launched_at = {};
  std::uint64_t device_order = 0;  ///< among the executions of ordered queues

 private:
  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  void describe();
  void describe_rows();
  std::vector<std::int64_t> rows_of(std::size_t tensor) const;
  void allocate_outputs();
  void prepare_absent(FusionBufferPool&);

  control::AgreedBatch batch_;
  std::vector<OperationPtr> operations_;
  ChannelSpec spec_;
  Collective collective_;
  std::vector<std::int64_t> counts_;  // what collective_ refers to
  std::vector<std::int64_t> send_counts_;
  std::vector<std::vector<std::size_t>>
      part_bytes_;  // [tensor][rank], of what is cut or joined by rows
  bool nothing_to_move_ = false;
  std::vector<EventPtr> writable_;
  bool repeated_ = false;
  std::vector<std::span<const std::byte>> input_pieces_;
  std::vector<std::span<std::byte>> output_pieces_;
  FusionLease input_buffer_;
  FusionLease output_buffer_;
  std::span<const std::byte> in_;
  std::span<std::byte> out_;
};

}  // namespace hvd::runtime
