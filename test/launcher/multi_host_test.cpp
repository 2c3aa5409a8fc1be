// Two "hosts" on one machine (test/support/two_hosts.h), and a remote shell that enters them.
// Skipped, with the reason, where such hosts cannot be created.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent/host_order.h"
#include "command/controller.h"
#include "hvdrun_process.h"
#include "reports/rank_output.h"
#include "support/two_hosts.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class MultiHost : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
  }

  /// hvdrun on the first host.
  Start on_first_host(std::vector<std::string> arguments) const {
    Start start;
    start.prefix = hosts_.prefix(0);
    start.arguments = std::move(arguments);
    return start;
  }

  /// Two ranks on each host, without mpirun.
  Start direct(int first, const std::vector<std::string>& program) const {
    std::vector<std::string> arguments = {
        "--controller", "ucx", "--rsh", HVD_TEST_AGENT,
        "-np",          "4",   "-H",    hosts_.name(first) + ":2," + hosts_.name(1 - first) + ":2",
        "--bind",       "none"};
    arguments.insert(arguments.end(), program.begin(), program.end());
    return on_first_host(std::move(arguments));
  }

  const hvd::testing::TwoHosts hosts_;
};

/// Two ranks on each host, with each controller.
class EachController : public MultiHost, public ::testing::WithParamInterface<const char*> {
 protected:
  bool mpi() const { return std::string(GetParam()) == "mpi"; }

  Start start(const std::vector<std::string>& program) const {
    std::vector<std::string> arguments = {
        "--controller", GetParam(),
        "--rsh",        HVD_TEST_AGENT,
        "-np",          "4",
        "-H",           hosts_.name(0) + ":2," + hosts_.name(1) + ":2",
        "--bind",       "none",  // the "hosts" have the same cores
        "-x",           "LAUNCHER_TEST_GIVEN=yes"};
    arguments.insert(arguments.end(), program.begin(), program.end());
    Start start = on_first_host(std::move(arguments));
    start.environment = {{"NCCL_LAUNCHER_TEST", "too"}};
    return start;
  }
  /// Ranks that run until they are killed; over MPI, between MPI_Init and MPI_Finalize.
  Start staying(const std::string& marker) const {
    return mpi() ? start({mpi_program(), "stay", marker}) : start({rank_program(), "wait", marker});
  }
  bool all_stay(HvdrunProcess& process) const {
    return process.wait_for(mpi() ? "sum 30" : "ready", 4);
  }
  /// Disconnects the second host. hvdrun must report the loss of that host and end, and no process
  /// may outlive it on either side.
  void expect_both_sides_to_end_when_cut(HvdrunProcess& process, const std::string& marker) const {
    ASSERT_TRUE(hosts_.cut(1));
    const Result result = process.wait(25);
    EXPECT_EQ(result.code, 69) << result.err;
    EXPECT_THAT(result.err, HasSubstr("failed first: lost"));
    EXPECT_THAT(result.err, HasSubstr("host " + hosts_.name(1)));
    EXPECT_THAT(result.err, Not(HasSubstr("Process received signal")));
    EXPECT_THAT(wait_until_gone(marker), IsEmpty());
  }
};

INSTANTIATE_TEST_SUITE_P(Over, EachController, ::testing::Values("mpi", "ucx"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_P(EachController, RanksAndVariables) {
  const Result result =
      HvdrunProcess(start({"sh", "-c",
                           "echo rank $HVD_RANK of $HVD_SIZE on $(hostname) local $HVD_LOCAL_RANK "
                           "of $HVD_LOCAL_SIZE given $LAUNCHER_TEST_GIVEN forwarded "
                           "$NCCL_LAUNCHER_TEST"}))
          .wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(result.out,
                HasSubstr(rank_prefix(rank, 4) + "rank " + std::to_string(rank) + " of 4 on " +
                          hosts_.name(rank / 2) + " local " + std::to_string(rank % 2) +
                          " of 2 given yes forwarded too\n"));
  }
}

// The program checks the results of allreduces and an allgather. No other backend is allowed, so
// the job fails unless the ranks of a host share memory and the hosts communicate over TCP.
TEST_P(EachController, AnHvdJobRunsOnTheHierarchicalBackend) {
  if (!mpi() && !finds_ucx()) GTEST_SKIP() << "there is no UCX";
  Start job = start({HVD_TEST_JOB_PROGRAM, "none", "0", "0"});
  job.environment.push_back({"HVD_BACKEND", "hierarchical"});
  const Result result = HvdrunProcess(job).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(result.out,
                HasSubstr(rank_prefix(rank, 4) + "DONE " + std::to_string(rank) + "\n"));
  }
}

