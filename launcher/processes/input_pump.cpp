#include "processes/input_pump.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <asio/buffer.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <chrono>
#include <utility>

namespace hvd::launcher {
namespace {

constexpr std::chrono::milliseconds kPauseInBackground{200};

bool may_read(int fd) { return ::isatty(fd) != 1 || ::tcgetpgrp(fd) == ::getpgrp(); }

}  // namespace

InputPump::InputPump(asio::io_context& io, int source, UniqueFd target, std::string head)
    : source_(source), target_(io, target.release()), background_(io), pending_(std::move(head)) {
  if (source_ >= 0) readable_ = std::make_unique<SharedDescriptor>(io, source_, EPOLLIN);
  watch_reader();
  write();
}

/// Ends when the reader has closed the pipe, also while there is no input.
void InputPump::watch_reader() {
  target_.async_wait(asio::posix::descriptor_base::wait_error,
                     [this](const asio::error_code& error) {
                       if (error || done()) return;
                       is_ready(target_.native_handle(), 0) ? end() : watch_reader();
                     });
}

/// Writes what is pending, then continues with the source.
void InputPump::write() {
  asio::async_write(target_, asio::buffer(pending_),
                    [this](const asio::error_code& error, std::size_t) {
                      if (error == asio::error::operation_aborted) return;
                      if (error || !readable_) return end();
                      wait();
                    });
}

void InputPump::wait() {
  readable_->wait([this] {
    if (done()) return;
    if (may_read(source_)) return read();
    background_.expires_after(kPauseInBackground);
    background_.async_wait([this](const asio::error_code& error) {
      if (!error) wait();
    });
  });
}

void InputPump::read() {
  std::array<char, 16 * 1024> buffer;
  const ssize_t count = ::read(source_, buffer.data(), buffer.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return wait();
  if (count <= 0) return end();
  pending_.assign(buffer.data(), static_cast<std::size_t>(count));
  write();
}

void InputPump::end() {
  asio::error_code ignored;
  target_.close(ignored);
  background_.cancel();
  if (readable_) readable_->cancel();
}

}  // namespace hvd::launcher
