#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace hvd::elastic {

/// The address at which other workers reach a server of this process: `Ready.address`.
struct PeerAddress {
  std::string host = {};  ///< equal for processes that reach each other by loopback
  std::uint16_t port = 0;
  std::vector<std::string> addresses = {};  ///< numeric addresses of the network interfaces
};

/// The address of this process's server at a port.
PeerAddress own_address(std::uint16_t port);
/// A text of at most 2,000 bytes. Further addresses are left out.
std::string encode(const PeerAddress&);
/// Empty if the text is not an address.
std::optional<PeerAddress> decode_peer_address(const std::string&);

/// The addresses at which all ranks reach rank 0: loopback if they share a host.
/// @param ranks of the generation, by rank
/// @pre there is a rank
std::vector<std::string> addresses_of_rank_0(std::span<const PeerAddress> ranks);

}  // namespace hvd::elastic
