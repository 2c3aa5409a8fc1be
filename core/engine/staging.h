#pragma once

#include <cstddef>
#include <span>

#include "backend/backend.h"
#include "engine/batch.h"

namespace hvd::runtime {

/// What a channel is asked for: the collective, and the memory that it works on.
struct Staged {
  Collective collective = {};
  std::span<const std::byte> in = {};
  std::span<std::byte> out = {};
};

/// Brings the bytes of a batch to where its collective works on them, and the result back to the
/// callers' tensors. One per channel queue, and one batch at a time, as a channel has one Work at a
/// time; so what a batch needs while it is staged is the staging's own, and nothing is allocated
/// for it.
///
///   empty --stage()--> staged --pack_part(): true--> the Work runs --unpack_part(): true-->
///                        |                                             unstage()--> empty
///                        '----something has failed: abandon()
///
/// Used by the thread that drives the engine. Nothing waits for a device: what is done there is
/// queued, and ordered by events.
class Staging {
 public:
  virtual ~Staging() = default;
  /// Whether the memory is there that the batch goes through. False: it is being made; ask again.
  /// Before stage(), of the same batch. From the first call on the memory is made, too, whose size
  /// follows from settings. @throws hvd::Error when a device has no memory left for the batch
  virtual bool ready(const Batch&) { return true; }
  /// Asks for the outputs whose size has been agreed on, and takes the buffers.
  /// @return what to launch once it is packed; valid until unstage() or abandon(). Launched with
  /// its `input_ready`, it follows what the device packs. @throws hvd::Error for an output of the
  /// wrong size, or a failing device
  /// @pre empty, and ready() for this batch, which has something to move and does not exchange rows
  virtual const Staged& stage(const Batch&) = 0;
  /// Packs what goes through a buffer, about kBytesPerCall of it in a call. @return whether all is
  /// packed; not called again then. @pre this batch is staged (unchecked: the default has nothing
  /// to pack)
  virtual bool pack_part(const Batch&) { return true; }
  /// The reverse for the result, once the Work has ended.
  virtual bool unpack_part(const Batch&) { return true; }
  /// Gives the buffers back, when the result is in the callers' tensors, or will be by what the
  /// device has queued. @param reduced the event after which the Work's result is there; null: it
  /// is there. @return the event after which the callers may read it. @pre this batch is staged,
  /// and unpack_part() has returned true
  virtual EventPtr unstage(const Batch&, EventPtr reduced) = 0;
  /// Ranks or a device may still use the buffers, now and until the process ends. Nothing is staged
  /// here any more. See Note [Who frees the buffer].
  virtual void abandon() noexcept = 0;
  /// One event behind both, either of which may be null, for what is launched on callers' memory.
  virtual EventPtr after_both(const EventPtr& one, const EventPtr& other) = 0;
};

}  // namespace hvd::runtime
