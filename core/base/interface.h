#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace hvd {

/// An address of a network interface.
struct InterfaceAddress {
  std::string interface;  ///< such as "eth0"
  std::string address;    ///< numeric IPv4 or IPv6: "10.0.0.1", "fd00::1" or "fe80::1%eth0"
  bool link_local = false;
};

/// The addresses of this host's network interfaces that are up, without loopback interfaces.
std::vector<InterfaceAddress> interface_addresses();

/// Name of the network interface that has this address, such as "eth0". Empty if
/// interface_addresses() does not contain the address.
std::string interface_of(const std::string& address);

/// The numeric local address of a connected or bound socket, as interface_of() expects it. Empty
/// for sockets other than IPv4 and IPv6.
std::string local_address(int socket);

/// The local address from which this host reaches an IPv4 or IPv6 address, according to its routes.
/// The port must not be 0. Sends no data. Empty if there is no route.
std::string local_address_towards(const sockaddr_storage& address);

}  // namespace hvd
