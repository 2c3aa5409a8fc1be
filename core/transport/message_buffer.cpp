#include "transport/message_buffer.h"

#include <cstdlib>
#include <new>
#include <utility>

#include "base/kept_memory.h"

namespace hvd::message {

std::byte* MessageBuffer::reserve(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded));
    if (memory == nullptr) throw std::bad_alloc();
    memory_.reset(memory, [](std::byte* unused) { std::free(unused); });
    bytes_ = rounded;
  }
  return memory_.get();
}

void MessageBuffer::keep_until_exit() {
  if (memory_) hvd::keep_until_exit(std::exchange(memory_, nullptr));
  bytes_ = 0;
}

}  // namespace hvd::message
