#include "system/socket.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <set>

namespace hvd::launcher {
namespace {

/// An IPv4 server at a port; the descriptor is empty if the port cannot be bound.
UniqueFd serve(std::uint16_t port, bool shares) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = shares ? 1 : 0;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(fd.get(), 8) != 0)
    return {};
  return fd;
}

TEST(ReservedPort, RefusesConnectionsUntilItsOwnerListens) {
  const Listener reserved = reserve_port();
  ASSERT_TRUE(reserved.fd);
  ASSERT_GT(reserved.port, 0);
  EXPECT_FALSE(serve(reserved.port, false)) << "without SO_REUSEADDR it is taken";
  EXPECT_TRUE(connect_any({"127.0.0.1"}, reserved.port, 2000).empty());
  for (int again = 0; again < 2; ++again) {
    const UniqueFd server = serve(reserved.port, true);
    ASSERT_TRUE(server);
    EXPECT_FALSE(serve(reserved.port, true)) << "only one server may listen at a time";
    const auto open = connect_any({"127.0.0.1"}, reserved.port, 2000);
    ASSERT_EQ(open.size(), 1U);
    EXPECT_EQ(peer_address(open[0].get()), "127.0.0.1");
  }
}

TEST(ReservedPort, IsAnotherOneEachTime) {
  std::vector<Listener> reserved;
  std::set<int> ports;
  for (int i = 0; i < 200; ++i) {
    reserved.push_back(reserve_port());
    EXPECT_TRUE(ports.insert(reserved.back().port).second);
  }
}

TEST(PeerAddress, OfIpv4OnASocketForBoth) {
  const Listener listener = listen_anywhere(false);
  const auto open = connect_any({"127.0.0.1"}, listener.port, 2000);
  ASSERT_EQ(open.size(), 1U);
  UniqueFd accepted;
  for (int i = 0; i < 1000 && !accepted; ++i)
    accepted = UniqueFd(::accept(listener.fd.get(), nullptr, nullptr));
  ASSERT_TRUE(accepted);
  EXPECT_EQ(peer_address(accepted.get()), "127.0.0.1");
  EXPECT_EQ(peer_address(listener.fd.get()), "");
}

TEST(Loopback, IsThisMachine) {
  EXPECT_TRUE(is_loopback("127.0.0.1"));
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
  EXPECT_FALSE(is_loopback(""));
}

}  // namespace
}  // namespace hvd::launcher
