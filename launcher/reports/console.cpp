#include "reports/console.h"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace hvd::launcher {
namespace {

bool same_target(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

}  // namespace

Console::Console(int stdout_fd, int stderr_fd) : shared_(same_target(stdout_fd, stderr_fd)) {
  devices_[0].fd = stdout_fd;
  devices_[1].fd = stderr_fd;
  for (Device& device : devices_) device.terminal = ::isatty(device.fd) == 1;
}

bool Console::is_terminal(Stream stream) const { return device(stream).terminal; }

bool Console::continues(Stream stream, int owner) const {
  const Device& target = device(stream);
  return target.last != '\n' && target.last != '\r' && target.owner == owner;
}

void Console::write(Stream stream, int owner, std::string_view text) {
  Device& target = device(stream);
  if (text.empty() || target.error != 0) return;
  if (target.last != '\n' && target.owner != owner) {
    // After a '\r' a terminal's cursor stands on a line that the next text would overwrite only in
    // part.
    target.queue += target.last == '\r' && target.terminal ? "\x1b[K" : "\n";
  }
  target.queue += text;
  target.last = text.back();
  target.owner = owner;
}

void Console::finish_lines() {
  for (Device& device : devices_) {
    if (device.last == '\n' || device.error != 0) continue;
    device.queue += '\n';
    device.last = '\n';
  }
}

void Console::add_to(Poller& poller) {
  for (Device& device : devices_) {
    if (!device.queue.empty())
      poller.add(device.fd, POLLOUT, [this, &device](short) { write_some(device); });
  }
}

/// After POLLOUT a pipe takes PIPE_BUF bytes without blocking; the descriptor is shared with others
/// and must stay as it is, so making it non-blocking is no option.
void Console::write_some(Device& device) {
  const std::size_t size = std::min<std::size_t>(device.queue.size() - device.written, PIPE_BUF);
  const ssize_t count = ::write(device.fd, device.queue.data() + device.written, size);
  if (count > 0) {
    device.written += static_cast<std::size_t>(count);
    progress_ += static_cast<std::size_t>(count);
  } else if (count < 0 && errno != EINTR && errno != EAGAIN) {
    device.error = errno;
    device.written = device.queue.size();
  }
  if (device.written == device.queue.size() || device.written > 256 * 1024) {
    device.queue.erase(0, device.written);
    device.written = 0;
  }
}

std::optional<int> Console::failure(Stream stream) const {
  const int error = device(stream).error;
  return error != 0 ? std::optional<int>(error) : std::nullopt;
}

std::size_t Console::drop(Stream stream) {
  Device& target = device(stream);
  const std::size_t left = target.queue.size() - target.written;
  target.queue.clear();
  target.written = 0;
  return left;
}

void Console::flush() {
  while (pending() > 0) {
    Poller poller;
    add_to(poller);
    poller.wait(-1);
  }
}

}  // namespace hvd::launcher
