// Restarts of all ranks after one has failed: hvdrun --max-restarts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <vector>

#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

using Words = std::vector<std::string>;

/// A job whose ranks hvdrun starts itself.
Start restartable(const Words& arguments) {
  Start start;
  start.arguments = {"--controller", "ucx"};
  start.arguments.insert(start.arguments.end(), arguments.begin(), arguments.end());
  return start;
}

Result run_restartable(const Words& arguments) {
  return HvdrunProcess(restartable(arguments)).wait();
}

/// Fails on rank 1 in the first `failing` attempts, once rank 0 has printed its line and waits.
/// @param marks the begin of the names of files that are not there yet
Words failing_attempts(const std::string& failing, const std::string& marks) {
  return {"sh", "-c",
          "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS in "
          "$TORCHELASTIC_RUN_ID; [ $TORCHELASTIC_RESTART_COUNT -lt " +
              failing + " ] || exit 0; mark=" + marks +
              "$TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] && { : >$mark; exec sleep 60; }; "
              "until [ -e $mark ]; do sleep 0.01; done; exit 7"};
}

Result run_with_restarts(const Words& options, const std::string& failing) {
  const TemporaryFolder folder;
  Words arguments = options;
  for (const std::string& word : failing_attempts(failing, folder.path() / "attempt"))
    arguments.push_back(word);
  return run_restartable(arguments);
}

TEST(Restarts, RanksAreRestartedTogetherAfterAFailure) {
  for (const Words& ranks : {Words{"-np", "2"}, Words{"--nproc-per-node", "2"}}) {
    Words options = ranks;
    options.insert(options.end(), {"--max-restarts", "3", "--fail-grace", "0.1"});
    const Result result = run_with_restarts(options, "2");
    EXPECT_EQ(result.code, 0) << result.err;
    for (int attempt = 0; attempt < 3; ++attempt)
      for (int rank = 0; rank < 2; ++rank)
        EXPECT_EQ(count(result.out, "[" + std::to_string(rank) + "] attempt " +
                                        std::to_string(attempt) + " of 3 in none\n"),
                  1)
            << result.out;
    EXPECT_EQ(count(result.err, "rank 1 failed first"), 2) << result.err;
    EXPECT_THAT(result.err, HasSubstr("hvdrun: all ranks are started again: restart 2 of 3"));
  }
}

TEST(Restarts, TheLastFailureEndsTheJobWithTheRanksExitCode) {
  const Result result =
      run_with_restarts({"-np", "2", "--max-restarts", "1", "--fail-grace", "0.1"}, "9");
  EXPECT_EQ(result.code, 7) << result.err;
  EXPECT_EQ(count(result.err, "all ranks are started again"), 1) << result.err;
  EXPECT_EQ(count(result.out, "attempt"), 4);
  const Result without = run_restartable({"-np", "1", "sh", "-c", "echo id=$TORCHELASTIC_RUN_ID="});
  EXPECT_THAT(without.out, HasSubstr("id==")) << "the job counts no restarts";
}

TEST(Restarts, AnInterruptedJobAndATimeoutAreNotRestarted) {
  HvdrunProcess process(
      restartable({"-np", "2", "--max-restarts", "3", "sh", "-c", "echo ready; exec sleep 60"}));
  ASSERT_TRUE(process.wait_for("ready", 2));
  process.signal(SIGTERM);
  const Result interrupted = process.wait();
  EXPECT_EQ(interrupted.code, 143) << interrupted.err;
  EXPECT_THAT(interrupted.err, Not(HasSubstr("started again")));
  const Result late = run_restartable(
      {"-np", "2", "--max-restarts", "3", "--timeout", "1", "--grace", "0.1", "sleep", "60"});
  EXPECT_EQ(late.code, 124) << late.err;
  EXPECT_THAT(late.err, Not(HasSubstr("started again")));
}

TEST(Restarts, RestartsAreForRanksThatHvdrunStartsItself) {
  const Result result = run_hvdrun(
      {"-np", "2", "--controller", "mpi", "--max-restarts", "3", rank_program(), "environment"});
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("--max-restarts is for ranks that hvdrun starts itself"));
}

}  // namespace
}  // namespace hvd::launcher::test
