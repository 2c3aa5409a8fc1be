#include "system/socket.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <barrier>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

using asio::ip::tcp;

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

/// A connection to a port of loopback; not open if it was refused.
tcp::socket connect_to(asio::io_context& io, std::uint16_t port) {
  tcp::socket socket(io);
  asio::error_code error;
  socket.connect({asio::ip::address_v4::loopback(), port}, error);
  if (error) socket.close();
  return socket;
}

TEST(ReservedPort, RefusesConnectionsUntilItsOwnerListens) {
  asio::io_context io;
  const tcp::acceptor reserved = reserve_port(io);
  ASSERT_TRUE(reserved.is_open());
  const std::uint16_t port = port_of(reserved);
  ASSERT_GT(port, 0);
  EXPECT_FALSE(serve(port, false)) << "without SO_REUSEADDR it is taken";
  EXPECT_FALSE(connect_to(io, port).is_open());
  for (int again = 0; again < 2; ++again) {
    const UniqueFd server = serve(port, true);
    ASSERT_TRUE(server);
    EXPECT_FALSE(serve(port, true)) << "only one server may listen at a time";
    EXPECT_EQ(peer_address(connect_to(io, port)), "127.0.0.1");
  }
}

TEST(ListenAt, LetsExactlyOneOfManyListen) {
  constexpr int kProcesses = 4, kRounds = 500;
  asio::io_context io;
  const tcp::acceptor reserved = reserve_port(io);
  const std::uint16_t port = port_of(reserved);
  ASSERT_GT(port, 0);
  for (int round = 0; round < kRounds; ++round) {
    std::barrier begin(kProcesses);
    std::atomic<int> listening = 0, refused = 0;
    std::vector<std::optional<tcp::acceptor>> listeners(kProcesses);
    {
      std::vector<std::jthread> threads;
      for (auto& listener : listeners) {
        threads.emplace_back([&] {
          begin.arrive_and_wait();
          try {
            listener = listen_at(io, port);
            ++listening;
          } catch (const PortTaken&) {
            ++refused;
          }
        });
      }
    }
    ASSERT_EQ(listening, 1) << "round " << round;
    ASSERT_EQ(refused, kProcesses - 1) << "round " << round;
  }
}

TEST(ReservedPort, IsAnotherOneEachTime) {
  asio::io_context io;
  std::vector<tcp::acceptor> reserved;
  std::set<int> ports;
  for (int i = 0; i < 200; ++i) {
    reserved.push_back(reserve_port(io));
    EXPECT_TRUE(ports.insert(port_of(reserved.back())).second);
  }
}

TEST(PeerAddress, OfIpv4OnASocketForBoth) {
  asio::io_context io;
  tcp::acceptor listener = listen_anywhere(io, false);
  const tcp::socket open = connect_to(io, port_of(listener));
  ASSERT_TRUE(open.is_open());
  EXPECT_EQ(peer_address(listener.accept()), "127.0.0.1");
  EXPECT_EQ(peer_address(tcp::socket(io)), "");
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
