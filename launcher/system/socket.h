#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "system/error.h"

namespace hvd::launcher {

/// Listens on a free port of loopback or of every interface. @throws LaunchError (kInternal).
asio::ip::tcp::acceptor listen_anywhere(asio::io_context& io, bool loopback_only);

/// Another process listens at the port.
class PortTaken : public LaunchError {
 public:
  using LaunchError::LaunchError;
};
/// Listens at this port of every interface. @throws PortTaken, LaunchError (kInternal)
asio::ip::tcp::acceptor listen_at(asio::io_context& io, std::uint16_t port);

/// Reserves a free port: the system assigns it to no other socket while this one is open. A process
/// that sets SO_REUSEADDR may listen on it. Until one does, connections to it are refused. The
/// socket is not open if no port is free.
asio::ip::tcp::acceptor reserve_port(asio::io_context& io);
/// The port of a bound socket; 0 if it is not open.
std::uint16_t port_of(const asio::ip::tcp::acceptor& socket);

/// The numeric address of the other side; empty if unknown.
std::string peer_address(const asio::ip::tcp::socket& socket);
/// Whether the address is the loopback interface's.
bool is_loopback(const std::string& address);

/// This machine's numeric addresses that other machines may reach, without loopback and link-local.
std::vector<std::string> reachable_addresses();

/// Makes the socket non-blocking, lets no child inherit it, turns off the delay of small messages,
/// and makes the connection break after `silence_limit_ms` without a sign of life from the peer,
/// even if no data is unacknowledged.
void tune_connection(asio::ip::tcp::socket& socket, int silence_limit_ms);

/// Closes the descriptor on exec. Asio does not do so.
void close_on_exec(int fd);

/// 128 random bits in hex. @throws LaunchError (kInternal).
std::string random_token();

}  // namespace hvd::launcher
