#include "reports/send_queue.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace hvd::launcher {

std::string& SendQueue::tail() {
  // A piece that is partly written is not extended: its written bytes would stay in memory.
  if (pieces_.empty() || pieces_.back().shared || pieces_.back().begin > 0) pieces_.emplace_back();
  return pieces_.back().own;
}

void SendQueue::add(const Shared& bytes, std::size_t begin, std::size_t end) {
  pieces_.push_back({.shared = bytes, .begin = begin, .end = end});
}

bool SendQueue::empty() const noexcept {
  return std::all_of(pieces_.begin(), pieces_.end(),
                     [](const Piece& piece) { return piece.size() == 0; });
}

bool SendQueue::flush(int fd) {
  while (!pieces_.empty()) {
    Piece& piece = pieces_.front();
    if (piece.size() == 0) {
      pieces_.pop_front();
      continue;
    }
    const ssize_t count = ::send(fd, piece.data(), piece.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (count <= 0) return false;
    piece.begin += static_cast<std::size_t>(count);
  }
  return true;
}

}  // namespace hvd::launcher
