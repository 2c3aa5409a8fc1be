// Starts real jobs in which one rank fails, and checks the errors that the survivors get. Jobs over
// MPI run under an mpirun that does not kill the survivors; jobs over UCX run without a launcher.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "support/free_port.h"
#include "support/mpiexec.h"
#include "support/run_command.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
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
        line.substr(std::min(line.size(), line.find_first_not_of("[]0123456789 "))));
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
  CommandResult ended = run_command(command, /*seconds=*/60);
  Outcome outcome = parse(std::move(ended.output));
  outcome.exit_code = ended.exit_code;
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return outcome;
}

/// How the ranks are started, which also determines the carrier of their messages. No starter ends
/// the job by itself, so only hvd can end it.
enum class Start { kMpirun, kByHand };

std::string command_of(Start start, int ranks, const std::string& program) {
  const std::string size = std::to_string(ranks);
  if (start == Start::kMpirun) return tolerant_mpiexec_line(HVD_MPIEXEC, ranks) + program;
  // Starts each rank by hand, as a user of PyTorch would in several terminals.
  std::string script;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string number = std::to_string(rank);
    script += "RANK=" + number + " LOCAL_RANK=" + number + " " + program + " & ";
  }
  return "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(free_port()) +
         " WORLD_SIZE=" + size + " sh -c '" + script + "wait'";
}

Outcome run_unsupervised(Start start, const std::string& mode, int victim,
                         const std::string& environment = "", int ranks = 3) {
  return run("env " + environment +
             " HVD_PEER_TIMEOUT=3 HVD_STALL_WARNING=1 HVD_STALL_SHUTDOWN=3 " +
             command_of(start, ranks,
                        HVD_FAULT_PROGRAM " " + mode + " " + std::to_string(victim) + " 20"));
}

void expect_peer_lost_on_survivors(const Outcome& outcome, int victim, double limit,
                                   int ranks = 3) {
  for (int rank = 0; rank < ranks; ++rank) {
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

class EveryVictim : public ::testing::TestWithParam<std::tuple<Start, int>> {
 protected:
  static int victim() { return std::get<int>(GetParam()); }
  static Outcome run_unsupervised(const std::string& mode, const std::string& environment = "",
                                  int ranks = 3) {
    return testing::run_unsupervised(std::get<Start>(GetParam()), mode, victim(), environment,
                                     ranks);
  }
};
INSTANTIATE_TEST_SUITE_P(Mpi, EveryVictim,
                         ::testing::Combine(::testing::Values(Start::kMpirun),
                                            ::testing::Values(0, 1)));
#ifdef HVD_FAULT_BY_HAND
INSTANTIATE_TEST_SUITE_P(Ucx, EveryVictim,
                         ::testing::Combine(::testing::Values(Start::kByHand),
                                            ::testing::Values(0, 1)));
#endif

TEST_P(EveryVictim, AKilledRankIsNamedOnEverySurvivorAtOnce) {
  expect_peer_lost_on_survivors(run_unsupervised("kill"), victim(), 2.0);
}

// The survivors detect the loss by the locks, doorbells and connections of the second job.
TEST_P(EveryVictim, ARankKilledInTheSecondJobOfItsProcessesIsNamedAtOnce) {
  expect_peer_lost_on_survivors(run_unsupervised("second-kill"), victim(), 2.0);
}

TEST_P(EveryVictim, TwoRanksKilledAtOnceEndTheJobOfTheOthers) {
  const Outcome outcome = run_unsupervised("kill-two", "", 4);
  EXPECT_EQ(outcome.failed.size(), 2U) << outcome.output;
  const std::string next = std::to_string(victim() + 1);
  for (const auto& [rank, report] : outcome.failed) {
    EXPECT_EQ(report.error, "PeerLostError") << outcome.output;
    EXPECT_THAT(report.message, AnyOf(HasSubstr("rank " + std::to_string(victim()) + " (host "),
                                      HasSubstr("rank " + next + " (host ")))
        << outcome.output;
    EXPECT_LT(report.seconds, 2.0) << outcome.output;
  }
}

// Its threads, locks and heartbeats are gone, but its process is alive.
TEST_P(EveryVictim, ARankThatBecomesAnotherProgramIsNamedInsideThePeerTimeout) {
  expect_peer_lost_on_survivors(run_unsupervised("exec"), victim(), 4.0);
}

TEST_P(EveryVictim, ALateRankIsWaitedFor) {
  const Outcome outcome = run_unsupervised("late");
  EXPECT_EQ(outcome.done, 3) << outcome.output;
  EXPECT_TRUE(outcome.failed.empty()) << outcome.output;
  EXPECT_THAT(outcome.output, ContainsRegex(" waited [0-9.]+ s for 1 of 3 ranks"));
}

TEST_P(EveryVictim, AStoppedRankIsNamedOnEverySurvivorInsideThePeerTimeout) {
  expect_peer_lost_on_survivors(run_unsupervised("stop"), victim(), 4.0);
}

TEST_P(EveryVictim, ARankKilledOnAnotherHostIsNamedInsideThePeerTimeout) {
  expect_peer_lost_on_survivors(run_unsupervised("kill", "HVD_TEST_HOSTS=a,b,c"), victim(), 4.0);
}

// Two ranks share a host, so that its transfers run on the hierarchical backend.
TEST_P(EveryVictim, ARankKilledInTheMiddleOfATransferBetweenHostsIsNamed) {
  expect_peer_lost_on_survivors(run_unsupervised("kill-during", "HVD_TEST_HOSTS=a,a,b"), victim(),
                                4.0);
  expect_peer_lost_on_survivors(run_unsupervised("kill-during", "HVD_TEST_HOSTS=a,b,b"), victim(),
                                4.0);
}

TEST_P(EveryVictim, ARankThatDiesOfAnExceptionIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("throw");
  expect_peer_lost_on_survivors(outcome, victim(), 2.0);
  for (const auto& [rank, report] : outcome.failed)
    EXPECT_THAT(report.message, HasSubstr("the data set is broken")) << outcome.output;
}

TEST_P(EveryVictim, ARankThatReportsItsFailureIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("fail");
  expect_peer_lost_on_survivors(outcome, victim(), 2.0);
  for (const auto& [rank, report] : outcome.failed)
    EXPECT_THAT(report.message, HasSubstr("it failed: the data set is broken")) << outcome.output;
}

TEST_P(EveryVictim, ARankThatExitsEarlyIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("exit");
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim()) continue;
    ASSERT_TRUE(outcome.failed.contains(rank)) << outcome.output;
    EXPECT_EQ(outcome.failed.at(rank).error, "ShutdownError") << outcome.output;
    EXPECT_THAT(
        outcome.failed.at(rank).message,
        AllOf(HasSubstr("rank " + std::to_string(victim())), HasSubstr("ended without shutdown()")))
        << outcome.output;
  }
}

