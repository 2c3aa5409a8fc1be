// A job of two hosts that also have a network of containers, with the same address on both: UCX
// must use the network over which the ranks have found each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <string>
#include <vector>

#include "support/process.h"
#include "support/two_hosts.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class HostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
    for (const int host : {0, 1}) {
      const std::string ip = "; ip -n " + hosts_.name(host) + " ";
      int code = 0;
      const std::string output =
          shell("set -e" + ip + "link add eth1 type veth peer name v1" + ip + "link set v1 up" +
                    ip + "addr add 172.17.0.1/16 dev eth1" + ip + "link set eth1 up",
                code);
      ASSERT_EQ(code, 0) << output;
    }
  }

  void start_ranks(const std::string& mode, const Environment& more = {}) {
    for (const int rank : {0, 1}) {
      std::vector<std::string> command = hosts_.prefix(rank);
      command.insert(command.end(), {HVD_START_PROGRAM, mode});
      Environment environment = {{"HVD_INIT_METHOD", "tcp://" + TwoHosts::address(0) + ":29400"},
                                 {"HVD_RANK", std::to_string(rank)},
                                 {"HVD_SIZE", "2"},
                                 {"HVD_START_TIMEOUT", "20"},
                                 {"HVD_PEER_TIMEOUT", "20"}};
      environment.insert(more.begin(), more.end());
      ranks_.emplace_back(command, environment);
    }
  }
  std::string listening_on(int host) const {
    int code = 0;
    return shell("ip netns exec " + hosts_.name(host) + " ss -Htln", code);
  }

  const std::chrono::steady_clock::time_point deadline_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(60);
  TwoHosts hosts_;
  std::vector<Process> ranks_;
};

TEST_F(HostsTest, UcxUsesTheInterfaceThatReachedTheRendezvous) {
  start_ranks("loop");
  for (Process& rank : ranks_)
    ASSERT_TRUE(rank.wait_for("RUNNING", 1, deadline_)) << rank.written();
  for (const int host : {0, 1}) {
    EXPECT_THAT(listening_on(host),
                AllOf(HasSubstr(TwoHosts::address(host) + ":"), Not(HasSubstr("172.17."))));
  }
  hosts_.kill(1);
  const auto end = ranks_[0].wait(deadline_);
  EXPECT_EQ(end.code, 3) << end.output;
  EXPECT_THAT(end.output, AllOf(HasSubstr("PeerLostError 1 "), HasSubstr("over eth0")));
}

TEST_F(HostsTest, SoItDoesUnderHvdrun) {
  std::vector<std::string> command = hosts_.prefix(0);
  command.insert(command.end(), {HVD_HVDRUN, "--controller", "ucx", "--rsh", HVD_TEST_AGENT, "-np",
                                 "2", "-H", hosts_.name(0) + ":1," + hosts_.name(1) + ":1",
                                 "--bind", "none", HVD_START_PROGRAM, "work"});
  const auto end = Process(command, {}).wait(deadline_);
  EXPECT_EQ(end.code, 0) << end.output;
}

TEST_F(HostsTest, TheUsersChoiceOfInterfacesWins) {
  start_ranks("loop", {{"UCX_NET_DEVICES", "eth1"}});
  for (Process& rank : ranks_) {
    const auto end = rank.wait(deadline_);
    EXPECT_EQ(end.code, 3) << end.output;
    EXPECT_THAT(end.output, HasSubstr("over eth1 failed"));
  }
}

}  // namespace
}  // namespace hvd::testing
