// Two "hosts" on one machine: network namespaces on one bridge, each with its own address and host
// name, and a remote shell that enters them. Needs root and the right to make namespaces; skipped,
// with the reason, where that is missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "reports/rank_output.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string shell(const std::string& command, int& code) {
  std::string output;
  FILE* pipe = ::popen(("exec 2>&1; " + command).c_str(), "r");
  if (pipe == nullptr) {
    code = -1;
    return output;
  }
  char buffer[512];
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) output += buffer;
  code = ::pclose(pipe);
  return output;
}

/// Namespaces and files named after this process, so that tests may run side by side.
class MultiHost : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "network namespaces need root";
    const std::string id = std::to_string(::getpid());
    switch_ = "hvdt" + id + "s";
    hosts_ = {"hvdt" + id + "a", "hvdt" + id + "b"};
    const std::string names = "10.79.0.1 " + hosts_[0] + "\\n10.79.0.2 " + hosts_[1] + "\\n";
    std::string script = "set -e; ip netns add " + switch_ + "; ip -n " + switch_ +
                         " link add br0 type bridge; ip -n " + switch_ + " link set br0 up; ";
    for (int i = 0; i < 2; ++i) {
      const std::string& host = hosts_[static_cast<std::size_t>(i)];
      const std::string port = i == 0 ? "p0" : "p1";
      script += "ip netns add " + host + "; ip -n " + host +
                " link set lo up; ip link add eth0 netns " + host + " type veth peer name " + port +
                " netns " + switch_ + "; ip -n " + host + " addr add 10.79.0." +
                std::to_string(i + 1) + "/24 dev eth0; ip -n " + host +
                " link set eth0 up; ip -n " + switch_ + " link set " + port +
                " master br0 up; mkdir -p /etc/netns/" + host + "; printf '127.0.0.1 localhost\\n" +
                names + "' > /etc/netns/" + host + "/hosts; ip netns exec " + host +
                " unshare --uts hostname " + host + "; ";
    }
    int code = 0;
    const std::string output = shell(script, code);
    made_ = true;
    if (code != 0) GTEST_SKIP() << "network namespaces cannot be made here: " << output;
  }

  void TearDown() override {
    if (!made_) return;
    int code = 0;
    for (const std::string& host : hosts_) {
      kill_host(host);
      // What a killed daemon left; all "hosts" share this machine's /tmp.
      shell("ip netns del " + host + "; rm -rf /etc/netns/" + host + " /tmp/ompi." + host + ".*",
            code);
    }
    shell("ip netns del " + switch_, code);
  }

  static void kill_host(const std::string& host) {
    int code = 0;
    std::istringstream pids(shell("ip netns pids " + host, code));
    for (pid_t pid = 0; pids >> pid;) ::kill(pid, SIGKILL);
  }

  /// hvdrun on the first host.
  Start on_first_host(std::vector<std::string> arguments) const {
    Start start;
    start.prefix = {"ip",      "netns",   "exec",
                    hosts_[0], "unshare", "--uts",
                    "sh",      "-c",      "hostname \"$0\"; exec \"$@\"",
                    hosts_[0]};
    start.arguments = std::move(arguments);
    return start;
  }

  /// Two ranks on each host, without mpirun.
  Start direct(int first, const std::vector<std::string>& program) const {
    const auto at = static_cast<std::size_t>(first);
    std::vector<std::string> arguments = {
        "--controller", "ucx", "--rsh", HVD_TEST_AGENT,
        "-np",          "4",   "-H",    hosts_[at] + ":2," + hosts_[1 - at] + ":2",
        "--bind",       "none"};
    arguments.insert(arguments.end(), program.begin(), program.end());
    return on_first_host(std::move(arguments));
  }

  Start start(const std::string& mode, const std::string& marker) const {
    Start start = on_first_host({"-np", "4", "-H", hosts_[0] + ":2," + hosts_[1] + ":2", "--bind",
                                 "none",  // the "hosts" have the same cores
                                 "-x", "LAUNCHER_TEST_GIVEN=yes", "--mpi-args",
                                 std::string("--mca plm_rsh_agent ") + HVD_TEST_AGENT,
                                 mpi_program(), mode, marker});
    start.environment = {{"NCCL_LAUNCHER_TEST", "too"}};
    return start;
  }

  std::string switch_;
  std::vector<std::string> hosts_;
  bool made_ = false;
};

