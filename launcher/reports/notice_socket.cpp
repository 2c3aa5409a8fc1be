#include "reports/notice_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sstream>

namespace hvd::launcher {

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
