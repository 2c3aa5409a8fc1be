#include "reports/program_sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <asio/buffer.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

#include "base/text.h"
#include "system/error.h"
#include "system/event_loop.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

/// Limit of the connections of other users, so that these cannot keep the rank out.
constexpr std::ptrdiff_t kMaxOtherUsers = 8;
/// Limit of the reads of one connection in a row, so that a process that sends without a pause does
/// not delay the others. Together they read more than a socket's buffer holds.
constexpr int kMaxReads = 16;
/// The pause after a failed accept(), when no descriptor is left.
constexpr std::chrono::milliseconds kAcceptPause{100};

/// A pidfd of a running process; empty if the kernel has no pidfds, or the process has ended.
UniqueFd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid > 0) return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U)));
#endif
  return {};
}

/// Binds the socket to a free name in the abstract namespace. Returns the name; empty on failure.
std::string bind_to_free_name(int fd) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof address;
  constexpr std::size_t kName = offsetof(sockaddr_un, sun_path) + 1;
  // For an address without a name the kernel chooses a free one: see unix(7), "Autobind".
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address.sun_family) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0 || length <= kName)
    return {};
  return {address.sun_path + 1, length - kName};
}

bool is_other_user(const ucred& peer) { return peer.uid != ::geteuid() && peer.uid != ::getuid(); }

}  // namespace

RendezvousSocket::Client::Client(Socket connected, UniqueFd process)
    : socket(std::move(connected)), pidfd(socket.get_executor()) {
  asio::error_code ignored;
  socket.non_blocking(true, ignored);
  if (process) pidfd.assign(process.release(), ignored);
}

/// The pending operations hold the client, so it must close its descriptors itself.
void RendezvousSocket::Client::close() {
  asio::error_code ignored;
  socket.close(ignored);
  pidfd.close(ignored);
}

RendezvousSocket::RendezvousSocket(asio::io_context& io, Receive receive, MayRead may_read)
    : listener_(io),
      accept_again_(io),
      receive_(std::move(receive)),
      may_read_(std::move(may_read)) {
  asio::error_code error;
  listener_.open(asio::local::stream_protocol(), error);
  if (!error) close_on_exec(listener_.native_handle());
  if (!error) name_ = bind_to_free_name(listener_.native_handle());
  if (!error) listener_.listen(SOMAXCONN, error);
  if (error || name_.empty())
    throw LaunchError(ExitCode::kInternal,
                      text("cannot make a socket for the rank: ", error.message()));
  accept();
}

void RendezvousSocket::accept() {
  if (!listener_.is_open()) return;
  listener_.async_accept([this](const asio::error_code& error, Socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (!error) {
      close_on_exec(socket.native_handle());
      add(std::move(socket));
      return accept();
    }
    accept_again_.expires_after(kAcceptPause);
    accept_again_.async_wait([this](const asio::error_code& aborted) {
      if (!aborted) accept();
    });
  });
}

void RendezvousSocket::add(Socket socket) {
  // If a process has closed its connection and opened another, the end of the first connection must
  // be received before the second one begins.
  read_all();
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return;
  const auto other_users = std::count_if(clients_.begin(), clients_.end(),
                                         [](const auto& item) { return item.second->other_user; });
  const bool other_user = is_other_user(peer);
  if (other_user && other_users >= kMaxOtherUsers) return;
  // A child of the process may keep open a connection that the process has closed.
  std::vector<std::uint32_t> closed;
  for (const auto& [id, client] : clients_)
    if (peer.pid > 0 && client->pid == peer.pid) closed.push_back(id);
  for (const std::uint32_t id : closed) end(id);
  const std::uint32_t id = next_id_++;
  const auto client = std::make_shared<Client>(std::move(socket), open_pidfd(peer.pid));
  client->pid = peer.pid;
  client->other_user = other_user;
  clients_[id] = client;
  wait(id);
  if (client->pidfd.is_open()) wait_for_end_of_process(id, client);
}

