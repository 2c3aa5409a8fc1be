#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "system/unique_fd.h"

namespace hvd::launcher {

struct Listener {
  UniqueFd fd;
  std::uint16_t port = 0;
};

/// Listens on a free port, of loopback only or of every interface. Non-blocking. @throws
/// LaunchError (kInternal).
Listener listen_anywhere(bool loopback_only);

/// A free port that nobody is given by chance as long as the descriptor is open, and on which a
/// process may listen that sets SO_REUSEADDR. Until one does, connections to it are refused.
/// Without a descriptor: there is none.
Listener reserve_port();

/// The number of the other side's address; empty when there is none.
std::string peer_address(int fd);
/// Of this machine itself, and no other.
bool is_loopback(const std::string& address);

/// This machine's addresses that another machine may reach, as numbers: no loopback, no link-local.
std::vector<std::string> reachable_addresses();

/// Opens a connection to each address at once and returns those that answered first: every one that
/// is open when the first is, or none after `timeout_ms`. Blocking sockets, closed on exec.
std::vector<UniqueFd> connect_any(const std::vector<std::string>& addresses, std::uint16_t port,
                                  int timeout_ms);

/// No delay for small messages, and a peer that is not heard of any more is given up after
/// `silence_limit_ms`, whether it has something to acknowledge or not.
void tune_connection(int fd, int silence_limit_ms);

/// 128 random bits in hex. @throws LaunchError (kInternal).
std::string random_token();

}  // namespace hvd::launcher