TEST_P(EveryVictim, ARankThatShutsDownEarlyIsNamedOnEverySurvivor) {
  const Outcome outcome = run_unsupervised("leave");
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == victim()) continue;
    ASSERT_TRUE(outcome.failed.contains(rank)) << outcome.output;
    EXPECT_EQ(outcome.failed.at(rank).error, "ShutdownError") << outcome.output;
    EXPECT_THAT(outcome.failed.at(rank).message, HasSubstr("calls hvd::join() after its last"))
        << outcome.output;
  }
}

TEST_P(EveryVictim, AMismatchIsRaisedOnEveryRankAndTheJobGoesOn) {
  const Outcome outcome = run_unsupervised("mismatch");
  EXPECT_EQ(outcome.failed.size(), 3U) << outcome.output;
  for (const auto& [rank, report] : outcome.failed) {
    EXPECT_EQ(report.error, "MismatchError") << outcome.output;
    EXPECT_THAT(report.message, AllOf(HasSubstr("'grad1'"), HasSubstr("[7]"), HasSubstr("[50000]")))
        << outcome.output;
  }
  EXPECT_EQ(outcome.shut_down.size(), 3U) << outcome.output;
}

TEST_P(EveryVictim, AnAbsentRankStallsTheOthersAndIsNamed) {
  const Outcome outcome = run_unsupervised("absent");
  EXPECT_EQ(outcome.failed.size(), 3U) << outcome.output;  // the late rank, too, gets the error
  for (const auto& [rank, report] : outcome.failed) {
    EXPECT_EQ(report.error, "StalledError") << outcome.output;
    if (rank == victim()) continue;
    EXPECT_GT(report.seconds, 2.9)
        << outcome.output;  // stall_shutdown is 3 s, of tensors that were cached long ago
    EXPECT_LT(report.seconds, 3.6) << outcome.output;
  }
  EXPECT_THAT(outcome.output, ContainsRegex(" waited [0-9.]+ s for 1 of 3 ranks"));
  EXPECT_EQ(outcome.shut_down.size(), 3U) << outcome.output;
}

TEST_P(EveryVictim, AKilledRankEndsTheMessagesOfEverySurvivorAtOnce) {
  expect_peer_lost_on_survivors(run_unsupervised("messages-kill"), victim(), 2.0);
  expect_peer_lost_on_survivors(run_unsupervised("messages-kill-during"), victim(), 2.0);
}

