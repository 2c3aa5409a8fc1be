#include "system/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketAddress make_address(const std::string& numeric, std::uint16_t port) {
  SocketAddress address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (::inet_pton(AF_INET, numeric.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.length = sizeof(sockaddr_in);
  } else if (::inet_pton(AF_INET6, numeric.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.length = sizeof(sockaddr_in6);
  }
  return address;
}

/// A socket bound to a port that the system chooses.
UniqueFd try_bind(const std::string& at) {
  const SocketAddress address = make_address(at, 0);
  UniqueFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {};
  if (address.storage.ss_family == AF_INET6) {
    const int both_families = 0;
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &both_families, sizeof both_families);
  }
  if (::bind(fd.get(), address.get(), address.length) != 0) return {};
  return fd;
}

UniqueFd try_listen(const std::string& at) {
  UniqueFd fd = try_bind(at);
  if (!fd || ::listen(fd.get(), SOMAXCONN) != 0) return {};
  return fd;
}

/// The port that the socket is bound to; 0 if it is not bound.
std::uint16_t port_of(int fd) {
  SocketAddress bound;
  bound.length = sizeof bound.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) return 0;
  return ntohs(bound.storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&bound.storage)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&bound.storage)->sin_port);
}

std::string as_text(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> buffer{};
  if (address->sa_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, buffer.data(),
                buffer.size());
  } else if (address->sa_family == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (!IN6_IS_ADDR_LINKLOCAL(&v6)) ::inet_ntop(AF_INET6, &v6, buffer.data(), buffer.size());
  }
  return buffer.data();
}

bool connected(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

}  // namespace

Listener listen_anywhere(bool loopback_only) {
  Listener listener;
  if (loopback_only) {
    listener.fd = try_listen("127.0.0.1");
  } else {
    listener.fd = try_listen("::");
    if (!listener.fd) listener.fd = try_listen("0.0.0.0");
  }
  if (listener.fd) listener.port = port_of(listener.fd.get());
  if (listener.port == 0) {
    throw LaunchError(ExitCode::kInternal,
                      text("cannot listen on a TCP port: ", std::strerror(errno)));
  }
  return listener;
}

Listener reserve_port() {
  Listener reserved;
  reserved.fd = try_bind("::");
  if (!reserved.fd) reserved.fd = try_bind("0.0.0.0");
  if (!reserved.fd) return reserved;
  // Sets the option after bind(). Otherwise the system might choose a port that another process has
  // reserved in this way.
  const int shared = 1;
  ::setsockopt(reserved.fd.get(), SOL_SOCKET, SO_REUSEADDR, &shared, sizeof shared);
  reserved.port = port_of(reserved.fd.get());
  return reserved;
}

std::string peer_address(int fd) {
  constexpr std::string_view kMapped = "::ffff:";  // an IPv4 peer of a socket for both families
  SocketAddress peer;
  peer.length = sizeof peer.storage;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer.storage), &peer.length) != 0) return {};
  std::string address = as_text(reinterpret_cast<const sockaddr*>(&peer.storage));
  const bool mapped = address.starts_with(kMapped) && address.find('.') != std::string::npos;
  return mapped ? address.substr(kMapped.size()) : address;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

std::vector<std::string> reachable_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_UP) == 0 ||
        (item->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    std::string address = as_text(item->ifa_addr);
    if (!address.empty()) addresses.push_back(std::move(address));
  }
  ::freeifaddrs(list);
  return addresses;
}

std::vector<UniqueFd> connect_any(const std::vector<std::string>& addresses, std::uint16_t port,
                                  int timeout_ms) {
  std::vector<UniqueFd> open;
  std::vector<UniqueFd> waiting;
  for (const std::string& numeric : addresses) {
    const SocketAddress address = make_address(numeric, port);
    if (address.length == 0) continue;
    UniqueFd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) continue;
    if (::connect(fd.get(), address.get(), address.length) == 0) {
      open.push_back(std::move(fd));
    } else if (errno == EINPROGRESS) {
      waiting.push_back(std::move(fd));
    }
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  while (open.empty() && !waiting.empty()) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())
            .count();
    if (left <= 0) break;
    std::vector<pollfd> polls;
    for (const UniqueFd& fd : waiting) polls.push_back({fd.get(), POLLOUT, 0});
    if (::poll(polls.data(), polls.size(), static_cast<int>(left)) < 0 && errno != EINTR) break;
    std::vector<UniqueFd> still_waiting;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      if (polls[i].revents == 0) {
        still_waiting.push_back(std::move(waiting[i]));
      } else if (connected(waiting[i].get())) {
        open.push_back(std::move(waiting[i]));
      }
    }
    waiting = std::move(still_waiting);
  }
  for (const UniqueFd& fd : open)
    ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
  return open;
}

void tune_connection(int fd, int silence_limit_ms) {
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  // Keep-alive applies only while no data is unacknowledged; the user timeout applies to both.
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, silence_limit_ms / 3000));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, silence_limit_ms / 6000));
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, silence_limit_ms);
}

std::ptrdiff_t send_some(int fd, std::string_view bytes) {
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count <= 0) return -1;
    sent += static_cast<std::size_t>(count);
  }
  return static_cast<std::ptrdiff_t>(sent);
}

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw LaunchError(ExitCode::kInternal, text("cannot get random bytes: ", std::strerror(errno)));
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string token;
  for (const unsigned char byte : bytes) {
    token += kDigits[byte >> 4];
    token += kDigits[byte & 15];
  }
  return token;
}

}  // namespace hvd::launcher
