#include "reports/console.h"

#include <limits.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace hvd::launcher {
namespace {

bool same_target(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

}  // namespace

Console::Console(asio::io_context& io, int stdout_fd, int stderr_fd)
    : shared_(same_target(stdout_fd, stderr_fd)) {
  targets_[0].fd = stdout_fd;
  targets_[1].fd = stderr_fd;
  for (Target& target : targets_) {
    target.terminal = ::isatty(target.fd) == 1;
    target.ready = std::make_unique<SharedDescriptor>(io, target.fd, EPOLLOUT);
  }
}

bool Console::is_terminal(Stream stream) const { return target(stream).terminal; }

bool Console::continues(Stream stream, int owner) const {
  const Target& out = target(stream);
  return out.last != '\n' && out.last != '\r' && out.owner == owner;
}

void Console::write(Stream stream, int owner, std::string_view text) {
  Target& out = target(stream);
  if (text.empty() || out.error != 0) return;
  if (out.last != '\n' && out.owner != owner) {
    // After a '\r' the next text would overwrite only a part of the terminal's line, so this clears
    // the line.
    out.queue += out.last == '\r' && out.terminal ? "\x1b[K" : "\n";
  }
  out.queue += text;
  out.last = text.back();
  out.owner = owner;
  wait(out);
}

void Console::finish_lines() {
  for (Target& target : targets_) {
    if (target.last == '\n' || target.error != 0) continue;
    target.queue += '\n';
    target.last = '\n';
    wait(target);
  }
}

void Console::wait(Target& target) {
  if (target.queue.empty() || std::exchange(target.waiting, true)) return;
  target.ready->wait([this, &target] {
    target.waiting = false;
    write_some(target);
    wait(target);
  });
}

/// After EPOLLOUT a pipe accepts PIPE_BUF bytes without blocking. The descriptor must stay
/// blocking, because other processes share it.
void Console::write_some(Target& target) {
  const std::size_t size = std::min<std::size_t>(target.queue.size() - target.written, PIPE_BUF);
  if (size == 0) return;  // drop() was called meanwhile
  const ssize_t count = ::write(target.fd, target.queue.data() + target.written, size);
  if (count > 0) {
    target.written += static_cast<std::size_t>(count);
    progress_ += static_cast<std::size_t>(count);
  } else if (count < 0 && errno != EINTR && errno != EAGAIN) {
    target.error = errno;
    target.written = target.queue.size();
  }
  if (target.written == target.queue.size() || target.written > 256 * 1024) {
    target.queue.erase(0, target.written);
    target.written = 0;
  }
}

std::optional<int> Console::failure(Stream stream) const {
  const int error = target(stream).error;
  return error != 0 ? std::optional<int>(error) : std::nullopt;
}

std::size_t Console::drop(Stream stream) {
  Target& out = target(stream);
  const std::size_t left = out.queue.size() - out.written;
  out.queue.clear();
  out.written = 0;
  return left;
}

}  // namespace hvd::launcher
