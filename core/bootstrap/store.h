#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bootstrap/messages.h"

namespace hvd::rendezvous {

/// Limits of a key and of a value.
inline constexpr std::size_t kMaxKeyBytes = 256;
inline constexpr std::uint32_t kMaxValueBytes = 64 << 20;
/// Time limit of the last check of a key, which is made at the deadline.
inline constexpr auto kMinCallTimeout = std::chrono::milliseconds(250);

/// Values by key, which all ranks of a job reach while they find each other: a folder, a
/// server, or a store of the program.
///
/// Not thread-safe. Every call returns or throws by its deadline, or a few seconds later if the
/// store is a server that is slow to reply (socket_store.h), and throws hvd::Error when the store
/// fails. A key may have any characters.
class Store {
 public:
  virtual ~Store() = default;

  /// For error texts: "file:///shared/job", "tcp://node7:29400".
  virtual const std::string& url() const noexcept = 0;

  virtual void set(const std::string& key, std::span<const std::byte> value, Deadline) = 0;
  /// The value, or empty if the key has none. Does not wait for it.
  virtual std::optional<Bytes> get(const std::string& key, Deadline) = 0;
  /// Adds atomically to a number that begins at 0, and returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t amount, Deadline) = 0;
  /// Sets the value of a key that has none. Returns false if the key has a value already. Only one
  /// of several concurrent calls returns true. Use it for keys that set() and add() do not change.
  virtual bool create(const std::string& key, std::span<const std::byte> value, Deadline) = 0;

  struct Found {
    std::size_t index = 0;  ///< of the key
    Bytes value = {};
  };
  /// Waits until one of the keys has a value, and returns the first of them that has one. Empty
  /// once the deadline has passed. The default implementation polls with growing pauses; a server
  /// replies when a value is stored.
  virtual std::optional<Found> wait(std::span<const std::string> keys, Deadline deadline) {
    return poll(keys, deadline, deadline);
  }

  /// Removes all values of the store if `key` still has this value. A store that cannot remove
  /// values keeps them, which is harmless.
  virtual void remove_all_if(const std::string& /*key*/, std::span<const std::byte> /*value*/,
                             Deadline) {}
  /// Requests that the store calls create() with this value if this process loses its connection
  /// without close(), but not before the key `once`, if it is not empty, has a value. The store
  /// then also sets the key `also`, if it is not empty, to an empty value. Replaces an earlier
  /// request. A store without connections ignores it.
  virtual void publish_on_loss(const std::string& /*key*/, std::span<const std::byte> /*value*/,
                               const std::string& /*once*/, const std::string& /*also*/, Deadline) {
  }
  /// Whether the store detects the end of this process. Otherwise publish_on_loss() has no effect.
  virtual bool notices_loss() const noexcept { return false; }
  /// Information of the store about ranks that have not joined, for the error text: "; a process
  /// (host node7, process 17) that joined as rank 1 was refused: it has another token
  /// (HVD_JOB_TOKEN)". Empty without such information.
  virtual std::string remarks(std::span<const int> /*absent*/) { return {}; }
  /// Whether the object has to exist for as long as the rank is in the job, so that the store can
  /// refuse a second process of the rank.
  virtual bool stays_open() const noexcept { return false; }
  /// Ends the use of the store in order.
  virtual void close(Deadline) noexcept {}

 protected:
  /// Polls the keys until the deadline. The pauses grow, across calls, until a value is found.
  /// @param call_deadline the deadline of each get(), not earlier than that of the poll
  std::optional<Found> poll(std::span<const std::string> keys, Deadline, Deadline call_deadline);

 private:
  std::optional<Deadline> idle_since_ = {};
};

}  // namespace hvd::rendezvous
