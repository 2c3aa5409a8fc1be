#include "bootstrap/connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "base/text.h"
#include "base/thread.h"

namespace hvd::rendezvous {
namespace {

using Failure = Connection::Failure;

/// Pause before the next attempt if the queue of a listening socket is full.
constexpr auto kPauseBetweenConnects = std::chrono::milliseconds(5);
/// Delay between the attempts for two addresses.
constexpr auto kHeadStart = std::chrono::milliseconds(250);

[[noreturn]] void fail(int error) { throw Failure{.reason = std::strerror(error)}; }

/// Milliseconds for poll(), rounded up; 0 once the deadline has passed.
int left_until(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, INT_MAX));
}

int make_socket(int family) {
  const int made = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) fail(errno);
  return made;
}

socklen_t length_of(const sockaddr_storage& address) {
  return address.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

template <class Address>
sockaddr_storage stored(const Address& address) {
  sockaddr_storage storage{};
  std::memcpy(&storage, &address, sizeof address);
  return storage;
}

Resolved loopback(std::uint16_t port) {
  sockaddr_in version4{};
  version4.sin_family = AF_INET;
  version4.sin_port = htons(port);
  version4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  sockaddr_in6 version6{};
  version6.sin6_family = AF_INET6;
  version6.sin6_port = htons(port);
  version6.sin6_addr = IN6ADDR_LOOPBACK_INIT;
  return {.addresses = {stored(version4), stored(version6)}, .problem = {}};
}

Resolved look_up(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  Resolved resolved;
  if (error != 0) {
    resolved.problem = text("host name '", host, "' does not resolve: ",
                            error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error));
    return resolved;
  }
  std::vector<sockaddr_storage> of_version[2];
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    auto& same = of_version[each->ai_family == found->ai_family ? 0 : 1];
    std::memcpy(&same.emplace_back(), each->ai_addr, each->ai_addrlen);
  }
  ::freeaddrinfo(found);
  // Alternates between the versions of IP, because often only one of them works.
  for (std::size_t i = 0; i < std::max(of_version[0].size(), of_version[1].size()); ++i)
    for (const auto& addresses : of_version)
      if (i < addresses.size()) resolved.addresses.push_back(addresses[i]);
  return resolved;
}

/// Whether the socket is connected to itself. This can happen if the port is in the range of
/// ephemeral ports and no process listens there.
bool is_connected_to_itself(int descriptor) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof own, peer_length = sizeof peer;
  return ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

/// Returns 0 if a socket whose connect() has ended is connected, else the error.
int state_of(int descriptor) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error == 0 && is_connected_to_itself(descriptor) ? ECONNREFUSED : error;
}

/// Starts to connect. Throws if that fails at once.
///
/// The system assigns a local port, which may be the port that a later job serves. Without
/// SO_REUSEADDR on this socket too, rank 0 of that job could not bind its socket until this
/// connection has ended and has left the state TIME_WAIT.
Connection begin_to_connect(const sockaddr_storage& address) {
  const int descriptor = make_socket(address.ss_family);
  Connection connection(descriptor);
  const int on = 1;
  ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), length_of(address)) != 0 &&
      errno != EINPROGRESS && errno != EINTR)
    fail(errno);
  return connection;
}

}  // namespace

std::future<Resolved> resolve(const std::string& host, std::uint16_t port) {
  const auto answer = std::make_shared<std::promise<Resolved>>();
  auto coming = answer->get_future();
  if (host == "localhost") {
    answer->set_value(loopback(port));
    return coming;
  }
  try {
    start_thread("hvd-resolve", [answer, host, port] {
      answer->set_value(look_up(host, text(port)));
    }).detach();
  } catch (const std::system_error& error) {
    answer->set_value({.addresses = {}, .problem = text("cannot start a thread: ", error.what())});
  }
  return coming;
}

