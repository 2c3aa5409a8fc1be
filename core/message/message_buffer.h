#pragma once

#include <cstddef>
#include <memory>

namespace hvd::message {

/// Memory for messages that no tensor holds: what is received before it is reduced, for example.
/// Kept from one collective to the next. Not thread-safe.
class MessageBuffer {
 public:
  /// At least `bytes` bytes, aligned to a page. What it held is lost.
  std::byte* reserve(std::size_t bytes);
  /// Gives the memory up without freeing it. See Note [Who frees the buffer].
  void keep_until_exit();
  /// Null before reserve() and after keep_until_exit().
  const std::shared_ptr<std::byte>& memory() const noexcept { return memory_; }

 private:
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace hvd::message
