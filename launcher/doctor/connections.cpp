#include "doctor/connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "doctor/collect.h"

namespace hvd::launcher::doctor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTimeout{1000};
constexpr std::size_t kMaxGreetingBytes = 100;

/// The numeric text of an IPv4 or IPv6 address; an IPv4 address inside an IPv6 one as IPv4.
std::string numeric(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> buffer{};
  const void* bytes = nullptr;
  if (address.ss_family == AF_INET) {
    bytes = &reinterpret_cast<const sockaddr_in&>(address).sin_addr;
  } else if (address.ss_family == AF_INET6) {
    bytes = &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  }
  if (bytes == nullptr ||
      ::inet_ntop(address.ss_family, bytes, buffer.data(), buffer.size()) == nullptr)
    return "";
  const std::string printed = buffer.data();
  return printed.starts_with("::ffff:") ? printed.substr(7) : printed;
}

template <class Function>
std::string address_of(int fd, Function function) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  return function(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? numeric(address) : "";
}

/// Starts to connect. The socket is non-blocking.
UniqueFd start_connecting(const std::string& address, std::uint16_t port) {
  sockaddr_storage target{};
  socklen_t length = 0;
  auto& four = reinterpret_cast<sockaddr_in&>(target);
  auto& six = reinterpret_cast<sockaddr_in6&>(target);
  if (::inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    length = sizeof four;
  } else if (::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    length = sizeof six;
  }
  UniqueFd fd(::socket(target.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&target), length) != 0 &&
      errno != EINPROGRESS) {
    const int error = errno;
    fd.reset();
    errno = error;
  }
  return fd;
}

/// The result once the socket is readable or has failed; empty: no greeting yet.
std::optional<std::string> problem_of(int fd, const std::string& greeting) {
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return std::strerror(error);
  std::array<char, kMaxGreetingBytes> buffer{};
  const ssize_t count = ::recv(fd, buffer.data(), buffer.size(), 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (count < 0) return std::strerror(errno);
  const std::string_view received(buffer.data(), static_cast<std::size_t>(count));
  return received == greeting ? "" : "another program or host has answered";
}

}  // namespace

std::vector<Connection> remote_connections() {
  std::set<std::tuple<std::string, std::string>> pairs;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const auto fd = parse_number<int>(entry.path().filename().native());
    if (!fd) continue;
    const std::string own = address_of(*fd, ::getsockname), peer = address_of(*fd, ::getpeername);
    if (own.empty() || peer.empty() || own == peer || own.starts_with("127.")) continue;
    pairs.emplace(own, peer);
  }
  const std::vector<Interface> interfaces = network_interfaces();
  std::vector<Connection> connections;
  for (const auto& [own, peer] : pairs) {
    const auto interface =
        std::find_if(interfaces.begin(), interfaces.end(), [&address = own](const Interface& i) {
          return std::find(i.addresses.begin(), i.addresses.end(), address) != i.addresses.end();
        });
    connections.push_back({.interface = interface == interfaces.end() ? "" : interface->name,
                           .address = own,
                           .peer = peer});
  }
  return connections;
}

Greeter::Greeter(std::string greeting) : greeting_(std::move(greeting)) {
  // Without IPv6 the system refuses the first kind.
  for (const int family : {AF_INET6, AF_INET}) {
    socket_ = UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket_) continue;
    const int off = 0;
    ::setsockopt(socket_.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    sockaddr_storage any{};
    any.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    auto* const address = reinterpret_cast<sockaddr*>(&any);
    if (::bind(socket_.get(), address, length) == 0 && ::listen(socket_.get(), SOMAXCONN) == 0 &&
        ::getsockname(socket_.get(), address, &length) == 0) {
      port_ = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(any).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(any).sin_port);
      thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
      return;
    }
  }
  problem_ = text("this host cannot listen on a TCP port: ", std::strerror(errno));
}

void Greeter::serve(const std::stop_token& stop) const {
  constexpr int kPollInterval_ms = 20;
  while (!stop.stop_requested()) {
    pollfd listening{socket_.get(), POLLIN, 0};
    if (::poll(&listening, 1, kPollInterval_ms) <= 0) continue;
    const UniqueFd visitor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (visitor) ::send(visitor.get(), greeting_.data(), greeting_.size(), MSG_NOSIGNAL);
  }
}

std::vector<Reach> try_addresses(const GreeterAddress& greeter) {
  std::vector<Reach> results;
  std::vector<UniqueFd> sockets;
  for (const Interface& interface : greeter.interfaces) {
    for (const std::string& address : interface.addresses) {
      sockets.push_back(start_connecting(address, greeter.port));
      results.push_back(
          {.rank = greeter.rank,
           .interface = interface.name,
           .address = address,
           .reached = false,
           .problem = sockets.back() ? "no answer within a second" : std::strerror(errno)});
    }
  }
  const auto deadline = Clock::now() + kTimeout;
  while (true) {
    std::vector<pollfd> polls;
    for (const UniqueFd& socket : sockets) polls.push_back({socket.get(), POLLIN, 0});
    const bool open =
        std::any_of(sockets.begin(), sockets.end(), [](const UniqueFd& fd) { return bool(fd); });
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (!open || left <= 0) return results;
    if (::poll(polls.data(), polls.size(), static_cast<int>(left)) <= 0) continue;
    for (std::size_t i = 0; i < sockets.size(); ++i) {
      if (!sockets[i] || polls[i].revents == 0) continue;
      const auto problem = problem_of(sockets[i].get(), greeter.greeting);
      if (!problem) continue;
      results[i].problem = *problem;
      results[i].reached = problem->empty();
      sockets[i].reset();
    }
  }
}

}  // namespace hvd::launcher::doctor
