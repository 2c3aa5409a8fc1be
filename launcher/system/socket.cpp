#include "system/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <asio/ip/v6_only.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "base/interface.h"
#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

using asio::ip::address;
using asio::ip::tcp;

constexpr const char* kAnyV4 = "0.0.0.0";
constexpr const char* kAnyV6 = "::";
/// The longest pause of a process that was refused together with another one, in microseconds.
constexpr unsigned kMaxPauseUs = 10'000;

/// Binds a socket to a port, at the first of the addresses that works. An IPv6 socket serves IPv4
/// too. @param port 0: one that the system chooses
tcp::acceptor bind_anywhere(asio::io_context& io, const std::vector<std::string>& addresses,
                            asio::error_code& error, std::uint16_t port = 0) {
  tcp::acceptor socket(io);
  for (const std::string& at : addresses) {
    const tcp::endpoint endpoint(asio::ip::make_address(at), port);
    socket = tcp::acceptor(io);
    socket.open(endpoint.protocol(), error);
    if (error) continue;
    close_on_exec(socket.native_handle());
    if (endpoint.address().is_v6()) socket.set_option(asio::ip::v6_only(false), error);
    // Connections of a former server may linger at the port.
    if (port != 0) socket.set_option(tcp::acceptor::reuse_address(true), error);
    socket.bind(endpoint, error);
    if (!error) return socket;
    if (error == asio::error::address_in_use) break;
  }
  return tcp::acceptor(io);
}

std::string as_text(const address& numeric) {
  if (numeric.is_v6() && numeric.to_v6().is_v4_mapped())
    return asio::ip::make_address_v4(asio::ip::v4_mapped, numeric.to_v6()).to_string();
  return numeric.to_string();
}

}  // namespace

tcp::acceptor listen_anywhere(asio::io_context& io, bool loopback_only) {
  asio::error_code error;
  using Addresses = std::vector<std::string>;
  tcp::acceptor listener =
      bind_anywhere(io, loopback_only ? Addresses{"127.0.0.1"} : Addresses{kAnyV6, kAnyV4}, error);
  if (!error) listener.listen(SOMAXCONN, error);
  if (!error) return listener;
  throw LaunchError(ExitCode::kInternal, text("cannot listen on a TCP port: ", error.message()));
}

/// If two processes call listen() at once at a port to which both are bound, the system can refuse
/// both. The process tries again in that case, and stops when bind() finds another one listening.
tcp::acceptor listen_at(asio::io_context& io, std::uint16_t port) {
  std::minstd_rand random{std::random_device{}()};
  for (;;) {
    asio::error_code error;
    tcp::acceptor listener = bind_anywhere(io, {kAnyV6, kAnyV4}, error, port);
    const bool bound = !error;
    if (bound) listener.listen(SOMAXCONN, error);
    if (!error) return listener;
    if (!bound || error != asio::error::address_in_use) {
      const std::string message = text("cannot listen at TCP port ", port, ": ", error.message());
      if (error == asio::error::address_in_use) throw PortTaken(ExitCode::kUnavailable, message);
      throw LaunchError(ExitCode::kInternal, message);
    }
    listener.close(error);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % kMaxPauseUs));
  }
}

tcp::acceptor reserve_port(asio::io_context& io) {
  asio::error_code error;
  tcp::acceptor reserved = bind_anywhere(io, {kAnyV6, kAnyV4}, error);
  // Sets the option after bind(). Otherwise the system might choose a port that another process has
  // reserved in this way.
  if (reserved.is_open()) reserved.set_option(tcp::acceptor::reuse_address(true), error);
  return reserved;
}

std::uint16_t port_of(const tcp::acceptor& socket) {
  asio::error_code error;
  const tcp::endpoint bound = socket.local_endpoint(error);
  return error ? 0 : bound.port();
}

std::string peer_address(const tcp::socket& socket) {
  asio::error_code error;
  const tcp::endpoint peer = socket.remote_endpoint(error);
  return error ? "" : as_text(peer.address());
}

bool is_loopback(const std::string& numeric) {
  asio::error_code error;
  const address parsed = asio::ip::make_address(numeric, error);
  return !error && parsed.is_loopback();
}

std::vector<std::string> reachable_addresses() {
  std::vector<std::string> addresses;
  for (const InterfaceAddress& known : interface_addresses())
    if (!known.link_local) addresses.push_back(known.address);
  return addresses;
}

void close_on_exec(int fd) { ::fcntl(fd, F_SETFD, FD_CLOEXEC); }

void tune_connection(tcp::socket& socket, int silence_limit_ms) {
  const int fd = socket.native_handle();
  const auto set = [fd](int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof value);
  };
  asio::error_code ignored;
  socket.non_blocking(true, ignored);
  close_on_exec(fd);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  // Keep-alive applies only while no data is unacknowledged; the user timeout applies to both.
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, silence_limit_ms / 3000));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, silence_limit_ms / 6000));
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, silence_limit_ms);
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