TEST_P(EveryVictim, AStoppedRankEndsTheMessagesOfEverySurvivorInsideThePeerTimeout) {
  expect_peer_lost_on_survivors(run_unsupervised("messages-stop"), victim(), 4.0);
}

// Two ranks pass messages while both wait for them. The moment of the kill is random.
TEST_P(EveryVictim, ARankThatIsLostBetweenCallsEndsThoseOfTheOther) {
  constexpr int kRanks = 2;
  expect_peer_lost_on_survivors(run_unsupervised("calls-kill", "", kRanks), victim(), 2.0, kRanks);
  expect_peer_lost_on_survivors(run_unsupervised("calls-stop", "", kRanks), victim(), 4.0, kRanks);
  for (int kill = 0; kill < 5; ++kill) {
    expect_peer_lost_on_survivors(run_unsupervised("calls-kill-during", "", kRanks), victim(), 2.0,
                                  kRanks);
  }
}

TEST_P(EveryVictim, ARankKilledOnAnotherHostEndsTheMessagesOfEverySurvivor) {
  expect_peer_lost_on_survivors(run_unsupervised("messages-kill", "HVD_TEST_HOSTS=a,b,c"), victim(),
                                4.0);
  expect_peer_lost_on_survivors(run_unsupervised("messages-kill-during", "HVD_TEST_HOSTS=a,a,b"),
                                victim(), 4.0);
}

TEST_P(EveryVictim, ARankThatLeavesEndsTheMessagesOfEverySurvivor) {
  for (const std::string mode : {"messages-leave", "messages-exit"}) {
    const Outcome outcome = run_unsupervised(mode);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim()) continue;
      ASSERT_TRUE(outcome.failed.contains(rank)) << outcome.output;
      EXPECT_EQ(outcome.failed.at(rank).error, "ShutdownError") << outcome.output;
      EXPECT_LT(outcome.failed.at(rank).seconds, 2.0) << outcome.output;
      EXPECT_THAT(outcome.failed.at(rank).message, HasSubstr("rank " + std::to_string(victim())))
          << outcome.output;
    }
  }
}

TEST_P(EveryVictim, AMismatchOfAMessageIsRaisedOnBothSidesAndTheJobGoesOn) {
  const Outcome outcome = run_unsupervised("messages-mismatch");
  const int next = (victim() + 1) % 3;
  EXPECT_EQ(outcome.failed.size(), 2U) << outcome.output;
  for (const int rank : {victim(), next}) {
    ASSERT_TRUE(outcome.failed.contains(rank)) << outcome.output;
    EXPECT_EQ(outcome.failed.at(rank).error, "MismatchError") << outcome.output;
    EXPECT_LT(outcome.failed.at(rank).seconds, 1.0) << outcome.output;
    EXPECT_THAT(
        outcome.failed.at(rank).message,
        AllOf(HasSubstr("rank " + std::to_string(victim()) + " sends 7 elements of float32"),
              HasSubstr("rank " + std::to_string(next) + " expects 50000 of float32")))
        << outcome.output;
  }
  EXPECT_EQ(outcome.shut_down.size(), 3U) << outcome.output;
}

#ifdef HVD_HVDRUN
/// hvdrun with each --controller that was built.
std::vector<std::string> hvdruns() {
  std::vector<std::string> commands;
  std::istringstream controllers(HVD_CONTROLLERS);
  for (std::string controller; controllers >> controller;)
    commands.push_back(HVD_HVDRUN " --controller " + controller);
  return commands;
}

TEST(FaultUnderHvdrun, AKilledRankEndsTheJobWithItsNameAndItsCode) {
  for (const std::string& hvdrun : hvdruns()) {
    const Outcome outcome = run(hvdrun + " -np 3 " HVD_FAULT_PROGRAM " kill 1 20");
    EXPECT_EQ(outcome.exit_code, 137) << outcome.output;
    EXPECT_LT(outcome.seconds, 10.0);
    EXPECT_THAT(outcome.output, HasSubstr("rank 1")) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("SIGKILL")) << outcome.output;
  }
}

// The stopped rank cannot end by itself, and the others return 0.
TEST(FaultUnderHvdrun, AStoppedRankIsEndedAndNamedWhenTheOthersHaveEnded) {
  for (const std::string& hvdrun : hvdruns()) {
    for (const std::string mode : {"saves-stop", "stop-last"}) {
      const Outcome outcome =
          run("env HVD_PEER_TIMEOUT=2 " + hvdrun +
              " --fail-grace 0.5 -np 3 " HVD_FAULT_PROGRAM " " + mode + " 1 20");
      EXPECT_EQ(outcome.exit_code, 69) << outcome.output;
      EXPECT_THAT(outcome.output,
                  AllOf(HasSubstr("hvdrun: rank 1 failed first: the other ranks lost it"),
                        HasSubstr("gave no sign of life"), HasSubstr("exit code 69\n")));
      EXPECT_THAT(outcome.shut_down, ::testing::SizeIs(2)) << outcome.output;
    }
  }
}