void RendezvousSocket::wait_for_end_of_process(std::uint32_t id,
                                               const std::shared_ptr<Client>& client) {
  client->pidfd.async_wait(asio::posix::descriptor_base::wait_read,
                           [this, id, client](const asio::error_code& error) {
                             if (error || !client->pidfd.is_open()) return;
                             if (!is_ready(client->pidfd.native_handle(), POLLIN))
                               return wait_for_end_of_process(id, client);
                             read(id);
                             end(id);
                           });
}

void RendezvousSocket::wait(std::uint32_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  const auto client = found->second;
  if (client->parked = !may_read_(); client->parked) return;
  client->socket.async_wait(Socket::wait_read, [this, id, client](const asio::error_code& error) {
    if (error) return;
    read(id);
    wait(id);
  });
}

void RendezvousSocket::resume() {
  if (!may_read_()) return;
  for (const auto& [id, client] : clients_)
    if (client->parked) wait(id);
}

void RendezvousSocket::read_all() {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, client] : clients_) ids.push_back(id);
  for (const std::uint32_t id : ids) read(id);
}

void RendezvousSocket::read(std::uint32_t id) {
  static std::array<char, 64 * 1024> buffer;
  for (int reads = 0; reads < kMaxReads; ++reads) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    asio::error_code error;
    const std::size_t size = found->second->socket.read_some(asio::buffer(buffer), error);
    if (error == asio::error::would_block) return;
    if (error) return end(id);
    receive_({.session = id, .bytes = {buffer.data(), size}});
  }
}

void RendezvousSocket::end(std::uint32_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  found->second->close();
  clients_.erase(found);
  receive_({.session = id, .last = true});
}

void RendezvousSocket::close() {
  asio::error_code ignored;
  listener_.close(ignored);
  for (const auto& [id, client] : clients_) client->close();
  clients_.clear();
}

void RendezvousSocket::reply(const RendezvousBytes& reply) {
  const auto found = clients_.find(reply.session);
  if (found == clients_.end()) return;
  found->second->outgoing += reply.bytes;
  found->second->closing = reply.last;
  flush(reply.session);
}

void RendezvousSocket::flush(std::uint32_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  const auto client = found->second;
  if (!client->writing.empty()) return;
  if (client->outgoing.empty()) return client->closing ? end(id) : void();
  client->writing = std::exchange(client->outgoing, {});
  asio::async_write(client->socket, asio::buffer(client->writing),
                    [this, id, client](const asio::error_code& error, std::size_t) {
                      client->writing.clear();
                      if (error == asio::error::operation_aborted) return;
                      error ? end(id) : flush(id);
                    });
}

NoticeSocket::NoticeSocket(asio::io_context& io, std::function<void()> on_notices)
    : socket_(io), on_notices_(std::move(on_notices)) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) return;
  name_ = bind_to_free_name(fd.get());
  if (name_.empty()) return;
  socket_.assign(fd.release());
  wait();
}

void NoticeSocket::wait() {
  socket_.async_wait(asio::posix::descriptor_base::wait_read,
                     [this](const asio::error_code& error) {
                       if (error) return;
                       on_notices_();
                       wait();
                     });
}

std::optional<Notice> NoticeSocket::next() {
  while (socket_.is_open()) {
    std::array<char, 4096> bytes{};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred))> control{};
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t count = ::recvmsg(socket_.native_handle(), &message, MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::nullopt;
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    ucred sender{};
    if (header == nullptr || header->cmsg_type != SCM_CREDENTIALS) continue;
    std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
    if (is_other_user(sender)) continue;
    if (auto notice = parse_notice({bytes.data(), static_cast<std::size_t>(count)})) return notice;
  }
  return std::nullopt;
}

std::optional<Notice> parse_notice(std::string_view datagram) {
  const std::size_t end = datagram.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  std::istringstream head{std::string(datagram.substr(0, end))};
  Notice notice;
  if (!(head >> notice.kind >> notice.time_ns >> notice.code >> notice.about)) return std::nullopt;
  notice.text = datagram.substr(end + 1);
  return notice;
}

}  // namespace hvd::launcher
