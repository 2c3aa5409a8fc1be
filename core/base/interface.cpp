#include "base/interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string_view>
#include <utility>

namespace hvd {
namespace {

/// The numeric text of an address; empty if it is not an IPv4 or IPv6 address.
std::string in_numbers(const sockaddr* address) {
  if (address == nullptr) return {};
  const bool v4 = address->sa_family == AF_INET;
  if (!v4 && address->sa_family != AF_INET6) return {};
  const auto bytes = static_cast<socklen_t>(v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  std::array<char, NI_MAXHOST> host{};
  if (::getnameinfo(address, bytes, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    return {};
  constexpr std::string_view kMapped = "::ffff:";  // IPv4 on a socket of IPv6
  const std::string_view text = host.data();
  const bool mapped = text.starts_with(kMapped) && text.find('.') != std::string_view::npos;
  return std::string(mapped ? text.substr(kMapped.size()) : text);
}

}  // namespace

std::vector<InterfaceAddress> interface_addresses() {
  std::vector<InterfaceAddress> addresses;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return addresses;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(list, ::freeifaddrs);
  for (const ifaddrs* entry = all.get(); entry != nullptr; entry = entry->ifa_next) {
    const bool usable = (entry->ifa_flags & (IFF_UP | IFF_LOOPBACK)) == IFF_UP;
    std::string address = usable ? in_numbers(entry->ifa_addr) : "";
    if (address.empty()) continue;
    // An alias, such as "eth0:1", is not a separate device.
    const std::string_view name = entry->ifa_name;
    const auto* const six = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
    const bool link_local = six->sin6_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr);
    addresses.push_back({.interface = std::string(name.substr(0, name.find(':'))),
                         .address = std::move(address),
                         .link_local = link_local});
  }
  return addresses;
}

std::string interface_of(const std::string& address) {
  for (const InterfaceAddress& known : interface_addresses())
    if (known.address == address) return known.interface;
  return {};
}

std::string local_address(int socket) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return {};
  return in_numbers(reinterpret_cast<const sockaddr*>(&address));
}

std::string local_address_towards(const sockaddr_storage& address) {
  const int socket = ::socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return {};
  const auto bytes = static_cast<socklen_t>(address.ss_family == AF_INET ? sizeof(sockaddr_in)
                                                                         : sizeof(sockaddr_in6));
  const bool reached = ::connect(socket, reinterpret_cast<const sockaddr*>(&address), bytes) == 0;
  std::string local = reached ? local_address(socket) : std::string();
  ::close(socket);
  return local;
}

}  // namespace hvd