TEST_P(EachController, FailureNamesTheHost) {
  HvdrunProcess process(staying(unique_marker()));
  ASSERT_TRUE(all_stay(process));
  const std::vector<int> pids = hosts_.processes(1);
  ASSERT_THAT(pids, Not(IsEmpty()));
  ::kill(*std::max_element(pids.begin(), pids.end()), SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("killed by SIGKILL (9)  host " + hosts_.name(1) + "  local rank "));
}

TEST_P(EachController, HostDeathNamesTheHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(staying(marker));
  ASSERT_TRUE(all_stay(process));
  const auto began = std::chrono::steady_clock::now();
  hosts_.kill(1);
  const Result result = process.wait();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::printf("from a host's death to hvdrun's end: %.3f s\n", took.count());
  // The code is 137 if the rank's death was reported before the kernel killed its supervisor,
  // otherwise 69.
  EXPECT_TRUE(result.code == 137 || result.code == 69) << result.code << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: "));
  EXPECT_THAT(result.err, HasSubstr("host " + hosts_.name(1)));
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST_P(EachController, KillingHvdrunLeavesNothingOnTheOtherHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(mpi() ? staying(marker) : start({rank_program(), "stubborn", marker}));
  ASSERT_TRUE(all_stay(process));
  process.signal(SIGKILL);
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST_P(EachController, ACutLinkEndsBothSides) {
  const std::string marker = unique_marker();
  Start job = staying(marker);
  job.environment.push_back({"HVD_PEER_TIMEOUT", "3"});
  HvdrunProcess process(job);
  ASSERT_TRUE(all_stay(process));
  expect_both_sides_to_end_when_cut(process, marker);
}

TEST_P(EachController, ASlowLinkOnlyTakesTime) {
  if (!hosts_.slow(0, 200) || !hosts_.slow(1, 200)) GTEST_SKIP() << "tc cannot limit a link here";
  const Result result = HvdrunProcess(start({HVD_TEST_JOB_PROGRAM, "none", "0", "0"})).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "DONE "), 4) << result.out;
}

TEST_P(EachController, InterruptReachesTheOtherHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(staying(marker));
  ASSERT_TRUE(all_stay(process));
  process.signal(SIGINT);
  EXPECT_EQ(process.wait().code, 130);
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST_F(MultiHost, AnMpiProgramRunsOnBothHosts) {
  Start job = on_first_host({"--rsh", HVD_TEST_AGENT, "-np", "4", "-H",
                             hosts_.name(0) + ":2," + hosts_.name(1) + ":2", "--bind", "none",
                             mpi_program(), "sum"});
  const Result result = HvdrunProcess(job).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, " of 2 sum 30 "), 4) << result.out;
}

TEST_F(MultiHost, WithoutMpirunRankZerosAddressIsOneThatAnswers) {
  for (const int first : {0, 1}) {
    const Result result =
        HvdrunProcess(direct(first, {"sh", "-c",
                                     "echo $HVD_RANK on $(hostname), node $GROUP_RANK of "
                                     "$GROUP_WORLD_SIZE: $MASTER_ADDR"}))
            .wait();
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(result.err, "");
    for (int rank = 0; rank < 4; ++rank) {
      const int node = rank / 2;
      const int host = first == 0 ? node : 1 - node;
      const bool beside = first == 0 && host == 0;  // rank 0, hvdrun and this rank
      const std::string address = beside ? "127.0.0.1" : hosts_.address(first);
      EXPECT_THAT(result.out,
                  HasSubstr(std::to_string(rank) + " on " + hosts_.name(host) + ", node " +
                            std::to_string(node) + " of 2: " + address + "\n"));
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
                                      " 2 ucx hvdrun://"),
                2)
          << result.out;
    }
  }
}

// The same line on each host, and no remote shell.
TEST_F(MultiHost, NodesOfTorchrunsCommandLinesFormOneJob) {
  const std::string program = HVD_TEST_START_PROGRAM;
  if (program.empty() || !finds_ucx()) GTEST_SKIP() << "there is no UCX";
  std::vector<std::unique_ptr<HvdrunProcess>> nodes;
  for (const int node : {1, 0}) {
    Start start;
    start.prefix = hosts_.prefix(node);
    start.arguments = {"--nnodes",
                       "2",
                       "--nproc-per-node",
                       "2",
                       "--node-rank",
                       std::to_string(node),
                       "--master-addr",
                       hosts_.address(0),
                       "--bind",
                       "none",
                       program,
                       "work"};
    nodes.push_back(std::make_unique<HvdrunProcess>(start));
  }
  for (const int node : {1, 0}) {
    const Result result = nodes[static_cast<std::size_t>(1 - node)]->wait();
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    for (int local = 0; local < 2; ++local) {
      EXPECT_EQ(count(result.out, rank_prefix(2 * node + local, 4) + "OK " +
                                      std::to_string(2 * node + local) + " 4 " +
                                      std::to_string(local) + " 2 ucx tcp://"),
                2)
          << result.out;
    }
  }
}

