#include "reports/program_sockets.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sstream>

#include "base/text.h"
#include "system/error.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

/// The most connections of other users, so that these cannot keep the rank out.
constexpr std::ptrdiff_t kMostOtherUsers = 8;
/// The most reads of one connection in a row, so that a process that sends without a pause does not
/// delay the others. Together they read more than a socket's buffer holds.
constexpr int kMostReads = 16;

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

RendezvousSocket::RendezvousSocket()
    : listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (listener_) name_ = bind_to_free_name(listener_.get());
  if (name_.empty() || ::listen(listener_.get(), SOMAXCONN) != 0)
    throw LaunchError(ExitCode::kInternal,
                      text("cannot make a socket for the rank: ", std::strerror(errno)));
}

void RendezvousSocket::add_to(Poller& poller) {
  poller.add(listener_.get(), POLLIN, [this](short) { accept_all(); });
  for (const auto& [id, client] : clients_) {
    const auto events = static_cast<short>(client.outgoing.empty() ? POLLIN : POLLIN | POLLOUT);
    poller.add(client.fd.get(), events, [this, id = id](short revents) {
      if ((revents & POLLOUT) != 0) flush(id);
      if ((revents & (POLLIN | POLLHUP | POLLERR)) != 0) read(id);
    });
    if (!client.process) continue;
    poller.add(client.process.get(), POLLIN, [this, id = id](short) {
      read(id);
      end(id);
    });
  }
}

void RendezvousSocket::accept_all() {
  while (UniqueFd fd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)}) {
    // If a process has closed its connection and opened another, the end of the first connection
    // must be received before the second one begins.
    read_all();
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) continue;
    const auto other_users = std::count_if(clients_.begin(), clients_.end(),
                                           [](const auto& item) { return item.second.other_user; });
    const bool other_user = is_other_user(peer);
    if (other_user && other_users >= kMostOtherUsers) continue;
    // A child of the process may keep open a connection that the process has closed.
    std::vector<std::uint32_t> closed;
    for (const auto& [id, client] : clients_)
      if (peer.pid > 0 && client.pid == peer.pid) closed.push_back(id);
    for (const std::uint32_t id : closed) end(id);
    Client& client = clients_[next_id_++];
    client.fd = std::move(fd);
    client.process = open_pidfd(peer.pid);
    client.pid = peer.pid;
    client.other_user = other_user;
  }
}

void RendezvousSocket::read_all() {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, client] : clients_) ids.push_back(id);
  for (const std::uint32_t id : ids) read(id);
}

void RendezvousSocket::read(std::uint32_t id) {
  static std::array<char, 64 * 1024> buffer;
  for (int reads = 0; reads < kMostReads; ++reads) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    const ssize_t count = ::recv(found->second.fd.get(), buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) return end(id);
    received_.push_back({.session = id, .bytes = {buffer.data(), static_cast<std::size_t>(count)}});
  }
}

void RendezvousSocket::end(std::uint32_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  if (!found->second.closing) received_.push_back({.session = id, .last = true});
  clients_.erase(found);
}

std::vector<RendezvousSocket::Received> RendezvousSocket::pop_received() {
  return std::exchange(received_, {});
}

void RendezvousSocket::reply(const RendezvousBytes& reply) {
  const auto found = clients_.find(reply.session);
  if (found == clients_.end()) return;
  found->second.outgoing += reply.bytes;
  found->second.closing = reply.last;
  flush(reply.session);
}

void RendezvousSocket::flush(std::uint32_t id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  Client& client = found->second;
  const auto sent = send_some(client.fd.get(), client.outgoing);
  if (sent < 0) return end(id);
  client.outgoing.erase(0, static_cast<std::size_t>(sent));
  if (client.closing && client.outgoing.empty()) clients_.erase(found);
}

NoticeSocket::NoticeSocket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!fd || ::setsockopt(fd.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) return;
  name_ = bind_to_free_name(fd.get());
  if (!name_.empty()) fd_ = std::move(fd);
}

std::optional<Notice> NoticeSocket::next() {
  while (fd_) {
    std::array<char, 4096> bytes{};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred))> control{};
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t count = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
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
