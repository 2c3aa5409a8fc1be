#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "system/unique_fd.h"

namespace hvd::launcher {

struct Listener {
  UniqueFd fd;
  std::uint16_t port = 0;
};

/// Listens on a free port of loopback or of every interface. The socket is non-blocking.
/// @throws LaunchError (kInternal).
Listener listen_anywhere(bool loopback_only);

/// Reserves a free port: the system assigns it to no other socket while the descriptor is open. A
/// process that sets SO_REUSEADDR may listen on it. Until one does, connections to it are refused.
/// Returns no descriptor if no port is free.
Listener reserve_port();

/// The numeric address of the other side; empty if unknown.
std::string peer_address(int fd);
/// Whether the address is the loopback interface's.
bool is_loopback(const std::string& address);

/// This machine's numeric addresses that other machines may reach, without loopback and link-local.
std::vector<std::string> reachable_addresses();

/// Connects to all addresses at the same time. Returns the connections that are open when the first
/// one is, or an empty list after `timeout_ms`. The sockets are blocking and close on exec.
std::vector<UniqueFd> connect_any(const std::vector<std::string>& addresses, std::uint16_t port,
                                  int timeout_ms);

/// Turns off the delay of small messages, and makes the connection break after `silence_limit_ms`
/// without a sign of life from the peer, whether data is unacknowledged or not.
void tune_connection(int fd, int silence_limit_ms);

/// Sends as many bytes as a non-blocking socket accepts now. Returns their number; -1 if the
/// connection is broken.
std::ptrdiff_t send_some(int fd, std::string_view bytes);

/// 128 random bits in hex. @throws LaunchError (kInternal).
std::string random_token();

}  // namespace hvd::launcher