TEST_F(MultiHost, RanksAndVariables) {
  const Result result = HvdrunProcess(start("sum", unique_marker())).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 4; ++rank) {
    const std::string host = hosts_[static_cast<std::size_t>(rank / 2)];
    EXPECT_THAT(result.out, HasSubstr(rank_prefix(rank, 4) + "rank " + std::to_string(rank) +
                                      " of 4 on " + host + " local " + std::to_string(rank % 2) +
                                      " of 2 sum 30 given yes forwarded too\n"));
  }
}

// Allreduces and an allgather, with their results checked. No other backend is allowed, so the
// ranks of a host share memory and the hosts talk over TCP, or the job fails.
TEST_F(MultiHost, AnHvdJobRunsOnTheHierarchicalBackend) {
  Start job = start("", "");
  job.arguments.resize(job.arguments.size() - 3);
  job.arguments.insert(job.arguments.end(), {HVD_TEST_JOB_PROGRAM, "none", "0", "0"});
  job.environment.push_back({"HVD_BACKEND", "hierarchical"});
  const Result result = HvdrunProcess(job).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(result.out,
                HasSubstr(rank_prefix(rank, 4) + "DONE " + std::to_string(rank) + "\n"));
  }
}

TEST_F(MultiHost, FailureNamesTheHost) {
  HvdrunProcess process(start("stay", unique_marker()));
  ASSERT_TRUE(process.wait_for("sum 30", 4, 20));
  int code = 0;
  std::istringstream pids(shell("ip netns pids " + hosts_[1], code));
  pid_t victim = -1;
  for (pid_t pid = 0; pids >> pid;) victim = std::max(victim, pid);
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_THAT(result.err, HasSubstr("killed by SIGKILL (9)  host " + hosts_[1] + "  local rank "));
}

TEST_F(MultiHost, HostDeathNamesTheHost) {
  HvdrunProcess process(start("stay", unique_marker()));
  ASSERT_TRUE(process.wait_for("sum 30", 4, 20));
  const auto began = std::chrono::steady_clock::now();
  kill_host(hosts_[1]);
  const Result result = process.wait();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("from a host's death to hvdrun's end: %.3f s\n", took.count());
  // Which of its processes the kernel kills first decides whether a report got out: the rank's
  // (137) or none (69).
  EXPECT_TRUE(result.code == 137 || result.code == 69) << result.code << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: "));
  EXPECT_THAT(result.err, HasSubstr("host " + hosts_[1]));
}

TEST_F(MultiHost, KillingHvdrunLeavesNothingOnTheOtherHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(start("stay", marker));
  ASSERT_TRUE(process.wait_for("sum 30", 4, 20));
  process.signal(SIGKILL);
  EXPECT_THAT(wait_until_gone(marker, 5), IsEmpty());
}

TEST_F(MultiHost, ACutLinkEndsBothSides) {
  const std::string marker = unique_marker();
  Start job = start("stay", marker);
  job.environment.push_back({"HVD_PEER_TIMEOUT", "3"});
  HvdrunProcess process(job);
  ASSERT_TRUE(process.wait_for("sum 30", 4, 20));
  int code = 0;
  shell("ip -n " + switch_ + " link set p1 down", code);
  ASSERT_EQ(code, 0);
  const Result result = process.wait(25);
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: lost"));
  EXPECT_THAT(result.err, HasSubstr("host " + hosts_[1]));
  EXPECT_THAT(result.err, Not(HasSubstr("Process received signal")));
  EXPECT_THAT(wait_until_gone(marker, 10), IsEmpty());
}

