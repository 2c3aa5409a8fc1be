#include "engine/message_window.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "hvd/error.h"
#include "kernels/streaming.h"

namespace hvd::runtime {
namespace {

/// The offset of the first slot. Large blocks of malloc() begin 16 or 64 bytes after a page. Some
/// processors copy from the beginning of a page to such a block at a tenth of the speed, because
/// memcpy() uses `rep movsb`.
constexpr std::size_t kOffset = 2048;

}  // namespace

std::unique_ptr<MessageWindow> MessageWindow::create(const std::string& name) {
  return std::unique_ptr<MessageWindow>(new MessageWindow(SharedSegment::create(name, kBytes)));
}

std::unique_ptr<MessageWindow> MessageWindow::attach(const std::string& name) {
  try {
    if (auto segment = SharedSegment::attach(name, kBytes)) {
      segment->unlink();
      return std::unique_ptr<MessageWindow>(new MessageWindow(std::move(segment)));
    }
    HVD_LOG(kDebug) << "messages of this host are sent without shared memory: there is no segment "
                    << name;
  } catch (const Error& error) {
    HVD_LOG(kDebug) << "messages of this host are sent without shared memory: " << error.what();
  }
  return nullptr;
}

std::byte* MessageWindow::next_slot() noexcept {
  return segment_->data() + kOffset + next_++ % kSlots * wire::kPieceBytes;
}

void MessageWindow::write(std::span<const std::byte> piece) {
  HVD_EXPECT(piece.size() <= wire::kPieceBytes, "a piece fits into a slot");
  std::memcpy(next_slot(), piece.data(), piece.size());
  // The transport may carry the control message without a barrier of its own.
  std::atomic_thread_fence(std::memory_order_release);
}

void MessageWindow::read(std::span<std::byte> piece, bool streams) {
  HVD_EXPECT(piece.size() <= wire::kPieceBytes, "a piece fits into a slot");
  if (next_ == 0) segment_->unlink();  // the sender has removed the name; this closes its lock
  std::atomic_thread_fence(std::memory_order_acquire);
  if (streams) {
    kernels::copy_streaming(piece.data(), next_slot(), piece.size());
    kernels::streaming_fence();
  } else {
    std::memcpy(piece.data(), next_slot(), piece.size());
  }
  // The confirmation must not overtake the reads.
  std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace hvd::runtime
