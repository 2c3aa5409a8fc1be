// Elastic jobs on two "hosts" with a network of their own (test/support/two_hosts.h), whose hosts
// are killed and disconnected. The workers (test/elastic/elastic_program.cpp) check every sum, and
// that no commit is undone. Skipped, with the reason, where such hosts cannot be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hvdrun_process.h"
#include "support/two_hosts.h"

namespace hvd::launcher::test {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr const char* kProgram = HVD_TEST_ELASTIC_PROGRAM;
constexpr double kTimeout = 40;

class ElasticHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(kProgram).empty()) GTEST_SKIP() << "elastic jobs need UCX";
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
  }

  /// hvdrun on host 0, and two workers on each host; the first ranks are on host `first`. A step
  /// takes 10 ms. A host that is silent for a third of the peer timeout is lost.
  Start job(int first, const char* peer_timeout) const {
    Start start;
    start.prefix = hosts_.prefix(0);
    start.arguments = {"--rsh",    HVD_TEST_AGENT,
                       "-np",      "4",
                       "--min-np", "2",
                       "--bind",   "none",
                       "-H",       hosts_.name(first) + ":2," + hosts_.name(1 - first) + ":2"};
    add_program(start);
    start.environment = {{"HVD_PEER_TIMEOUT", peer_timeout}};
    return start;
  }
  /// Adds the program, which makes at least 100 steps and does not end before the gate is open.
  void add_program(Start& start) const {
    start.arguments.insert(start.arguments.end(), {"-x", "TEST_UNTIL=" + gate_.path(), kProgram,
                                                   "1000", "10000", "-100", marker_});
  }
  std::vector<pid_t> processes_on(int host) const {
    const std::vector<int> all = hosts_.processes(host);
    return {all.begin(), all.end()};
  }
  static bool begins(HvdrunProcess& hvdrun) {
    return hvdrun.wait_for("generation 1, rank", 4, kTimeout);
  }
  /// Lets the workers end, and expects that all that are left do so after the same steps with the
  /// same state, and that no worker outlives the job on either host.
  Result expect_end(HvdrunProcess& hvdrun) const {
    gate_.open();
    const Result result = hvdrun.wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    std::set<std::string> ends;
    for (const std::string& line : lines_of(result.out)) {
      const std::size_t at = line.find("end at step");
      if (at != std::string::npos) ends.insert(line.substr(at));
    }
    EXPECT_THAT(ends, SizeIs(1)) << result.out;
    EXPECT_THAT(wait_until_gone(marker_), IsEmpty());
    return result;
  }

  const hvd::testing::TwoHosts hosts_;
  const Gate gate_{};
  const std::string marker_ = unique_marker();
};

TEST_F(ElasticHosts, AHostThatIsKilledReturns) {
  HvdrunProcess hvdrun(job(0, "6"));
  ASSERT_TRUE(begins(hvdrun));
  hosts_.kill(1);
  EXPECT_TRUE(hvdrun.wait_for(" of 2,", 2, kTimeout));
  EXPECT_TRUE(hvdrun.wait_for(" of 4,", 8, kTimeout));
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.err, HasSubstr(hosts_.name(1)));
}

TEST_F(ElasticHosts, AHostThatIsCutOffForGoodEndsItsWorkers) {
  HvdrunProcess hvdrun(job(0, "6"));
  ASSERT_TRUE(begins(hvdrun));
  ASSERT_TRUE(hosts_.cut(1));
  EXPECT_TRUE(hvdrun.wait_for(" of 2,", 2, kTimeout));
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.err, HasSubstr(hosts_.name(1)));
}

TEST_F(ElasticHosts, Rank0MayBeOnTheHostThatIsCutOff) {
  HvdrunProcess hvdrun(job(1, "6"));
  ASSERT_TRUE(begins(hvdrun));
  ASSERT_TRUE(hosts_.cut(1));
  EXPECT_TRUE(hvdrun.wait_for(" of 2,", 2, kTimeout));
  expect_end(hvdrun);
}

TEST_F(ElasticHosts, ACutThatIsShorterThanTheHeartbeatCostsNoWorker) {
  HvdrunProcess hvdrun(job(0, "15"));
  ASSERT_TRUE(begins(hvdrun));
  ASSERT_TRUE(hosts_.cut(1));
  std::this_thread::sleep_for(milliseconds(2000));
  ASSERT_TRUE(hosts_.mend(1));
  const Result result = expect_end(hvdrun);
  EXPECT_EQ(count(result.out, "generation"), 4) << result.out;
  EXPECT_THAT(result.err, Not(HasSubstr("lost")));
}

TEST_F(ElasticHosts, AHostThatReturnsAfterItsLeaseGetsNewWorkers) {
  HvdrunProcess hvdrun(job(0, "3"));
  ASSERT_TRUE(begins(hvdrun));
  ASSERT_TRUE(hosts_.cut(1));
  EXPECT_TRUE(hvdrun.wait_for(" of 2,", 2, kTimeout));
  std::this_thread::sleep_for(milliseconds(500));
  ASSERT_TRUE(hosts_.mend(1));
  EXPECT_TRUE(hvdrun.wait_for(" of 4,", 8, kTimeout));
  expect_end(hvdrun);
}

