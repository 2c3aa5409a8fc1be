#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <iterator>
#include <regex>
#include <string>

#include "mpi/support/mpi_test.h"
#include "support/mpiexec.h"

// Runs peer_loss_program as a job of its own in which the last of three ranks is lost.

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;

struct Job {
  std::string output;
  Duration took = {};
};

Job run(const std::string& how) {
  const SteadyClock clock;
  const TimePoint start = clock.now();
  const std::string command =
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 exec timeout -k 5 40 " +
      testing::tolerant_mpiexec_line(HVD_MPIEXEC, 3) + HVD_TEST_PROGRAM " " + how + " 2>&1";
  Job job;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return job;
  }
  std::array<char, 4096> part{};
  while (fgets(part.data(), part.size(), pipe) != nullptr) job.output += part.data();
  pclose(pipe);
  job.took = clock.now() - start;
  return job;
}

/// Expects each survivor to have reported the loss of rank 2 within `limit`, with a cause that
/// contains `cause`.
void expect_noticed(const Job& job, int limit_ms, const std::string& cause) {
  for (int rank = 0; rank < 2; ++rank) {
    const std::regex line("rank " + std::to_string(rank) + " lost 2 after (-?[0-9]+) ms: (.*)");
    std::smatch match;
    if (!std::regex_search(job.output, match, line)) {
      ADD_FAILURE() << "rank " << rank << " did not report the loss of rank 2:\n" << job.output;
      continue;
    }
    std::printf("rank %d: after %s ms: %s\n", rank, match[1].str().c_str(), match[2].str().c_str());
    EXPECT_LT(std::stoi(match[1]), limit_ms) << job.output;
    EXPECT_NE(match[2].str().find(cause), std::string::npos) << job.output;
  }
  EXPECT_LT(job.took, 20s) << "the survivors must not hang at exit:\n" << job.output;
  std::smatch segments;
  ASSERT_TRUE(std::regex_search(job.output, segments, std::regex("segments (/hvd-.*)")));
  EXPECT_TRUE(testing::shared_memory_left_behind(segments[1].str()).empty());
}

TEST(PeerLoss, AKilledRankIsNoticedInASecond) { expect_noticed(run("kill"), 1000, " ended"); }

TEST(PeerLoss, ARankThatExitsInTheMiddleIsNoticedInASecond) {
  expect_noticed(run("exit"), 1000, " ended");
}

TEST(PeerLoss, AStoppedRankIsNoticedByItsSilence) {
  expect_noticed(run("stop"), 2500, "no sign of life for 1.");
}

/// Expects that ranks 0 and 1 have each printed a line, long before the test's deadline.
/// @param pattern of a line; "RANK" stands for the rank
void expect_each_survivor_prints(const Job& job, const std::string& pattern) {
  for (const char* const rank : {"0", "1"}) {
    const std::regex line(std::regex_replace(pattern, std::regex("RANK"), rank));
    EXPECT_TRUE(std::regex_search(job.output, line)) << job.output;
  }
  EXPECT_LT(job.took, 20s);
}

TEST(PeerLoss, AnAbsentRankEndsTheStart) {
  expect_each_survivor_prints(run("absent"), "rank RANK gave up: init: not all 3 ranks arrived");
}

// The rank is killed inside MPI_Init, which does not check a deadline of hvd and would wait
// forever.
TEST(PeerLoss, ARankThatDiesInsideTheStartOfMpiEndsTheStartOfTheOthers) {
  expect_each_survivor_prints(run("init-kill"),
                              "hvd::init: rank RANK has waited 1\\.[0-9] s \\(HVD_START_TIMEOUT\\) "
                              "and MPI_Init_thread has not returned.*ends with code 75");
}

// The deadline is 30 s.
TEST(PeerLoss, ARankThatDiesBeforeTheJobBeginsIsNamedLongBeforeTheDeadline) {
  expect_each_survivor_prints(run("begin-kill"),
                              "rank RANK gave up: hvd::init: rank 2 \\(host .*\\) ended while the "
                              "job began: process [0-9]+ ended");
}

TEST(PeerLoss, ARankThatGivesUpBecauseOfALossIsNotTakenForTheLoss) {
  expect_each_survivor_prints(run("begin-kill-late"),
                              "rank RANK gave up: hvd::init: rank 2 \\(host .*\\) ended while the "
                              "job began: process [0-9]+ ended.* \\(lost rank 2\\)");
}

TEST(PeerLoss, ARankThatMissesItsDeadlineIsNotTakenForTheLoss) {
  expect_each_survivor_prints(run("begin-late"),
                              "rank RANK gave up: init: not all 3 ranks arrived in time .*"
                              "\\(lost rank -1\\)");
}

// With MPICH and Intel MPI, MPI_Finalize waits for such a rank without a limit.
TEST(PeerLoss, ARankThatDoesNotFinaliseMpiEndsTheOthersWithinSeconds) {
  const Job job = run("unfinalised");
  const std::regex line(
      "rank [01] finalised|MPI_Finalize has not returned within 5\\.0 s .* ends with code 0");
  const std::sregex_iterator first(job.output.begin(), job.output.end(), line);
  EXPECT_EQ(std::distance(first, std::sregex_iterator()), 2) << job.output;
  EXPECT_LT(job.took, 20s);
}

TEST(PeerLoss, ARankInACallOfMpiThatDoesNotReturnEndsWithTheCause) {
  const Job job = run("hang");
  expect_noticed(job, 1500, "lost rank 2 (host ");
  expect_noticed(job, 1500, "MPI_Improbe has not returned for ");
  EXPECT_NE(job.output.find("; this process ends with code 75"), std::string::npos) << job.output;
}

// A rank gets SIGPIPE when it writes to a rank that has ended.
TEST(PeerLoss, ABrokenPipeEndsNoRank) {
  const Job job = run("pipe");
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NE(job.output.find("rank " + std::to_string(rank) + " lives"), std::string::npos)
        << job.output;
  }
}

}  // namespace
}  // namespace hvd::mpi