Connection& Connection::operator=(Connection&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

void Connection::close() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

void Connection::shut_down() noexcept {
  if (descriptor_ >= 0) ::shutdown(descriptor_, SHUT_RDWR);
}

Connection Connection::to_abstract_socket(const std::string& name, Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.empty() || name.size() + 1 > sizeof address.sun_path)
    throw Failure{.reason = text("'", name, "' is not a valid name")};
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  for (;;) {
    Connection connection(make_socket(AF_UNIX));
    if (::connect(connection.descriptor_, reinterpret_cast<const sockaddr*>(&address), length) == 0)
      return connection;
    // EAGAIN: the queue of the listening socket is full.
    if (errno != EAGAIN && errno != EINTR) fail(errno);
    if (std::chrono::steady_clock::now() >= deadline) return {};
    std::this_thread::sleep_for(kPauseBetweenConnects);
  }
}

Connection Connection::to_host(const std::string& host, std::uint16_t port, Deadline deadline) {
  auto coming = resolve(host, port);
  if (coming.wait_until(deadline) != std::future_status::ready)
    throw Failure{.reason = text("the look-up of host name '", host, "' takes too long")};
  const Resolved resolved = coming.get();
  if (!resolved.problem.empty()) throw Failure{.reason = resolved.problem, .unresolved = true};
  std::string problem = "it has no address";
  std::vector<Connection> tried;
  auto next = resolved.addresses.begin();
  Deadline next_at = std::chrono::steady_clock::now();
  for (;;) {
    const auto now = std::chrono::steady_clock::now();
    if (next != resolved.addresses.end() && (tried.empty() || now >= next_at)) {
      try {
        tried.push_back(begin_to_connect(*next));
      } catch (const Failure& failure) {
        problem = failure.reason;
      }
      ++next;
      next_at = now + kHeadStart;
      continue;
    }
    if (tried.empty()) throw Failure{.reason = problem};
    if (now >= deadline) fail(ETIMEDOUT);
    std::vector<pollfd> polls;
    for (const Connection& each : tried) polls.push_back({each.descriptor_, POLLOUT, 0});
    const bool more = next != resolved.addresses.end();
    ::poll(polls.data(), polls.size(), left_until(more ? std::min(next_at, deadline) : deadline));
    for (std::size_t i = polls.size(); i-- > 0;) {
      if (polls[i].revents == 0) continue;
      const int error = state_of(polls[i].fd);
      if (error == 0) {
        const int on = 1;
        ::setsockopt(polls[i].fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        return std::move(tried[i]);
      }
      problem = std::strerror(error);
      tried.erase(tried.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

void Connection::send(std::span<const std::byte> body, Deadline deadline) const {
  const auto size = static_cast<std::uint32_t>(body.size());
  send_all(std::as_bytes(std::span(&size, 1)), deadline);
  send_all(body, deadline);
}

Bytes Connection::receive(std::uint32_t limit, Deadline deadline) const {
  std::uint32_t size = 0;
  receive_all(std::as_writable_bytes(std::span(&size, 1)), deadline);
  if (size > limit) throw Failure{.reason = "its reply is too large"};
  Bytes body(size);
  receive_all(body, deadline);
  return body;
}

void Connection::wait_for(short event, Deadline deadline) const {
  for (;;) {
    const int left = left_until(deadline);
    if (left == 0) throw Failure{.reason = "it has not replied in time"};
    pollfd look{.fd = descriptor_, .events = event, .revents = 0};
    const int ready = ::poll(&look, 1, left);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail(errno);
  }
}

void Connection::send_all(std::span<const std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for(POLLOUT, deadline);
    } else if (errno != EINTR) {
      fail(errno);
    }
  }
}

void Connection::receive_all(std::span<std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(descriptor_, bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      throw Failure{.reason = "the connection is closed"};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for(POLLIN, deadline);
    } else if (errno != EINTR) {
      fail(errno);
    }
  }
}

}  // namespace hvd::rendezvous
