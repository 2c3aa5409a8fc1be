#include "elastic/peer_address.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hvd::elastic {
namespace {

TEST(PeerAddress, AnAddressThatIsDecodedEqualsTheEncodedOne) {
  const PeerAddress address{.host = "boot/net", .port = 4711, .addresses = {"10.0.0.1", "fd00::1"}};
  const auto decoded = decode_peer_address(encode(address));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->host, address.host);
  EXPECT_EQ(decoded->port, address.port);
  EXPECT_EQ(decoded->addresses, address.addresses);
}

TEST(PeerAddress, OtherTextsAreRefused) {
  for (const char* const text :
       {"", " ", "host", "host ", "host 0", "host 65536", "host x", "host 1 ", "host  1 a"})
    EXPECT_FALSE(decode_peer_address(text)) << text;
}

TEST(PeerAddress, ATextHasALimit) {
  PeerAddress address{.host = "h", .port = 1};
  for (int i = 0; i < 1000; ++i) address.addresses.push_back("10.0.0." + std::to_string(i));
  EXPECT_LE(encode(address).size(), 2000U);
  EXPECT_TRUE(decode_peer_address(encode(address)));
}

TEST(PeerAddress, OwnAddressesAreEqualAndDecode) {
  const auto decoded = decode_peer_address(encode(own_address(17)));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->host, own_address(18).host);
  EXPECT_EQ(decoded->port, 17);
}

TEST(PeerAddress, RanksOfOneHostUseLoopback) {
  const PeerAddress first{.host = "a", .port = 1, .addresses = {"10.0.0.1"}};
  const PeerAddress second{.host = "a", .port = 2, .addresses = {"10.0.0.1"}};
  const PeerAddress other{.host = "b", .port = 3, .addresses = {"10.0.0.2"}};
  EXPECT_EQ(addresses_of_rank_0(std::vector{first, second}), std::vector<std::string>{"127.0.0.1"});
  EXPECT_EQ(addresses_of_rank_0(std::vector{first, second, other}),
            std::vector<std::string>{"10.0.0.1"});
  EXPECT_EQ(addresses_of_rank_0(std::vector{other, first}), std::vector<std::string>{"10.0.0.2"});
}

}  // namespace
}  // namespace hvd::elastic