// If a message were lost for good, the ranks would be lost before the loop ends.
TEST_F(MultiHost, WithoutMpirunALinkThatIsAwayForAMomentOnlyTakesTime) {
  const std::string program = HVD_TEST_START_PROGRAM;
  if (program.empty() || !finds_ucx()) GTEST_SKIP() << "there is no UCX";
  Start job = direct(0, {program, "loop", "seconds=9"});
  job.environment.push_back({"HVD_PEER_TIMEOUT", "6"});
  HvdrunProcess process(job);
  ASSERT_TRUE(process.wait_for("RUNNING ", 4));
  ASSERT_TRUE(hosts_.cut(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  ASSERT_TRUE(hosts_.mend(1));
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "OK "), 4) << result.out;
}

TEST(Agent, EndsAtASignalWhileItConnects) {
  asio::io_context io;
  asio::ip::tcp::acceptor mute = listen_anywhere(io, true);  // it accepts, and does not answer
  Start start;
  start.arguments = {"--agent"};
  start.input = encode(HostOrder{.program = {"true"}, .ranks = {0}});
  start.environment = {{"HVD_LAUNCHER_ADDRESSES", "127.0.0.1"},
                       {"HVD_LAUNCHER_PORT", std::to_string(port_of(mute))},
                       {"HVD_LAUNCHER_HOST", "another"},
                       {"HVD_LAUNCHER_TOKEN", "token"}};
  HvdrunProcess agent(start);
  const auto connection = mute.accept();
  agent.signal(SIGTERM);
  const Result result = agent.wait(10);
  EXPECT_EQ(result.code, 128 + SIGTERM) << result.err;
}

TEST(Hosts, ThisHostNeedsNoRemoteShell) {
  std::vector<std::string> names = {"localhost", "127.0.0.1", "[::1]", own_hostname()};
  for (const std::string& address : reachable_addresses())
    names.push_back(address.find(':') == std::string::npos ? address : "[" + address + "]");
  for (const std::string& name : names) {
    const Result result = run_hvdrun({"--controller", "ucx", "--rsh", "false", "-np", "2", "-H",
                                      name + ":2", rank_program(), "environment", "RANK"});
    EXPECT_EQ(result.code, 0) << name << result.err;
    EXPECT_THAT(result.out, HasSubstr("[1] RANK=1\n"));
  }
}

TEST(Hosts, TheRemoteShellGetsUsersAndAddressesAsSshTakesThem) {
  for (const char* host : {"user@h7", "fd00::7", "user@fd00::7"}) {
    std::string written = host;
    if (const std::size_t at = written.find("fd"); at != std::string::npos)
      written = written.substr(0, at) + "[" + written.substr(at) + "]";
    const Result result = run_hvdrun({"--controller", "ucx", "--dry-run", "--rsh", "ssh", "-np",
                                      "1", "-H", written + ":1", "./train"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("ssh " + std::string(host) + " "));
  }
}

TEST(LoneRanks, RanksThatNeverJoinAreWarnedOf) {
  if (!finds_ucx()) GTEST_SKIP() << "auto chooses mpirun";
  const auto run = [](const std::vector<std::string>& arguments) {
    const Result result = run_hvdrun(arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    return result.err;
  };
  EXPECT_THAT(run({"-np", "2", "sh", "-c", "true"}),
              HasSubstr("warning: none of the 2 ranks has joined a job of hvd"));
  EXPECT_THAT(run({"-np", "1", "sh", "-c", "true"}), IsEmpty());
  EXPECT_THAT(run({"--controller", "ucx", "-np", "2", "sh", "-c", "true"}), IsEmpty());
  EXPECT_THAT(run({"--nproc-per-node", "2", "sh", "-c", "true"}), IsEmpty());
  const std::string program = HVD_TEST_START_PROGRAM;
  if (program.empty()) return;
  EXPECT_THAT(run({"-np", "2", program, "work"}), IsEmpty());
}

TEST(Hosts, AnUnreachableOneIs69) {
  const Result result = run_hvdrun({"-np", "2", "-H", "no-such-host.invalid:2", "--mpi-args",
                                    "--mca plm_rsh_agent false", rank_program(), "wait"});
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("hvdrun: host no-such-host.invalid (ranks 0 and 1) could not be "
                        "reached or was lost"));
}

}  // namespace
}  // namespace hvd::launcher::test
