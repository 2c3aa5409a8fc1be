#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/carrier.h"

namespace hvd::testing {

/// Carries messages between ranks of one process, which are threads or driven by one thread. It
/// matches by the whole tag only. The sender writes straight into the receiver's memory, as a
/// network card does, so that AddressSanitizer finds memory that is freed too early.
///
/// Thread-safe except the settings. Carriers share it, and may outlive the variable that made it.
class FakeNetwork : public std::enable_shared_from_this<FakeNetwork> {
 public:
  static std::shared_ptr<FakeNetwork> create(int size, std::uint32_t generation = 0) {
    return std::shared_ptr<FakeNetwork>(new FakeNetwork(size, generation));
  }
  /// The carrier of a rank.
  std::shared_ptr<message::Carrier> carrier(int rank);

  // --- settings: change them only while no other thread uses the network ---
  /// The sender's memory of a larger message is read only when the message is received.
  std::size_t eager_bytes = std::numeric_limits<std::size_t>::max();
  /// Size of the parts that readers get; 0: the carrier cannot pass on parts.
  std::size_t part_bytes = 0;
  /// The result of cancel() after kPending.
  message::MemoryRelease cancel_result = message::MemoryRelease::kDone;
  /// How often cancel() returns kPending first.
  int pending_cancels = 0;
  /// Every call that may throw throws.
  bool broken = false;
  /// A rank whose connections have broken, or -1. Sends to it, and messages in flight to it, fail.
  int unreachable = -1;
  /// A rank whose matched messages do not arrive in full, or -1.
  int stalled_source = -1;
  /// No message under way completes, and no connection breaks.
  bool stalled = false;
  bool delivers_at_once = true;
  bool may_send_to_lost = true;
  int max_process_sets = message::kMaxProcessSets;

  // --- counters ---
  /// Messages that all ranks have sent.
  int sent() const noexcept { return sent_.load(); }
  /// Calls of cancel().
  int cancel_calls() const noexcept { return cancel_calls_.load(); }
  int progressed() const noexcept { return progressed_.load(); }
  /// Ranks that have sent a farewell, and ranks that have recorded a failure.
  int farewells() const noexcept { return farewells_.load(); }
  int failures() const noexcept { return failures_.load(); }
  /// Number of Requests that were made.
  int requests_made() const noexcept { return requests_made_.load(); }

 private:
  friend class FakeRequests;
  friend class FakeCarrier;
  /// The sender or the receiver of a message.
  struct End {
    bool done = false;
    std::size_t bytes = 0;
    int receiver = -1;                      ///< for a sender
    int source = -1;                        ///< for the receiver of a matched message
    message::PartReader* reader = nullptr;  ///< gets `arrived` in the next test()
    std::size_t expected = 0;               ///< by the reader
    std::vector<std::byte> arrived = {};
  };
  struct Sent {
    message::Tag tag = 0;
    std::vector<std::byte> copy = {};
    std::span<const std::byte> bytes = {};  ///< of `copy`, or the sender's memory
    std::shared_ptr<End> sender = {};
  };
  struct Posted {
    message::Tag tag = 0;
    std::span<std::byte> room = {};
    std::shared_ptr<End> receiver = {};
  };
  struct Mailbox {
    std::deque<Sent> sent = {};
    std::deque<Posted> posted = {};
    std::map<std::uint64_t, Sent> matched = {};
  };

  FakeNetwork(int size, std::uint32_t generation)
      : generation_(generation), mailboxes_(static_cast<std::size_t>(size)) {}
  Mailbox& mailbox(int rank) noexcept { return mailboxes_[static_cast<std::size_t>(rank)]; }
  static void deliver(Sent& from, const Posted& to);

  const std::uint32_t generation_;
  std::mutex mutex_;
  std::vector<Mailbox> mailboxes_;  // guarded by mutex_
  std::uint64_t next_handle_ = 1;   // guarded by mutex_
  std::atomic<int> sent_{0};
  std::atomic<int> cancel_calls_{0};
  std::atomic<int> progressed_{0};
  std::atomic<int> farewells_{0};
  std::atomic<int> failures_{0};
  std::atomic<int> requests_made_{0};
};

}  // namespace hvd::testing