TEST(FaultUnderHvdrun, ARankThatEndsWithZeroAndWithoutShutdownIsNamedIfAnotherFailsOfIt) {
  for (const std::string& hvdrun : hvdruns()) {
    for (const std::string mode : {"exit", "quit"}) {
      const Outcome outcome = run(hvdrun + " -np 3 " HVD_FAULT_PROGRAM " " + mode + " 1 20");
      EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
      EXPECT_THAT(outcome.output,
                  HasSubstr("hvdrun: rank 1 ended with code 0 but without hvd::shutdown()"));
    }
    const Outcome outcome =
        run("env HVD_START_TIMEOUT=3 " + hvdrun + " -np 3 " HVD_FAULT_PROGRAM " skip 1 20");
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    // mpirun may detect it before HVD_START_TIMEOUT, because the others call MPI_Init.
    EXPECT_THAT(outcome.output,
                AnyOf(HasSubstr("hvdrun: rank 1 ended with code 0 before hvd::init()"),
                      HasSubstr("hvdrun: rank 1 ended with code 0 but without MPI_Finalize")));
  }
}

TEST(FaultUnderHvdrun, RanksThatAllEndWithZeroMakeAJobOfZero) {
  for (const std::string& hvdrun : hvdruns()) {
    for (const std::string mode : {"saves-quit", "saves-exit", "quit-all"}) {
      const Outcome outcome = run(hvdrun + " -np 3 " HVD_FAULT_PROGRAM " " + mode + " 1 20");
      EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
      EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("hvdrun: "))) << outcome.output;
    }
  }
}

// The rank has fewer batches than the others, which fail because of that.
TEST(FaultUnderHvdrun, ARankThatLeavesEarlyByShutdownIsNotTheOneThatFailed) {
  for (const std::string& hvdrun : hvdruns()) {
    const Outcome outcome = run(hvdrun + " -np 3 " HVD_FAULT_PROGRAM " leave-well 1 20");
    EXPECT_EQ(outcome.exit_code, 3) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(ContainsRegex("hvdrun: rank [02] failed first: exited with"),
                                      HasSubstr("rank 1 (")));
    EXPECT_THAT(outcome.output, HasSubstr("call hvd::join() before hvd::shutdown()"));
  }
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// The error is printed by the rank that threw, by the other rank's log and its program, and in
// hvdrun's last message.
TEST(FaultUnderHvdrun, AnUncaughtErrorIsPrintedFourTimesAtTwoRanks) {
  for (const std::string& hvdrun : hvdruns()) {
    const Outcome outcome = run(hvdrun + " -np 2 " HVD_FAULT_PROGRAM " throw 1 20");
    EXPECT_EQ(outcome.exit_code, 134) << outcome.output;
    EXPECT_LE(count(outcome.output, "the data set is broken"), 4U) << outcome.output;
  }
}

TEST(FaultUnderHvdrun, TheSummaryHasTheCauseThatARankReported) {
  for (const std::string& hvdrun : hvdruns()) {
    const Outcome outcome = run(hvdrun + " -np 2 " HVD_FAULT_PROGRAM " fail 1 20");
    EXPECT_EQ(outcome.exit_code, 3) << outcome.output;
    EXPECT_THAT(outcome.output.substr(outcome.output.rfind("failed first: exited with code 3")),
                HasSubstr("it failed: the data set is broken"))
        << outcome.output;
  }
}

TEST(FaultUnderHvdrun, TheSummaryReportsThatAllRanksThrewTheSame) {
  for (const std::string& hvdrun : hvdruns()) {
    const Outcome outcome = run(hvdrun + " -np 2 " HVD_FAULT_PROGRAM " throw-all 1 20");
    EXPECT_EQ(outcome.exit_code, 134) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("(all 2 ranks threw the same"));
  }
}

TEST(FaultUnderHvdrun, AHealthyJobEndsWithZero) {
  for (const std::string& hvdrun : hvdruns()) {
    const Outcome outcome = run(hvdrun + " -np 3 " HVD_FAULT_PROGRAM " none 0 0");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_EQ(outcome.done, 3) << outcome.output;
  }
}
#endif

}  // namespace
}  // namespace hvd::testing
