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

TEST(HostList, UsersAndIpv6Addresses) {
  const Hosts hosts = parse_host_list("user@h1:2,[fd00::3]:4,me.too@[::1],h1:1,[fe80::1%eth0]:1");
  EXPECT_EQ(hosts, (Hosts{{.name = "h1", .slots = 3, .user = "user"},
                          {.name = "fd00::3", .slots = 4},
                          {.name = "::1", .slots = 1, .user = "me.too"},
                          {.name = "fe80::1%eth0", .slots = 1}}));
  EXPECT_EQ(shell_target(hosts[0]), "user@h1");
  EXPECT_EQ(shell_target(hosts[1]), "fd00::3");
  EXPECT_EQ(format_hosts(hosts), "user@h1:3,[fd00::3]:4,me.too@[::1]:1,[fe80::1%eth0]:1");
  EXPECT_EQ(parse_host_list(format_hosts(hosts)), hosts);
}

TEST(HostList, BadPartsAreQuoted) {
  for (const char* bad :
       {"",       "h1:",     "h1:0",           "h1:-1", "h1:two", "h1:2x", ":2", "h1:2,,h2:2",
        "h 1:2",  "-x",      "h1:99999999999", "@h1",   "a b@h1", "-l@h1", "u@", "[::1",
        "[::1]2", "[::1]:0", "[h1]:2",         "::1:2", "[]:1",   "u@v@h1"}) {
    EXPECT_THAT(host_list_error(bad), HasSubstr("expected HOST or HOST:SLOTS")) << bad;
  }
  EXPECT_THAT(host_list_error("h1:2,h2:zwei"), HasSubstr("got 'h2:zwei' in 'h1:2,h2:zwei'"));
}

TEST(Hostfile, BothNotationsAndComments) {
  EXPECT_EQ(parse_hostfile("# all\nh1 slots=2\n\n  h2:3  # gpu\nh3\nh4 max_slots=9 slots=4\r\n"
                           "u@h5 slots=2\n[::2]:3\n",
                           "f"),
            (Hosts{{"h1", 2},
                   {"h2", 3},
                   {"h3", 1},
                   {"h4", 4},
                   {.name = "h5", .slots = 2, .user = "u"},
                   {.name = "::2", .slots = 3}}));
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

TEST(Hosts, OwnNamesAddressesAndAliasesAreLocal) {
  OwnNames own{.hostname = "node1", .addresses = {"10.1.0.7", "fd00::7"}, .user = "ann"};
  std::vector<std::string> looked_up;
  own.resolve = [&](const std::vector<std::string>& names) {
    looked_up = names;
    return std::map<std::string, std::vector<std::string>>{{"node1-ib", {"10.9.0.1", "fd00::7"}},
                                                           {"node2", {"10.1.0.8"}}};
  };
  Hosts hosts = parse_host_list(
      "node1,10.1.0.7,[fd00:0::7],node1-ib,node2,10.1.0.8,[::1],127.0.0.2,ann@node1,bob@node1,"
      "gone");
  mark_local_hosts(hosts, own);
  std::vector<std::string> local;
  for (const Host& host : hosts)
    if (host.local) local.push_back(shell_target(host));
  EXPECT_THAT(local,
              ElementsAre("ann@node1", "10.1.0.7", "fd00:0::7", "node1-ib", "::1", "127.0.0.2"));
  EXPECT_THAT(looked_up, ElementsAre("node1-ib", "node2", "gone"));
  EXPECT_THAT(place_ranks(4, {hosts[0], hosts[3], hosts[4]}, "node1"),
              ElementsAre(HostRanks{"ann@node1", true, {0, 1, 2}}, HostRanks{"node2", false, {3}}));
}

TEST(Hosts, ThisMachineFindsItself) {
  const OwnNames own = own_names();
  Hosts hosts = parse_host_list(own.hostname);
  for (const std::string& address : own.addresses) hosts.push_back({.name = address, .slots = 1});
  mark_local_hosts(hosts, own);
  EXPECT_TRUE(all_local(hosts, own.hostname));
  EXPECT_THAT(own.resolve({"localhost"})["localhost"], ::testing::Contains("127.0.0.1"));
  EXPECT_TRUE(own.resolve({"no-such-host.invalid"}).empty());
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
