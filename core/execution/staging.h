#pragma once

#include <cstddef>
#include <span>

#include "execution/batch.h"
#include "hvd/backend.h"

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
///   empty --stage()--> staged --the Work has ended: unstage()--> empty
///                        '----it never will: abandon()
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
  /// Asks for the outputs whose size has been agreed on, and packs what goes through a buffer.
  /// @return what to launch; valid until unstage() or abandon(). Launched with its `input_ready`,
  /// it follows the packing. @throws hvd::Error for an output of the wrong size, or a failing
  /// device
  /// @pre empty, and ready() for this batch, which has something to move and does not exchange rows
  virtual const Staged& stage(const Batch&) = 0;
  /// Brings the result to the callers' tensors, and gives the buffers back. @param reduced the
  /// event after which the result is there; null: it is there. @return the event after which the
  /// callers may read it. @pre this batch is staged
  virtual EventPtr unstage(const Batch&, EventPtr reduced) = 0;
  /// Ranks or a device may still use the buffers, now and until the process ends. Nothing is staged
  /// here any more. See Note [Who frees the buffer].
  virtual void abandon() noexcept = 0;
  /// One event behind both, either of which may be null, for what is launched on callers' memory.
  virtual EventPtr after_both(const EventPtr& one, const EventPtr& other) = 0;
};

}  // namespace hvd::runtime
