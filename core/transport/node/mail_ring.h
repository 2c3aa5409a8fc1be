#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/cache_line.h"

namespace hvd::host {

/// A queue of messages from one rank to another in memory that both share. Only the sender writes,
/// and only the receiver reads. A message becomes visible as a whole, so a sender that is killed
/// leaves no partial message.
///
/// Only one thread of each of the two processes may use it at a time.
class MailRing {
 public:
  /// A message, or a marker that the sender's next message goes through the carrier.
  struct Entry {
    bool elsewhere = false;
    std::vector<std::byte> bytes = {};
  };

  /// The capacity of each ring on a host with this many ranks, with one ring for each ordered pair
  /// of ranks: the largest with which all rings fit into 4 MiB. 0: too many ranks for rings.
  static std::size_t capacity_for(int ranks) noexcept;
  /// The memory of a ring of this capacity, which is a multiple of kCacheLinePair.
  static std::size_t bytes_for(std::size_t capacity) noexcept { return sizeof(Ends) + capacity; }

  /// @param memory of bytes_for(capacity) bytes, aligned to kCacheLinePair, zero at first
  /// @param capacity a power of two
  MailRing(std::byte* memory, std::size_t capacity) noexcept;

  /// The size of the largest message that travels through the ring. It leaves room for others.
  std::size_t largest_message() const noexcept { return capacity_ / 2; }
  /// Returns false, without writing, if the ring has no room. @pre the message is not larger than
  /// largest_message()
  bool push(std::span<const std::byte> message) noexcept;
  /// Appends the marker that the next message goes through the carrier. Returns false if the ring
  /// has no room.
  bool push_elsewhere() noexcept { return write(kElsewhere, {}); }
  /// Whether push_elsewhere() would return true.
  bool has_room() const noexcept { return room() >= sizeof(Size); }
  /// @throws hvd::Error when the memory holds an impossible entry
  std::optional<Entry> pop();

 private:
  using Size = std::uint64_t;  ///< precedes each message
  static constexpr Size kElsewhere = ~Size{0};
  /// Counts of bytes since the start. Each is on its own cache lines, which have one writer.
  struct Ends {
    alignas(kCacheLinePair) std::atomic<std::uint64_t> written;
    alignas(kCacheLinePair) std::atomic<std::uint64_t> read;
  };

  bool write(Size size, std::span<const std::byte> message) noexcept;
  std::size_t room() const noexcept;
  void copy_in(std::uint64_t position, std::span<const std::byte> bytes) noexcept;
  void copy_out(std::uint64_t position, std::span<std::byte> bytes) const noexcept;

  Ends* ends_;
  std::byte* bytes_;
  std::size_t capacity_;
};

}  // namespace hvd::host
