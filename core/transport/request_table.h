#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/expect.h"
#include "transport/carrier.h"

namespace hvd::message {

/// Records for Requests which slots are idle and the peer of each message, and checks the size of
/// each received message. A loop over the slots calls no virtual function.
///
/// Not thread-safe: only the thread that drives the engine calls it. Peers are world ranks.
/// Allocates in reset() only.
class RequestTable {
 public:
  RequestTable(Carrier&, Plane);

  /// Empties the table, which must be idle, and gives it `slots` slots.
  void reset(std::size_t slots);

  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, Tag tag) {
    requests_->send(slot, bytes, peer, tag);
    record_start(slot, {.peer = peer, .state = SlotState::kSending});
  }
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, Tag tag) {
    requests_->receive(slot, bytes, peer, tag);
    record_start(slot, {.peer = peer, .state = SlotState::kReceiving, .bytes = bytes.size()});
  }
  /// See Requests::receive_parts().
  bool receive_parts(std::size_t slot, PartReader& reader, std::size_t bytes, int peer, Tag tag) {
    if (!requests_->receive_parts(slot, reader, bytes, peer, tag)) return false;
    record_start(slot, {.peer = peer, .state = SlotState::kReceiving, .bytes = bytes});
    return true;
  }
  /// @param bytes exactly as long as the message
  void receive(std::size_t slot, std::span<std::byte> bytes, const ProbedMessage& arrival) {
    requests_->receive(slot, bytes, arrival);
    record_start(slot,
                 {.peer = arrival.source, .state = SlotState::kReceiving, .bytes = bytes.size()});
  }

  bool idle(std::size_t slot) const noexcept { return slots_[slot].state == SlotState::kIdle; }
  int in_flight() const noexcept { return in_flight_; }
  int peer(std::size_t slot) const noexcept { return slots_[slot].peer; }
  /// The peer of a message under way, preferably of one that is being received; -1 if no message
  /// is under way.
  int awaited() const noexcept;

  /// Lets the carrier make progress, and returns the slots whose messages have completed since the
  /// last call. Valid until the next call. @throws hvd::Error when a message has failed, or its
  /// size differs from the size that its receiver expects. If the carrier can identify the failed
  /// message, its slot becomes idle.
  std::span<const int> test();

  /// See Requests::cancel(). Returns kDone at once if no message is under way.
  MemoryRelease cancel() noexcept;

 private:
  struct Slot {
    int peer = -1;
    SlotState state = SlotState::kIdle;
    std::size_t bytes = 0;  ///< expected length, for a receive
  };
  void record_start(std::size_t slot, const Slot& message) noexcept {
    HVD_EXPECT(idle(slot), "the slot has no message under way");
    slots_[slot] = message;
    ++in_flight_;
  }

  std::span<const Completion> test_requests();

  std::string_view carrier_;
  std::unique_ptr<Requests> requests_;
  std::vector<Slot> slots_;
  std::vector<int> completed_;
  int in_flight_ = 0;
};

/// How long to wait for memory that the carrier is about to release. After that time the memory is
/// kept.
inline constexpr auto kCancelTime = std::chrono::milliseconds(500);

/// Cancels all messages under way, and waits for their memory while the carrier returns
/// kPending, at most until the deadline. Meant for the end of a job. Returns false if the memory
/// must be kept; see Note [Memory after a failure].
bool wait_for_memory(RequestTable&, Deadline) noexcept;

}  // namespace hvd::message
