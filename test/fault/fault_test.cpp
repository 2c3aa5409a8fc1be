// Spawns real jobs in which a rank goes wrong, with mpirun's own killing switched off, and reads
// what the survivors got.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Report {
  std::string error;
  double seconds = 0;
  std::string message;
};

struct Outcome {
  int exit_code = -1;
  double seconds = 0;
  std::string output;
  std::map<int, Report> failed;
  std::map<int, double> shut_down;
  int done = 0;
};

Outcome parse(std::string output) {
  Outcome outcome;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(
        line.substr(line.find_first_not_of("[]0123456789 ") == std::string::npos
                        ? 0
                        : line.find_first_not_of("[]0123456789 ")));
    std::string word;
    int rank = 0;
    words >> word >> rank;
    if (word == "DONE") ++outcome.done;
    if (word == "SHUTDOWN") words >> outcome.shut_down[rank];
    if (word != "RANK") continue;
    Report& report = outcome.failed[rank];
    words >> report.error >> report.seconds;
    std::getline(words, report.message);
  }
  outcome.output = std::move(output);
  return outcome;
}

Outcome run(const std::string& command) {
  const auto begin = std::chrono::steady_clock::now();
  std::FILE* const pipe = ::popen(("timeout -s KILL 60 " + command + " 2>&1").c_str(), "r");
  std::string output;
  std::array<char, 4096> buffer;
  while (const std::size_t size = std::fread(buffer.data(), 1, buffer.size(), pipe))
    output.append(buffer.data(), size);
  const int status = ::pclose(pipe);
  Outcome outcome = parse(std::move(output));
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return outcome;
}

/// Three ranks under an mpirun that does not end the job by itself, so that only hvd can.
Outcome run_unsupervised(const std::string& mode, int victim, const std::string& environment = "") {
  return run("env " + environment +
             " HVD_PEER_TIMEOUT=3 HVD_STALL_WARNING=1 HVD_STALL_SHUTDOWN=3 " HVD_MPIEXEC
             " --enable-recovery --mca orte_abort_on_non_zero_status 0 --oversubscribe --bind-to "
             "none -np 3 " HVD_FAULT_PROGRAM " " +
             mode + " " + std::to_string(victim) + " 20");
}

void expect_peer_lost_on_survivors(const Outcome& outcome, int victim, double limit) {
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim) continue;
    const auto found = outcome.failed.find(rank);
    ASSERT_NE(found, outcome.failed.end()) << "rank " << rank << " got no error\n"
                                           << outcome.output;
    EXPECT_EQ(found->second.error, "PeerLostError") << outcome.output;
    EXPECT_THAT(found->second.message, HasSubstr("rank " + std::to_string(victim) + " (host "))
        << outcome.output;
    EXPECT_LT(found->second.seconds, limit) << outcome.output;
    EXPECT_LT(outcome.shut_down.at(rank), 1.0) << "shutdown() after a loss returns at once\n"
                                               << outcome.output;
  }
}

class EveryVictim : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Fault, EveryVictim, ::testing::Values(0, 1));

TEST_P(EveryVictim, AKilledRankIsNamedOnEverySurvivorAtOnce) {
  expect_peer_lost_on_survivors(run_unsupervised("kill", GetParam()), GetParam(), 2.0);
}

TEST_P(EveryVictim, AStoppedRankIsNamedOnEverySurvivorInsideThePeerTimeout) {
  expect_peer_lost_on_survivors(run_unsupervised("stop", GetParam()), GetParam(), 4.0);
}

TEST_P(EveryVictim, ARankKilledOnAnotherHostIsNamedInsideThePeerTimeout) {
  expect_peer_lost_on_survivors(run_unsupervised("kill", GetParam(), "HVD_TEST_HOSTS=a,b,c"),
                                GetParam(), 4.0);
}

