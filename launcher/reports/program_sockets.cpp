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

#include "system/error.h"

namespace hvd::launcher {
namespace {

/// More are turned away, so that another user cannot keep the rank out.
constexpr std::ptrdiff_t kMostStrangers = 8;
/// Reads per connection and turn, so that a rank that sends without pause does not delay the
/// others. This is more than a socket's buffer holds.
constexpr int kMostReads = 16;

/// A pidfd of a running process; empty if the kernel has no pidfds, or the process has ended.
UniqueFd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid > 0) return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U)));
#endif
  return {};
}

}  // namespace

MeetingSocket::MeetingSocket()
    : listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof address;
  // Bound to no name, a socket gets a free one in the abstract namespace: see unix(7), "Autobind".
  if (!listener_ ||
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address),
             sizeof address.sun_family) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0 ||
      ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      length <= offsetof(sockaddr_un, sun_path) + 1) {
    throw LaunchError(ExitCode::kInternal,
                      std::string("cannot make a socket for the rank: ") + std::strerror(errno));
  }
  name_.assign(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
}

void MeetingSocket::add_to(Poller& poller) {
  poller.add(listener_.get(), POLLIN, [this](short) { accept_all(); });
  for (const auto& [id, session] : sessions_) {
    const auto events = static_cast<short>(session.out.empty() ? POLLIN : POLLIN | POLLOUT);
    poller.add(session.fd.get(), events, [this, id = id](short revents) {
      if ((revents & POLLOUT) != 0) flush(id);
      if ((revents & (POLLIN | POLLHUP | POLLERR)) != 0) read(id);
    });
    if (!session.process) continue;
    poller.add(session.process.get(), POLLIN, [this, id = id](short) {
      read(id);
      end(id);
    });
  }
}

void MeetingSocket::accept_all() {
  while (UniqueFd fd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)}) {
    // A process that has closed its connection and made another is to be seen doing so in this
    // order, though both are noticed at once.
    read_all();
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) continue;
    const auto strangers = std::count_if(sessions_.begin(), sessions_.end(),
                                         [](const auto& item) { return item.second.strange; });
    const bool strange = peer.uid != ::geteuid() && peer.uid != ::getuid();
    if (strange && strangers >= kMostStrangers) continue;
    // A child of the process may hold the one that it has closed.
    std::vector<std::uint32_t> closed;
    for (const auto& [id, session] : sessions_)
      if (peer.pid > 0 && session.pid == peer.pid) closed.push_back(id);
    for (const std::uint32_t id : closed) end(id);
    Session& session = sessions_[next_id_++];
    session.fd = std::move(fd);
    session.process = open_pidfd(peer.pid);
    session.pid = peer.pid;
    session.strange = strange;
  }
}

void MeetingSocket::read_all() {
  std::vector<std::uint32_t> ids;
  for (const auto& [id, session] : sessions_) ids.push_back(id);
  for (const std::uint32_t id : ids) read(id);
}

void MeetingSocket::read(std::uint32_t id) {
  static std::array<char, 64 * 1024> buffer;
  for (int reads = 0; reads < kMostReads; ++reads) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) return;
    const ssize_t count = ::recv(found->second.fd.get(), buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) return end(id);
    said_.push_back({.session = id, .bytes = {buffer.data(), static_cast<std::size_t>(count)}});
  }
}

void MeetingSocket::end(std::uint32_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  if (!found->second.closing) said_.push_back({.session = id, .last = true});
  sessions_.erase(found);
}

std::vector<MeetingSocket::Said> MeetingSocket::take() { return std::exchange(said_, {}); }

void MeetingSocket::answer(const MeetingBytes& answer) {
  const auto found = sessions_.find(answer.session);
  if (found == sessions_.end()) return;
  found->second.out += answer.bytes;
  found->second.closing = answer.last;
  flush(answer.session);
}

void MeetingSocket::flush(std::uint32_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  std::size_t sent = 0;
  while (sent < session.out.size()) {
    const ssize_t count = ::send(session.fd.get(), session.out.data() + sent,
                                 session.out.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count <= 0) return end(id);
    sent += static_cast<std::size_t>(count);
  }
  session.out.erase(0, sent);
  if (session.closing && session.out.empty()) sessions_.erase(found);
}

NoticeSocket::NoticeSocket() {
  UniqueFd made(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof address;
  // Bound to no name, a socket gets a free one in the abstract namespace: see unix(7), "Autobind".
  if (!made || ::setsockopt(made.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0 ||
      ::bind(made.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address.sun_family) !=
          0 ||
      ::getsockname(made.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      length <= offsetof(sockaddr_un, sun_path) + 1) {
    return;
  }
  name_.assign(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  fd_ = std::move(made);
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
    if (sender.uid != ::getuid() && sender.uid != ::geteuid()) continue;
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
