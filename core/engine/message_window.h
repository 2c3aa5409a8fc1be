#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/shared_segment.h"
#include "negotiation/point_messages.h"

namespace hvd::runtime {

/// A ring of slots in shared memory, through which the pieces of messages go from one rank to
/// another rank of its host. Both sides use the slots in the same order. The receiver creates the
/// window, and the sender removes its name, so that no file remains.
///
/// The pieces' control messages order the accesses: the sender sends one after write(), and writes
/// to a slot again only when the receiver has confirmed that it has read it.
class MessageWindow {
 public:
  static constexpr std::size_t kSlots = 4;
  static constexpr std::size_t kBytes = kSlots * wire::kPieceBytes + (std::size_t{4} << 10);

  /// For the receiver. @throws hvd::Error when there is no memory for it
  static std::unique_ptr<MessageWindow> create(const std::string& name);
  /// For the sender. Returns null, and logs the reason, when the window cannot be opened.
  static std::unique_ptr<MessageWindow> attach(const std::string& name);

  /// Copies a piece into the next slot. @pre it has at most kPieceBytes
  void write(std::span<const std::byte> piece);
  /// Copies a piece out of the next slot. @pre it has at most kPieceBytes
  /// @param streams bypasses the caches, for a message that is larger than they are
  void read(std::span<std::byte> piece, bool streams);

 private:
  explicit MessageWindow(std::unique_ptr<SharedSegment> segment) : segment_(std::move(segment)) {}
  std::byte* next_slot() noexcept;

  const std::unique_ptr<SharedSegment> segment_;
  std::size_t next_ = 0;
};

}  // namespace hvd::runtime
