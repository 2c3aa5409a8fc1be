#include "processes/input_pump.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "system/process.h"

namespace hvd::launcher {
namespace {

bool may_read(int fd) { return ::isatty(fd) != 1 || ::tcgetpgrp(fd) == ::getpgrp(); }

}  // namespace

InputPump::InputPump(int source, UniqueFd target, std::string head)
    : source_(source), target_(std::move(target)), pending_(std::move(head)) {
  set_nonblocking(target_.get());
  write();
}

void InputPump::add_to(Poller& poller) {
  if (!target_) return;
  // Even without pending input the target is polled, to detect that its reader has closed it.
  poller.add(target_.get(), pending_.empty() ? 0 : POLLOUT, [this](short revents) {
    if (!target_) return;
    if (pending_.empty() && (revents & (POLLERR | POLLHUP)) != 0) return target_.reset();
    write();
  });
  if (pending_.empty() && source_ >= 0 && may_read(source_))
    poller.add(source_, POLLIN, [this](short) { read(); });
}

void InputPump::read() {
  if (!target_ || !pending_.empty()) return;
  std::array<char, 16 * 1024> buffer;
  const ssize_t count = ::read(source_, buffer.data(), buffer.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (count > 0) {
    pending_.assign(buffer.data(), static_cast<std::size_t>(count));
  } else {
    source_ = -1;
  }
  write();
}

void InputPump::write() {
  while (!pending_.empty()) {
    const ssize_t count = ::write(target_.get(), pending_.data(), pending_.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) return target_.reset();
    pending_.erase(0, static_cast<std::size_t>(count));
  }
  if (source_ < 0) target_.reset();
}

}  // namespace hvd::launcher
