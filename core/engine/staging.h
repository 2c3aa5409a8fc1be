#pragma once

#include <cstddef>
#include <span>

#include "backend/backend.h"
#include "engine/batch.h"

namespace hvd::runtime {

/// The input of Channel::launch(): the collective, and the memory that it uses.
struct Staged {
  Collective collective = {};
  std::span<const std::byte> in = {};
  std::span<std::byte> out = {};
};

/// Moves the bytes of a batch to the memory that its collective uses, and the result back to the
/// callers' tensors. Each channel queue has one staging, which handles one batch at a time, because
/// a channel has one Work at a time. The staging therefore holds the state of the current batch,
/// without allocating memory for it.
///
///   empty --stage()--> staged --pack_part(): true--> the Work runs --unpack_part(): true-->
///                        |                                             unstage()--> empty
///                        '----an error: abandon()
///
/// Used by the thread that drives the engine. Never waits for a device: work for it is queued and
/// ordered by events.
class Staging {
 public:
  virtual ~Staging() = default;
  /// Whether the buffers of the batch are available. False: they are being allocated; call again.
  /// Call this before stage(), for the same batch. The first call also starts the allocation of
  /// memory whose size depends on settings only. @throws hvd::Error when a device has no memory
  /// left for the batch
  virtual bool ready(const Batch&) { return true; }
  /// Allocates the outputs whose size has been agreed on, and takes the buffers.
  /// @return the input of launch() once the batch is packed; valid until unstage() or abandon().
  /// The input's `input_ready` makes the collective wait for the packing on the device. @throws
  /// hvd::Error for an output of the wrong size, or a failing device
  /// @pre empty, and ready() for this batch, which has data to move and does not exchange rows
  virtual const Staged& stage(const Batch&) = 0;
  /// Packs about kBytesPerCall of a batch that passes through a buffer. @return true when the batch
  /// is packed, after which it is not called again. @pre this batch is staged (unchecked: the
  /// default packs no data)
  virtual bool pack_part(const Batch&) { return true; }
  /// Unpacks the result in the same way, once the Work has ended.
  virtual bool unpack_part(const Batch&) { return true; }
  /// Releases the buffers. The result is in the callers' tensors then, or will be after the work
  /// that the device has queued. @param reduced the event after which the Work's result is
  /// complete; null: it is complete. @return the event after which the callers may read it. @pre
  /// this batch is staged, and unpack_part() has returned true
  virtual EventPtr unstage(const Batch&, EventPtr reduced) = 0;
  /// Keeps the buffers until the process ends, because other ranks or a device may still use them.
  /// No batch is staged here afterwards. See Note [Memory after a failure].
  virtual void abandon() noexcept = 0;
  /// Returns an event after both events, either of which may be null. For collectives on the
  /// callers' memory.
  virtual EventPtr after_both(const EventPtr& one, const EventPtr& other) = 0;
};

}  // namespace hvd::runtime
