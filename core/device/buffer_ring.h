#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/api.h"
#include "hvd/status.h"

namespace hvd::device {

/// Round-robin use of buffers that another object owns. The order depends only on the number of
/// calls, not on which buffer is free first, so that ranks with equal counts use the same buffer.
/// Only the thread that drives the engine uses it, one buffer at a time. Never blocks the host.
class BufferRing {
 public:
  explicit BufferRing(Api& api) : api_(api) {}

  /// Whether these buffers can hold `size` bytes.
  static bool fits(std::span<const std::span<std::byte>> buffers, std::size_t size) noexcept {
    return !buffers.empty() && size > 0 && size <= buffers.front().size();
  }
  /// Takes the next buffer in turn. Returns an empty span, and takes no turn, if `size` does not
  /// fit. Later work of `stream` waits on the device for the buffer's previous user. The device
  /// must be current.
  /// @pre the buffer taken before has been released; `buffers` have one size and are always the
  /// same
  std::span<std::byte> take(std::span<const std::span<std::byte>> buffers, std::size_t size,
                            Stream stream);
  /// Returns the buffer. Its next user waits on the device for `after`, if it is not null.
  void release(EventPtr after);
  /// Whether all buffers are released and the device has finished with them.
  bool idle() const;

 private:
  Api& api_;
  std::vector<EventPtr> free_after_;
  std::size_t next_ = 0;
  bool taken_ = false;
};

}  // namespace hvd::device