TEST_F(ElasticHosts, AFlappingHost) {
  HvdrunProcess hvdrun(job(1, "3"));
  ASSERT_TRUE(begins(hvdrun));
  for (const int cut_ms : {200, 1500, 600, 1200, 300}) {
    ASSERT_TRUE(hosts_.cut(1));
    std::this_thread::sleep_for(milliseconds(cut_ms));
    ASSERT_TRUE(hosts_.mend(1));
    std::this_thread::sleep_for(milliseconds(400));
  }
  expect_end(hvdrun);
}

/// The state moves from host to host, at last from all workers that have it to others.
TEST_F(ElasticHosts, AScriptAddsAndRemovesThem) {
  const TemporaryFolder folder;
  const auto list = [&](const std::string& hosts) {
    std::ofstream(folder.path() / "next") << hosts;
    std::filesystem::rename(folder.path() / "next", folder.path() / "hosts");
  };
  const std::string both[] = {hosts_.name(0) + ":2\n", hosts_.name(1) + ":2\n"};
  list(both[0]);
  Start start;
  start.prefix = hosts_.prefix(0);
  start.arguments = {"--host-discovery-script",
                     "cat " + (folder.path() / "hosts").string(),
                     "--rsh",
                     HVD_TEST_AGENT,
                     "-np",
                     "2",
                     "--max-np",
                     "4",
                     "--bind",
                     "none"};
  add_program(start);
  start.environment = {{"HVD_PEER_TIMEOUT", "6"}};
  HvdrunProcess hvdrun(start);
  ASSERT_TRUE(hvdrun.wait_for(" of 2,", 2, kTimeout));
  list(both[0] + both[1]);
  ASSERT_TRUE(hvdrun.wait_for(" of 4,", 4, kTimeout));
  list(both[1]);
  ASSERT_TRUE(hvdrun.wait_for(" of 2,", 4, kTimeout));
  list(both[0]);
  ASSERT_TRUE(hvdrun.wait_for("worker 5 pid", 1, kTimeout));
  ASSERT_TRUE(hvdrun.wait_for("worker 6 pid", 1, kTimeout));
  EXPECT_THAT(wait_until_gone(processes_on(1), kTimeout), IsEmpty());
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.err, Not(HasSubstr(" is lost")));
  EXPECT_EQ(count(result.out, "end at step"), 2) << result.out;
}

/// The same line on every node, without a remote shell; two of the nodes are host 1.
TEST_F(ElasticHosts, NodesJoinLeaveAndReturnByRendezvous) {
  const auto node = [this](int host) {
    Start start;
    start.prefix = hosts_.prefix(host);
    start.arguments = {"--nnodes",       "1:3",  "--nproc-per-node", "1",
                       "--rdzv-backend", "c10d", "--rdzv-endpoint",  hosts_.name(0) + ":29400",
                       "--bind",         "none"};
    add_program(start);
    start.environment = {{"HVD_PEER_TIMEOUT", "6"}};
    return std::make_unique<HvdrunProcess>(start);
  };
  const auto second = node(1);  // waits for the first one
  const auto first = node(0);
  ASSERT_TRUE(first->wait_for(" of 2,", 2, kTimeout));
  const auto third = node(1);
  ASSERT_TRUE(first->wait_for(" of 3,", 3, kTimeout));
  third->signal(SIGTERM);
  EXPECT_EQ(third->wait(kTimeout).code, 0);
  ASSERT_TRUE(first->wait_for(" of 2,", 4, kTimeout));
  const auto again = node(1);
  ASSERT_TRUE(first->wait_for(" of 3,", 6, kTimeout));
  const Result result = expect_end(*first);
  EXPECT_THAT(result.err, Not(HasSubstr(" is lost"))) << "all changes were in order";
  EXPECT_EQ(second->wait(kTimeout).code, 0);
  EXPECT_EQ(again->wait(kTimeout).code, 0);
}

/// A machine that is taken back: its ranks stop at a commit, and the others go on from there.
TEST_F(ElasticHosts, AHostWhoseAgentGetsSigtermLeavesWithoutTheLossOfAStep) {
  HvdrunProcess hvdrun(job(1, "6"));  // rank 0 is on the host that leaves
  ASSERT_TRUE(begins(hvdrun));
  for (const int pid : hosts_.processes(1)) {
    // The agent leads the processes of that host.
    std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
    const std::string words((std::istreambuf_iterator<char>(file)), {});
    if (words.find("hvdrun") != words.npos && words.find("--agent") != words.npos)
      ::kill(pid, SIGTERM);
  }
  ASSERT_TRUE(hvdrun.wait_for(" of 2,", 2, kTimeout));
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.err, HasSubstr("host " + hosts_.name(1) + " leaves the job"));
  EXPECT_THAT(result.err, Not(HasSubstr(" is lost")));
}

}  // namespace
}  // namespace hvd::launcher::test