// Two ranks share a host, so that its transfers run on the hierarchical backend.
TEST_P(EveryVictim, ARankKilledInTheMiddleOfATransferBetweenHostsIsNamed) {
  expect_peer_lost_on_survivors(run_unsupervised("kill-during", GetParam(), "HVD_TEST_HOSTS=a,a,b"),
                                GetParam(), 4.0);
  expect_peer_lost_on_survivors(run_unsupervised("kill-during", GetParam(), "HVD_TEST_HOSTS=a,b,b"),
                                GetParam(), 4.0);
}

TEST_P(EveryVictim, ARankThatDiesOfAnExceptionIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("throw", GetParam());
  expect_peer_lost_on_survivors(outcome, GetParam(), 2.0);
  for (const auto& [rank, report] : outcome.failed)
    EXPECT_THAT(report.message, HasSubstr("the data set is broken")) << outcome.output;
}

TEST_P(EveryVictim, ARankThatExitsEarlyIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("exit", GetParam());
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    ASSERT_TRUE(outcome.failed.contains(rank)) << outcome.output;
    EXPECT_EQ(outcome.failed.at(rank).error, "ShutdownError") << outcome.output;
    EXPECT_THAT(outcome.failed.at(rank).message,
                AllOf(HasSubstr("rank " + std::to_string(GetParam())),
                      HasSubstr("ended without shutdown()")))
        << outcome.output;
  }
}

TEST_P(EveryVictim, ARankThatShutsDownEarlyIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("leave", GetParam());
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    ASSERT_TRUE(outcome.failed.contains(rank)) << outcome.output;
    EXPECT_EQ(outcome.failed.at(rank).error, "ShutdownError") << outcome.output;
    EXPECT_THAT(outcome.failed.at(rank).message, HasSubstr("calls hvd::join() after its last"))
        << outcome.output;
  }
}

TEST_P(EveryVictim, AMismatchIsRaisedOnEveryRankAndTheJobGoesOn) {
  const Outcome outcome = run_unsupervised("mismatch", GetParam());
  EXPECT_EQ(outcome.failed.size(), 3U) << outcome.output;
  for (const auto& [rank, report] : outcome.failed) {
    EXPECT_EQ(report.error, "MismatchError") << outcome.output;
    EXPECT_THAT(report.message, AllOf(HasSubstr("'grad1'"), HasSubstr("[7]"), HasSubstr("[50000]")))
        << outcome.output;
  }
  EXPECT_EQ(outcome.shut_down.size(), 3U) << outcome.output;
}

TEST_P(EveryVictim, AnAbsentRankStallsTheOthersWhoSaySo) {
  const Outcome outcome = run_unsupervised("absent", GetParam());
  EXPECT_EQ(outcome.failed.size(), 3U) << outcome.output;  // the late rank, too, gets the error
  for (const auto& [rank, report] : outcome.failed) {
    EXPECT_EQ(report.error, "StalledError") << outcome.output;
    if (rank == GetParam()) continue;
    EXPECT_GT(report.seconds, 2.9)
        << outcome.output;  // stall_shutdown is 3 s, of tensors that were cached long ago
    EXPECT_LT(report.seconds, 3.6) << outcome.output;
  }
  EXPECT_THAT(outcome.output, HasSubstr(" waited 1.0 s for 1 of 3 ranks"));
  EXPECT_EQ(outcome.shut_down.size(), 3U) << outcome.output;
}

#ifdef HVD_HVDRUN
TEST(FaultUnderHvdrun, AKilledRankEndsTheJobWithItsNameAndItsCode) {
  const Outcome outcome = run(HVD_HVDRUN " -np 3 " HVD_FAULT_PROGRAM " kill 1 20");
  EXPECT_EQ(outcome.exit_code, 137) << outcome.output;
  EXPECT_LT(outcome.seconds, 10.0);
  EXPECT_THAT(outcome.output, HasSubstr("rank 1")) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("SIGKILL")) << outcome.output;
}

TEST(FaultUnderHvdrun, AHealthyJobEndsWithZero) {
  const Outcome outcome = run(HVD_HVDRUN " -np 3 " HVD_FAULT_PROGRAM " none 0 0");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.done, 3) << outcome.output;
}
#endif

}  // namespace
}  // namespace hvd::testing
