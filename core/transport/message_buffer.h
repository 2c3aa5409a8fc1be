#pragma once

#include <cstddef>
#include <memory>

namespace hvd::message {

/// Scratch memory for messages whose data is in no tensor, for example data received before it is
/// reduced. Kept from one collective to the next. Not thread-safe.
class MessageBuffer {
 public:
  /// Returns at least `bytes` bytes, aligned to a page. The previous contents are lost.
  std::byte* reserve(std::size_t bytes);
  /// Keeps the memory allocated until the process ends. See Note [Who frees the buffer].
  void keep_until_exit();
  /// Null before reserve() and after keep_until_exit().
  const std::shared_ptr<std::byte>& memory() const noexcept { return memory_; }

 private:
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace hvd::message
