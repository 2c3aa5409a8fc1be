#include "agent/member_socket.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {

using asio::posix::descriptor_base;

std::shared_ptr<MemberSocket> MemberSocket::make(asio::io_context& io, Receive receive,
                                                 MayRead may_read, UniqueFd& worker_end) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw LaunchError(ExitCode::kInternal,
                      text("cannot make a socket pair for a worker: ", std::strerror(errno)));
  }
  UniqueFd own(ends[0]);
  worker_end = UniqueFd(ends[1]);
  std::shared_ptr<MemberSocket> socket(
      new MemberSocket(io, std::move(own), std::move(receive), std::move(may_read)));
  socket->wait_to_read();
  return socket;
}

MemberSocket::MemberSocket(asio::io_context& io, UniqueFd end, Receive receive, MayRead may_read)
    : socket_(io), receive_(std::move(receive)), may_read_(std::move(may_read)) {
  socket_.assign(end.get());
  end.release();
}

void MemberSocket::wait_to_read() {
  socket_.async_wait(descriptor_base::wait_read,
                     [this, self = shared_from_this()](const asio::error_code& error) {
                       if (error || !socket_.is_open()) return;
                       parked_ = !may_read_();
                       if (parked_) return;
                       read_all();
                       if (!ended_) wait_to_read();
                     });
}

void MemberSocket::read_all() {
  static std::array<char, 64 * 1024> buffer;
  while (socket_.is_open() && !ended_) {
    const ssize_t count =
        ::recv(socket_.native_handle(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    // The end of the stream is not the end of the worker.
    ended_ = count <= 0;
    if (!ended_) receive_({buffer.data(), static_cast<std::size_t>(count)});
  }
}

void MemberSocket::resume() {
  if (!parked_ || !may_read_()) return;
  parked_ = false;
  if (socket_.is_open() && !ended_) wait_to_read();
}

void MemberSocket::send(std::string_view bytes) {
  if (!socket_.is_open()) return;
  outgoing_ += bytes;
  write();
}

void MemberSocket::write() {
  if (writing_) return;
  while (!outgoing_.empty()) {
    const ssize_t count = ::send(socket_.native_handle(), outgoing_.data(), outgoing_.size(),
                                 MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return wait_to_write();
    if (count < 0) return outgoing_.clear();  // the worker has closed its end
    outgoing_.erase(0, static_cast<std::size_t>(count));
  }
}

void MemberSocket::wait_to_write() {
  writing_ = true;
  socket_.async_wait(descriptor_base::wait_write,
                     [this, self = shared_from_this()](const asio::error_code& error) {
                       writing_ = false;
                       if (!error && socket_.is_open()) write();
                     });
}

void MemberSocket::close() {
  asio::error_code ignored;
  socket_.close(ignored);
}

}  // namespace hvd::launcher
