#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cache_line.h"

namespace hvd {

/// Hands one small message at a time from one process to another in memory that both share. The
/// sender puts it into the box and takes it back if the receiver does not take it soon, so a
/// message is in the box only while a thread of the sender waits for it there.
///
///   empty --post()--> full --begin()--> taken --end()--> empty
///   full --retract()--> empty;   taken --begin(), of another label--> full
///
/// An object is a handle to that memory. One thread of the sending process may use it at a time,
/// and one of the receiving process.
class MessageBox {
 public:
  /// Identifies a message. A call receives only a message with an equal label.
  struct Label {
    std::int64_t tag = 0;
    std::uint64_t elements = 0;
    std::uint32_t process_set = 0;
    std::uint32_t dtype = 0;
    friend bool operator==(const Label&, const Label&) = default;
  };

  /// The capacity of each box on a host with this many ranks, with one box for each ordered pair of
  /// ranks: the largest with which all boxes fit into 1 MiB. 0: too many ranks for boxes.
  static std::size_t capacity_for(int ranks) noexcept;
  /// The memory of a box of this capacity, a multiple of kCacheLinePair.
  static std::size_t bytes_for(std::size_t capacity) noexcept;

  /// @param memory of bytes_for(capacity) bytes, aligned to kCacheLinePair, zero at first
  /// @param capacity of capacity_for()
  MessageBox(std::byte* memory, std::size_t capacity) noexcept;

  std::size_t capacity() const noexcept { return capacity_; }

  // --- the sender ---
  /// @pre the box is empty, and the message is not larger than capacity()
  void post(const Label&, std::span<const std::byte> message) noexcept;
  /// After post(): whether the receiver has the whole message.
  bool received() const noexcept { return state(std::memory_order_acquire) == kEmpty; }
  /// Takes the message back. @return whether it was still in the box; otherwise the receiver has it
  /// or is reading it
  bool retract() noexcept;

  // --- the receiver ---
  /// Whether begin() may find a message.
  bool full() const noexcept { return state(std::memory_order_relaxed) == kFull; }
  enum class Found : std::uint8_t { kNothing, kMessage, kOther };
  /// Looks for a message of this label. If there is one, it cannot be retracted any more, and end()
  /// has to follow. A message of another label stays in the box (kOther).
  Found begin(const Label&) noexcept;
  /// Copies the message and empties the box. @pre begin() has returned kMessage
  /// @param memory of the size of the message, which its label determines
  void end(std::span<std::byte> memory) noexcept;

 private:
  enum State : std::uint32_t { kEmpty, kFull, kTaken };
  struct Memory {
    std::atomic<std::uint32_t> state;
    Label label;
    // the message follows
  };

  std::uint32_t state(std::memory_order order) const noexcept { return memory_->state.load(order); }
  std::byte* bytes() const noexcept;

  Memory* memory_;
  std::size_t capacity_;
};

/// The boxes of a rank and another one of its host.
struct MessageBoxes {
  MessageBox outgoing, incoming;
};

}  // namespace hvd
