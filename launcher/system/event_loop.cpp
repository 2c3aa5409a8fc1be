#include "system/event_loop.h"

#include <poll.h>
#include <sys/epoll.h>

#include <asio/buffer.hpp>
#include <asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

/// The descriptor that a system call has made. @throws LaunchError if the call has failed.
int made(int fd, const char* what) {
  if (fd >= 0) return fd;
  throw LaunchError(ExitCode::kInternal, text("cannot make ", what, ": ", std::strerror(errno)));
}

}  // namespace

bool is_ready(int fd, short events) {
  pollfd look{.fd = fd, .events = events, .revents = 0};
  return ::poll(&look, 1, 0) > 0;
}

void Alarm::set(const std::optional<Deadline>& at) {
  // A cancelled wait is an event of the loop. If each event set a later time, the loop would never
  // be idle, so an earlier time is kept.
  if (at == at_ || (at && at_ && *at_ <= *at)) return;
  at_ = at;
  timer_.cancel();
  if (!at) return;
  timer_.expires_at(*at);
  timer_.async_wait([this](const asio::error_code& error) {
    if (!error) at_.reset();
  });
}

sigset_t block_unignored(std::span<const int> signals) {
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t blocked;
  ::sigemptyset(&blocked);
  for (const int signal : signals) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (signal == SIGCHLD || action.sa_handler != SIG_IGN) ::sigaddset(&blocked, signal);
  }
  ::sigprocmask(SIG_BLOCK, &blocked, nullptr);
  return blocked;
}

SignalReader::SignalReader(asio::io_context& io, const sigset_t& signals,
                           std::function<void(int)> handler)
    : descriptor_(io, made(::signalfd(-1, &signals, SFD_CLOEXEC), "a descriptor for signals")),
      handler_(std::move(handler)) {
  read();
}

void SignalReader::read() {
  descriptor_.async_read_some(asio::buffer(&info_, sizeof info_),
                              [this](const asio::error_code& error, std::size_t) {
                                if (error) return;
                                handler_(static_cast<int>(info_.ssi_signo));
                                read();
                              });
}

PipeReader::PipeReader(asio::io_context& io, UniqueFd pipe, Handler handler)
    : pipe_(io, pipe.release()), handler_(std::move(handler)) {
  read();
}

void PipeReader::read() {
  pipe_.async_read_some(asio::buffer(buffer_),
                        [this](const asio::error_code& error, std::size_t size) {
                          if (error == asio::error::operation_aborted) return;
                          if (error) {
                            pipe_.close();
                            return handler_({});
                          }
                          handler_({buffer_.data(), size});
                          if (pipe_.is_open()) read();
                        });
}

SharedDescriptor::SharedDescriptor(asio::io_context& io, int fd, std::uint32_t events)
    : io_(io), epoll_(io, made(::epoll_create1(EPOLL_CLOEXEC), "an epoll descriptor")) {
  epoll_event event{};
  event.events = events;
  always_ready_ = ::epoll_ctl(epoll_.native_handle(), EPOLL_CTL_ADD, fd, &event) != 0;
}

void SharedDescriptor::wait(std::function<void()> handler) {
  if (always_ready_) return asio::post(io_, std::move(handler));
  handler_ = std::move(handler);
  wait_in_loop();
}

void SharedDescriptor::wait_in_loop() {
  epoll_.async_wait(asio::posix::descriptor_base::wait_read, [this](const asio::error_code& error) {
    if (error) return;
    if (!is_ready(epoll_.native_handle(), POLLIN)) return wait_in_loop();
    std::exchange(handler_, nullptr)();
  });
}

}  // namespace hvd::launcher
