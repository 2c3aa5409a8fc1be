#pragma once

#include <sys/signalfd.h>

#include <array>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/steady_timer.hpp>
#include <csignal>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "base/clock.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

// Every process of the launcher runs one asio::io_context in one thread. The classes below are not
// thread-safe. They must not outlive their io_context, and must not be destroyed while it runs.

/// Keeps the earlier of two times, of which either may be missing.
inline void keep_earlier(std::optional<Deadline>& time, const std::optional<Deadline>& other) {
  if (other && (!time || *other < *time)) time = other;
}

/// Whether the descriptor has one of these events of poll(2), an error or a hang-up now. A handler
/// calls this after a wait of Asio, unless it reads without blocking. The wait may have ended
/// because of another descriptor's event. If that descriptor was closed before its handler ran, a
/// new descriptor may have taken its place in Asio's reactor and received the event.
bool is_ready(int fd, short events);

/// Makes asio::io_context::run_one() return at a given time, so that its caller can handle what is
/// due. It may return earlier, at a time that was set before.
class Alarm {
 public:
  explicit Alarm(asio::io_context& io) : timer_(io) {}
  void set(const std::optional<Deadline>& at);

 private:
  asio::steady_timer timer_;
  std::optional<Deadline> at_;
};

/// Blocks these signals, and ignores SIGPIPE. A signal that is ignored, as by nohup and a shell's
/// '&', stays so, except for SIGCHLD. Returns those that were blocked.
sigset_t block_unignored(std::span<const int> signals);

/// Receives signals that are blocked in all threads. They stay blocked, because a handler could
/// otherwise run in a child between fork() and exec().
class SignalReader {
 public:
  /// @throws LaunchError (kInternal) when no descriptor is left.
  SignalReader(asio::io_context& io, const sigset_t& signals, std::function<void(int)> handler);

 private:
  void read();

  asio::posix::stream_descriptor descriptor_;
  signalfd_siginfo info_{};
  std::function<void(int)> handler_;
};

/// Reads a pipe to its end.
class PipeReader {
 public:
  /// An empty view marks the end.
  using Handler = std::function<void(std::string_view)>;

  PipeReader(asio::io_context& io, UniqueFd pipe, Handler handler);
  bool is_open() const { return pipe_.is_open(); }
  void close() { pipe_.close(); }

 private:
  void read();

  asio::posix::stream_descriptor pipe_;
  std::array<char, 8192> buffer_;
  Handler handler_;
};

/// Waits until a descriptor can be read or written without blocking. Asio would make the descriptor
/// non-blocking for that, also for the other processes that share it, as they share a terminal.
/// Files and devices for which epoll(7) does not work count as ready.
class SharedDescriptor {
 public:
  /// @param events EPOLLIN or EPOLLOUT
  /// @throws LaunchError (kInternal) when no descriptor is left.
  SharedDescriptor(asio::io_context& io, int fd, std::uint32_t events);
  /// Calls the handler once, from the loop. One call at a time.
  void wait(std::function<void()> handler);
  void cancel() { epoll_.cancel(); }

 private:
  void wait_in_loop();

  asio::io_context& io_;
  std::function<void()> handler_;
  asio::posix::stream_descriptor epoll_;
  bool always_ready_ = false;
};

}  // namespace hvd::launcher
