#include "command/hosts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "system/error.h"

namespace hvd::launcher {
namespace {

using Hosts = std::vector<Host>;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string host_list_error(const std::string& list) {
  try {
    parse_host_list(list);
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code(), 2);
    return error.what();
  }
  return "";
}

TEST(HostList, NamesAndSlots) {
  EXPECT_EQ(parse_host_list("h1:2,h2:4"), (Hosts{{"h1", 2}, {"h2", 4}}));
  EXPECT_EQ(parse_host_list("h1"), (Hosts{{"h1", 1}}));
  EXPECT_EQ(parse_host_list("h1:2, h-2.example.org:1"), (Hosts{{"h1", 2}, {"h-2.example.org", 1}}));
  EXPECT_EQ(parse_host_list("h1:2,h2:1,h1:3"), (Hosts{{"h1", 5}, {"h2", 1}}));
}

TEST(HostList, BadPartsAreQuoted) {
  for (const char* bad : {"", "h1:", "h1:0", "h1:-1", "h1:two", "h1:2x", ":2", "h1:2,,h2:2",
                          "h 1:2", "-x", "h1:99999999999"}) {
    EXPECT_THAT(host_list_error(bad), HasSubstr("expected HOST or HOST:SLOTS")) << bad;
  }
  EXPECT_THAT(host_list_error("h1:2,h2:zwei"), HasSubstr("got 'h2:zwei' in 'h1:2,h2:zwei'"));
}

TEST(Hostfile, BothNotationsAndComments) {
  EXPECT_EQ(
      parse_hostfile("# all\nh1 slots=2\n\n  h2:3  # gpu\nh3\nh4 max_slots=9 slots=4\r\n", "f"),
      (Hosts{{"h1", 2}, {"h2", 3}, {"h3", 1}, {"h4", 4}}));
}

TEST(Hostfile, ErrorsNameTheLine) {
  try {
    parse_hostfile("h1 slots=2\nh2 slots=none\n", "my.hosts");
    FAIL();
  } catch (const LaunchError& error) {
    EXPECT_THAT(error.what(), HasSubstr("hostfile my.hosts, line 2: expected"));
    EXPECT_THAT(error.what(), HasSubstr("got 'h2 slots=none'"));
  }
  EXPECT_THROW(parse_hostfile("h1 2\n", "f"), LaunchError);
  EXPECT_THROW(parse_hostfile("# nothing\n", "f"), LaunchError);
  EXPECT_THROW(read_hostfile("/no/such/hostfile"), LaunchError);
}

TEST(Hosts, Totals) {
  const Hosts hosts{{"a", 2}, {"b", 3}};
  EXPECT_EQ(total_slots(hosts), 5);
  EXPECT_EQ(format_hosts(hosts), "a:2,b:3");
  EXPECT_EQ(parse_host_list(format_hosts(hosts)), hosts);
}

TEST(Hosts, Local) {
  EXPECT_TRUE(is_local_host("localhost", "node1"));
  EXPECT_TRUE(is_local_host("127.0.0.1", "node1"));
  EXPECT_TRUE(is_local_host("node1", "node1.example.org"));
  EXPECT_TRUE(is_local_host("node1.example.org", "node1"));
  EXPECT_FALSE(is_local_host("node1.example.org", "node1.example.com"));
  EXPECT_FALSE(is_local_host("node2", "node1"));
  EXPECT_FALSE(is_local_host("10.0.0.1", "10"));
  EXPECT_TRUE(all_local({}, "node1"));
  EXPECT_FALSE(all_local({{"node1", 1}, {"node2", 1}}, "node1"));
}

TEST(Placement, WithoutHostsAllRanksAreHere) {
  EXPECT_THAT(place_ranks(3, {}, "me"), ElementsAre(HostRanks{"me", true, {0, 1, 2}}));
}

TEST(Placement, FillsOneHostBeforeTheNext) {
  EXPECT_THAT(place_ranks(3, {{"a", 2}, {"b", 2}, {"c", 2}}, "me"),
              ElementsAre(HostRanks{"a", false, {0, 1}}, HostRanks{"b", false, {2}}));
}

TEST(Placement, NamesOfThisMachineAreOneHost) {
  EXPECT_THAT(place_ranks(4, {{"localhost", 1}, {"b", 1}, {"me", 2}}, "me.example.org"),
              ElementsAre(HostRanks{"localhost", true, {0, 2, 3}}, HostRanks{"b", false, {1}}));
}

}  // namespace
}  // namespace hvd::launcher
