#include "report_server.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

#include "process.h"
#include "socket.h"

namespace hvd::launcher {

ReportServer::ReportServer(int size, std::string token, Welcome welcome, bool loopback_only,
                           RankObserver& observer)
    : size_(size),
      token_(std::move(token)),
      welcome_(welcome),
      observer_(observer),
      id_of_rank_(static_cast<std::size_t>(size), -1) {
  Listener listener = listen_anywhere(loopback_only);
  listener_ = std::move(listener.fd);
  port_ = listener.port;
}

void ReportServer::add_to(Poller& poller, bool read_output) {
  poller.add(listener_.get(), POLLIN, [this](short) { accept_all(); });
  for (const auto& [id, connection] : connections_) {
    const int events = (read_output ? POLLIN : 0) | (connection.outgoing.empty() ? 0 : POLLOUT);
    if (events == 0) continue;  // poll would report a hang-up again and again
    poller.add(connection.fd.get(), static_cast<short>(events),
               [this, id = id](short revents) { on_event(id, revents); });
  }
}

void ReportServer::accept_all() {
  while (true) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    tune_connection(fd.get());
    connections_[next_id_++].fd = std::move(fd);
  }
}

void ReportServer::on_event(int id, short revents) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if ((revents & POLLOUT) != 0) flush(found->second);
  if ((revents & (POLLIN | POLLHUP | POLLERR)) != 0) read(id);
}

void ReportServer::read(int id) {
  static std::array<char, 256 * 1024> buffer;
  const ssize_t count = ::recv(connections_.at(id).fd.get(), buffer.data(), buffer.size(), 0);
  if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (count <= 0) return drop(id);
  try {
    connections_.at(id).decoder.feed({buffer.data(), static_cast<std::size_t>(count)});
    while (true) {
      // Looked up each time: what the observer does may have dropped it.
      const auto found = connections_.find(id);
      if (found == connections_.end()) return;
      const auto frame = found->second.decoder.next();
      if (!frame) return;
      if (!handle(id, *frame)) return drop(id);
    }
  } catch (const ProtocolError&) {
    drop(id);
  }
}

bool ReportServer::handle(int id, const Frame& frame) {
  Connection& connection = connections_.at(id);
  if (!connection.rank) return admit(id, frame);
  const int rank = *connection.rank;
  switch (frame.type) {
    case FrameType::kStarted:
      observer_.on_started(rank, decode_started(frame.payload));
      return true;
    case FrameType::kNotice:
      observer_.on_notice(rank, decode_notice(frame.payload));
      return true;
    case FrameType::kStdout:
      observer_.on_output(rank, Stream::kStdout, frame.payload);
      return true;
    case FrameType::kStderr:
      observer_.on_output(rank, Stream::kStderr, frame.payload);
      return true;
    case FrameType::kEnded: {
      const Ended ended = decode_ended(frame.payload);
      if (connection.ended) return false;
      connection.ended = true;
      observer_.on_ended(rank, ended);
      return true;
    }
    case FrameType::kHello:
    case FrameType::kWelcome:
    case FrameType::kSignal:
    case FrameType::kRelease:
      break;
  }
  return false;
}

bool ReportServer::admit(int id, const Frame& frame) {
  if (frame.type != FrameType::kHello) return false;
  const Hello hello = decode_hello(frame.payload);
  if (hello.token != token_ || hello.rank < 0 || hello.rank >= size_) return false;
  int& known = id_of_rank_[static_cast<std::size_t>(hello.rank)];
  if (known >= 0) return false;
  known = id;
  Connection& connection = connections_.at(id);
  connection.rank = hello.rank;
  write(connection, FrameType::kWelcome, encode(welcome_));
  observer_.on_hello(hello.rank, hello);
  return true;
}

void ReportServer::send(int rank, const SignalOrder& order) {
  if (Connection* connection = find_rank(rank))
    write(*connection, FrameType::kSignal, encode(order));
}

void ReportServer::release(int rank) {
  if (Connection* connection = find_rank(rank)) write(*connection, FrameType::kRelease, "{}");
}

void ReportServer::close_all() { connections_.clear(); }

void ReportServer::write(Connection& connection, FrameType type, std::string_view payload) {
  append_frame(connection.outgoing, type, payload);
  flush(connection);
}

void ReportServer::flush(Connection& connection) {
  while (!connection.outgoing.empty()) {
    const ssize_t count = ::send(connection.fd.get(), connection.outgoing.data(),
                                 connection.outgoing.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) {
      connection.outgoing.clear();  // reading will see that the peer has gone
      return;
    }
    connection.outgoing.erase(0, static_cast<std::size_t>(count));
  }
}

void ReportServer::drop(int id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const std::optional<int> rank = found->second.rank;
  const bool ended = found->second.ended;
  connections_.erase(found);
  if (rank && !ended) observer_.on_lost(*rank);
}

ReportServer::Connection* ReportServer::find_rank(int rank) {
  const auto found = connections_.find(id_of_rank_[static_cast<std::size_t>(rank)]);
  return found == connections_.end() ? nullptr : &found->second;
}

}  // namespace hvd::launcher
