#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <span>

#include "device/context.h"
#include "device/pinned_pool.h"
#include "hvd/status.h"
#include "hvd/types.h"
#include "negotiation/point_messages.h"

namespace hvd::runtime {

/// The copy stream and the pinned host memory that all messages of a rank's GPU share.
class DeviceMessages {
 public:
  explicit DeviceMessages(std::shared_ptr<device::Context> device);

 private:
  friend class DeviceTransfer;

  const std::shared_ptr<device::Context> device_;
  const device::OwnedStream stream_;
  device::PinnedPool pool_;
};

/// A send or recv whose tensor is on this rank's GPU. Its pieces pass through four slots of pinned
/// host memory. No copy begins before the tensor is ready, so that a copy that waits for the
/// program's stream does not delay other copies.
///
/// Not thread-safe: used by the thread that drives the engine. The device's errors are thrown.
class DeviceTransfer {
 public:
  static constexpr std::size_t kSlots = 4;

  /// @param ready the tensor may be accessed after it; null: at once
  DeviceTransfer(DeviceMessages&, const TensorView&, EventPtr ready);
  DeviceTransfer(const DeviceTransfer&) = delete;
  DeviceTransfer& operator=(const DeviceTransfer&) = delete;
  ~DeviceTransfer();

  /// Whether the tensor is ready and there is host memory.
  bool can_begin();
  /// Whether no copy is under way.
  bool idle() const;
  /// The event after the last copy that has begun; null before the first copy.
  const EventPtr& last_copy() const noexcept { return last_copy_; }

  // --- of a send ---
  /// The next piece in the host's memory; empty: the device has not copied it yet.
  std::span<const std::byte> next_piece();
  /// Frees the slot of the piece, which has been sent. @pre next_piece() is not empty
  void release_piece();

  // --- of a recv ---
  /// Host memory for the next piece; empty: all slots are in use. @pre can_begin()
  std::span<std::byte> free_slot() noexcept;
  /// Copies the piece in the free slot to the tensor. @pre there is a free slot
  void copy_to_device(std::size_t bytes);
  /// The bytes of the first piece that the device has copied and this function has not returned
  /// yet; 0 without such a piece.
  std::size_t take_copied();
  std::size_t bytes_under_way() const noexcept;

 private:
  struct Piece {
    std::size_t bytes = 0;
    EventPtr copied = nullptr;
  };
  std::span<std::byte> slot(std::size_t number) const noexcept;
  void begin_copy(std::size_t bytes, device::Direction direction);
  void pop() noexcept;

  DeviceMessages& messages_;
  const TensorView tensor_;
  EventPtr ready_;
  device::PinnedPool::Buffer host_;
  EventPtr last_copy_;
  std::deque<Piece> pieces_;  // in the slots, the oldest first
  std::size_t first_ = 0;     // number of the oldest one
  std::size_t begun_ = 0;     // bytes whose copies have begun
};

}  // namespace hvd::runtime
