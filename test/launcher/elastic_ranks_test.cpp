// Elastic jobs as users run them: hvdrun, its agents, and workers with a data plane
// (test/elastic/elastic_program.cpp), which check every sum and that no commit is undone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Words = std::vector<std::string>;

constexpr const char* kProgram = HVD_TEST_ELASTIC_PROGRAM;
constexpr double kTimeout = 60;

Start job(Words options, const Words& program, const char* peer_timeout = "3") {
  Start start;
  options.insert(options.end(), {"--bind", "none", kProgram});
  options.insert(options.end(), program.begin(), program.end());
  start.arguments = options;
  start.environment = {{"HVD_PEER_TIMEOUT", peer_timeout}};
  return start;
}

/// Signals the process that a worker has printed. Returns false if it has printed none.
bool signal_worker(int worker, const std::string& out, int number) {
  const std::string begin = "worker " + std::to_string(worker) + " pid ";
  const std::size_t at = out.rfind(begin);
  const pid_t pid = at == std::string::npos ? 0 : std::atoi(out.c_str() + at + begin.size());
  return pid > 0 && ::kill(pid, number) == 0;
}

/// The lines that the ranks print at the end, without the worker: one text if all states are equal.
std::set<std::string> ends_in(const std::string& out) {
  std::set<std::string> ends;
  for (const std::string& line : lines_of(out)) {
    const std::size_t at = line.find("end at step");
    if (at != std::string::npos) ends.insert(line.substr(at));
  }
  return ends;
}

class ElasticRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(kProgram).empty()) GTEST_SKIP() << "elastic jobs need UCX";
  }
};

TEST_F(ElasticRanks, AnUndisturbedJobEndsInItsFirstGeneration) {
  const Result result =
      HvdrunProcess(job({"-np", "3", "--min-np", "2"}, {"100", "0", "-50"})).wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "generation 1, rank"), 3) << result.out;
  EXPECT_EQ(count(result.out, "generation"), 3);
  EXPECT_THAT(ends_in(result.out), SizeIs(1));
}

TEST_F(ElasticRanks, SurvivorsGoOnAndAReplacementReceivesTheirState) {
  const Gate gate{};
  Start start = job({"-np", "3", "--min-np", "2"}, {"1000", "10000", "-100"});
  start.environment.emplace_back("TEST_REPLACEMENT_DELAY", "2");
  start.environment.emplace_back("TEST_UNTIL", gate.path());
  HvdrunProcess hvdrun(start);
  ASSERT_TRUE(hvdrun.wait_for("generation 1, rank", 3, kTimeout));
  ASSERT_TRUE(signal_worker(2, hvdrun.out(), SIGKILL));
  ASSERT_TRUE(hvdrun.wait_for(" of 3,", 6, kTimeout));
  gate.open();
  const Result result = hvdrun.wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("rank 1 of 2,"));
  EXPECT_THAT(result.err, HasSubstr("worker 2 on"));
  EXPECT_THAT(ends_in(result.out), SizeIs(1)) << result.out;
  EXPECT_EQ(count(result.out, "end at step "), 3);
}

TEST_F(ElasticRanks, AStoppedWorkerIsReplaced) {
  HvdrunProcess hvdrun(job({"-np", "3", "--min-np", "2"}, {"1000", "10000", "-300"}, "1"));
  ASSERT_TRUE(hvdrun.wait_for("generation 1, rank", 3, kTimeout));
  ASSERT_TRUE(signal_worker(1, hvdrun.out(), SIGSTOP));
  const Result result = hvdrun.wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("worker 1 on"));
  EXPECT_THAT(ends_in(result.out), SizeIs(1)) << result.out;
}

TEST_F(ElasticRanks, AStalledWorkerIsNamedAndReplaced) {
  Start start = job({"-np", "3", "--min-np", "2"}, {"1000", "1000", "-100"});
  start.environment.emplace_back("TEST_STUCK", "2");
  start.environment.emplace_back("HVD_STALL_SHUTDOWN", "1");
  const Result result = HvdrunProcess(start).wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, ContainsRegex("worker 2 on .* was lost .*rank [0-2] \\(.*, worker 2\\)"));
  EXPECT_THAT(ends_in(result.out), SizeIs(1)) << result.out;
}

TEST_F(ElasticRanks, ManyDeathsLeaveTheResultAsItIs) {
  const Gate gate{};
  Start start = job({"-np", "4", "--min-np", "1", "--spares", "1"}, {"100", "10000", "-100"});
  start.environment.emplace_back("TEST_UNTIL", gate.path());
  HvdrunProcess hvdrun(start);
  std::set<int> killed;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kTimeout);
  while (killed.size() < 6 && std::chrono::steady_clock::now() < end) {
    hvdrun.wait_for("a text that it does not print", 1, 0.15);
    int worker = 1;
    while (worker < 20 &&
           (killed.contains(worker) || !signal_worker(worker, hvdrun.out(), SIGKILL)))
      ++worker;
    if (worker < 20) killed.insert(worker);
  }
  gate.open();
  const Result result = hvdrun.wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(killed, SizeIs(6)) << result.out;
  EXPECT_GE(count(result.err, "killed by signal 9"), 6);
  EXPECT_THAT(ends_in(result.out), SizeIs(1)) << result.out;
}

TEST_F(ElasticRanks, TheEndOfHvdrunEndsTheWorkers) {
  const std::string marker = unique_marker();
  HvdrunProcess hvdrun(
      job({"-np", "2", "--min-np", "1"}, {"100", "10000", "-100000", marker}, "1"));
  ASSERT_TRUE(hvdrun.wait_for("generation 1, rank", 2, kTimeout));
  ::kill(hvdrun.pid(), SIGKILL);
  EXPECT_THAT(wait_until_gone(marker, 20), IsEmpty());
}

}  // namespace
}  // namespace hvd::launcher::test
