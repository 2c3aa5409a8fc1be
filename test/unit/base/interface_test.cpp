#include "base/interface.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace hvd {
namespace {

/// The local address of a socket of this family that is bound to the address.
std::string bound_to(int family, const char* address) {
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  const int made = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool bound = family == AF_INET
                         ? ::inet_pton(family, address, &v4.sin_addr) == 1 &&
                               ::bind(made, reinterpret_cast<const sockaddr*>(&v4), sizeof v4) == 0
                         : ::inet_pton(family, address, &v6.sin6_addr) == 1 &&
                               ::bind(made, reinterpret_cast<const sockaddr*>(&v6), sizeof v6) == 0;
  const std::string found = local_address(made);
  ::close(made);
  return bound ? found : "not bound";
}

TEST(InterfaceTest, KnowsTheLocalAddressOfASocket) {
  EXPECT_EQ(bound_to(AF_INET, "127.0.0.1"), "127.0.0.1");
  const std::string mapped = bound_to(AF_INET6, "::ffff:127.0.0.1");
  EXPECT_TRUE(mapped == "127.0.0.1" || mapped == "not bound") << mapped;  // a host without IPv6
  const int local = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(local_address(local), "");
  ::close(local);
  EXPECT_EQ(local_address(-1), "");
}

TEST(InterfaceTest, KnowsTheLocalAddressOfARoute) {
  sockaddr_storage storage = {};
  auto& address = reinterpret_cast<sockaddr_in&>(storage);
  address.sin_family = AF_INET;
  address.sin_port = 9;
  ::inet_pton(AF_INET, "127.0.0.5", &address.sin_addr);
  EXPECT_EQ(local_address_towards(storage), "127.0.0.1");
}

TEST(InterfaceTest, FindsTheInterfaceOfAnAddress) {
  ifaddrs* list = nullptr;
  ASSERT_EQ(::getifaddrs(&list), 0);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = {};
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text,
                sizeof text);
    const bool loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    EXPECT_EQ(interface_of(text), loopback ? "" : entry->ifa_name) << text;
  }
  ::freeifaddrs(list);
  for (const char* const other : {"", "127.0.0.1", "::1", "192.0.2.77", "no address"})
    EXPECT_EQ(interface_of(other), "") << other;
}

}  // namespace
}  // namespace hvd