TEST_F(MultiHost, InterruptReachesTheOtherHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(start("stay", marker));
  ASSERT_TRUE(process.wait_for("sum 30", 4, 20));
  process.signal(SIGINT);
  EXPECT_EQ(process.wait().code, 130);
  EXPECT_THAT(wait_until_gone(marker, 5), IsEmpty());
}

TEST_F(MultiHost, WithoutMpirunRankZerosAddressIsOneThatAnswers) {
  for (const int first : {0, 1}) {
    const Result result =
        HvdrunProcess(direct(first, {"sh", "-c",
                                     "echo $HVD_RANK on $(hostname), node $GROUP_RANK of "
                                     "$GROUP_WORLD_SIZE: $HVD_INIT_METHOD $MASTER_ADDR"}))
            .wait();
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    for (int rank = 0; rank < 4; ++rank) {
      const int node = rank / 2;
      const int host = first == 0 ? node : 1 - node;
      const bool beside = first == 0 && host == 0;  // rank 0, hvdrun and this rank
      const std::string address = beside ? "127.0.0.1" : "10.79.0." + std::to_string(first + 1);
      EXPECT_THAT(result.out,
                  ::testing::ContainsRegex(std::to_string(rank) + " on " +
                                           hosts_[static_cast<std::size_t>(host)] + ", node " +
                                           std::to_string(node) + " of 2: tcp://" + address +
                                           ":[0-9]+ " + address + "\n"));
    }
  }
}

TEST_F(MultiHost, WithoutMpirunAnHvdJobMeetsAndWorks) {
  const std::string program = HVD_TEST_START_PROGRAM;
  if (program.empty() || !finds_ucx()) GTEST_SKIP() << "there is no UCX";
  for (const int first : {0, 1}) {
    const Result result = HvdrunProcess(direct(first, {program, "work"})).wait();
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(count(result.out, "OK " + std::to_string(rank) + " 4 " + std::to_string(rank % 2) +
                                      " 2 ucx tcp://"),
                2)
          << result.out;
    }
  }
}

TEST_F(MultiHost, WithoutMpirunAHostsDeathNamesIt) {
  const std::string marker = unique_marker();
  HvdrunProcess process(direct(0, {rank_program(), "wait", marker}));
  ASSERT_TRUE(process.wait_for("ready", 4, 20));
  kill_host(hosts_[1]);
  const Result result = process.wait();
  EXPECT_TRUE(result.code == 137 || result.code == 69) << result.code << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: "));
  EXPECT_THAT(result.err, HasSubstr("host " + hosts_[1]));
  EXPECT_THAT(wait_until_gone(marker, 5), IsEmpty());
}

TEST_F(MultiHost, WithoutMpirunKillingHvdrunLeavesNothingOnTheOtherHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(direct(1, {rank_program(), "stubborn", marker}));
  ASSERT_TRUE(process.wait_for("ready", 4, 20));
  process.signal(SIGKILL);
  EXPECT_THAT(wait_until_gone(marker, 5), IsEmpty());
}

TEST_F(MultiHost, WithoutMpirunACutLinkEndsBothSides) {
  const std::string marker = unique_marker();
  Start job = direct(0, {rank_program(), "wait", marker});
  job.environment.push_back({"HVD_PEER_TIMEOUT", "3"});
  HvdrunProcess process(job);
  ASSERT_TRUE(process.wait_for("ready", 4, 20));
  int code = 0;
  shell("ip -n " + switch_ + " link set p1 down", code);
  ASSERT_EQ(code, 0);
  const Result result = process.wait(25);
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: lost"));
  EXPECT_THAT(result.err, HasSubstr("host " + hosts_[1]));
  EXPECT_THAT(wait_until_gone(marker, 10), IsEmpty());
}

TEST(Hosts, AnUnreachableOneIs69) {
  const Result result = run_hvdrun({"-np", "2", "-H", "no-such-host.invalid:2", "--mpi-args",
                                    "--mca plm_rsh_agent false", rank_program(), "wait"});
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: host no-such-host.invalid (ranks 0, 1) could not be "
                                    "reached or was lost"));
}

}  // namespace
}  // namespace hvd::launcher::test
