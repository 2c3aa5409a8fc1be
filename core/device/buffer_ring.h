#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/api.h"
#include "hvd/status.h"

namespace hvd::device {

/// Somebody else's buffers, which take turns by count and not by who is free first: ranks that take
/// as often have the same one. Used by the thread that drives the engine, one buffer at a time;
/// does not wait on the host.
class BufferRing {
 public:
  explicit BufferRing(Api& api) : api_(api) {}

  /// Whether one of these buffers can be taken for as much.
  static bool fits(std::span<const std::span<std::byte>> buffers, std::size_t size) noexcept {
    return !buffers.empty() && size > 0 && size <= buffers.front().size();
  }
  /// The next in turn, or nothing, and no turn, when `size` does not fit. What `stream` does next
  /// is done once the buffer's last user has finished. With the device current. @pre the last one
  /// taken has been released; `buffers` are of one size, and always the same
  std::span<std::byte> take(std::span<const std::span<std::byte>> buffers, std::size_t size,
                            Stream stream);
  /// Its next user waits, on the device, for `after` (null: it does not have to).
  void release(EventPtr after);
  /// All were released, and the device has got past their last use.
  bool idle() const;

 private:
  Api& api_;
  std::vector<EventPtr> free_after_;
  std::size_t next_ = 0;
  bool taken_ = false;
};

}  // namespace hvd::device
