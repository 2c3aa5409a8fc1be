#include "base/message_box.h"

#include <cstring>

#include "base/expect.h"

namespace hvd {
namespace {

constexpr std::size_t kLargest = std::size_t{32} << 10;
constexpr std::size_t kSmallest = std::size_t{64};
constexpr std::size_t kAllBoxes = std::size_t{1} << 20;

}  // namespace

// Note [Who may touch a message in a box]
//
// The label and the message are ordinary memory. At each moment one of the two processes may access
// them, and the state determines which:
//
//   empty, full  the sender. It stores `full` (release) after it has written.
//   taken        the receiver. The state becomes `taken` only from `full`, by a compare-exchange
//                (acquire), so the receiver reads all that the sender has written. The receiver
//                ends it by a store (release) of `empty` or `full`, after its last read.
//
// The sender writes again when it has loaded `empty` (acquire) or has changed `full` to `empty` by
// a compare-exchange (acquire). Both come after the receiver's last read. Two compare-exchanges
// from `full` exclude each other, so a message is either received once or taken back. The label is
// read in the state `taken` only. The sender may have replaced a message with another one between
// full() and begin(); begin() then sees the new one as a whole.
//
// A process that is killed leaves the box in one of the three states. A message that is in the box
// of a killed sender is complete. A killed receiver may leave `taken`, and the sender waits until
// it finds that the receiver has ended.

std::size_t MessageBox::capacity_for(int ranks) noexcept {
  const auto boxes = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks);
  for (std::size_t capacity = kLargest; capacity >= kSmallest; capacity /= 2)
    if (boxes * bytes_for(capacity) <= kAllBoxes) return capacity;
  return 0;
}

std::size_t MessageBox::bytes_for(std::size_t capacity) noexcept {
  const std::size_t bytes = sizeof(Memory) + capacity;
  return (bytes + kCacheLinePair - 1) / kCacheLinePair * kCacheLinePair;
}

MessageBox::MessageBox(std::byte* memory, std::size_t capacity) noexcept
    : memory_(reinterpret_cast<Memory*>(memory)), capacity_(capacity) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free,
                "the state is shared between processes");
}

std::byte* MessageBox::bytes() const noexcept {
  return reinterpret_cast<std::byte*>(memory_) + sizeof(Memory);
}

void MessageBox::post(const Label& label, std::span<const std::byte> message) noexcept {
  HVD_EXPECT(message.size() <= capacity_, "the message is not too large for the box");
  HVD_EXPECT(received(), "the box is empty");
  memory_->label = label;
  if (!message.empty()) std::memcpy(bytes(), message.data(), message.size());
  memory_->state.store(kFull, std::memory_order_release);
}

bool MessageBox::retract() noexcept {
  std::uint32_t expected = kFull;
  return memory_->state.compare_exchange_strong(expected, kEmpty, std::memory_order_acquire,
                                                std::memory_order_relaxed);
}

MessageBox::Found MessageBox::begin(const Label& label) noexcept {
  std::uint32_t expected = kFull;
  if (!memory_->state.compare_exchange_strong(expected, kTaken, std::memory_order_acquire,
                                              std::memory_order_relaxed))
    return Found::kNothing;
  if (memory_->label == label) return Found::kMessage;
  memory_->state.store(kFull, std::memory_order_release);
  return Found::kOther;
}

void MessageBox::end(std::span<std::byte> memory) noexcept {
  HVD_EXPECT(state(std::memory_order_relaxed) == kTaken, "begin() has found a message");
  HVD_EXPECT(memory.size() <= capacity_, "no message is larger than the box");
  if (!memory.empty()) std::memcpy(memory.data(), bytes(), memory.size());
  memory_->state.store(kEmpty, std::memory_order_release);
}

}  // namespace hvd
