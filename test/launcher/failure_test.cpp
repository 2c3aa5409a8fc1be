#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "base/text.h"
#include "hvdrun_process.h"
#include "system/text.h"

namespace hvd::launcher::test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// The final message of hvdrun, with the text that follows it on stderr.
std::string last_message(const Result& result) {
  const std::size_t at = result.err.rfind("hvdrun: rank ");
  return at == std::string::npos ? "" : result.err.substr(at);
}

TEST(Success, IsSilentAndZero) {
  const Result result = run_hvdrun({"-np", "2", rank_program(), "environment", "HVD_RANK"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("[0] HVD_RANK=0\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] HVD_RANK=1\n"));
}

TEST(Success, OfAnMpiProgram) {
  const Result result = run_hvdrun({"-np", "3", mpi_program(), "sum"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "sum 14 "), 3) << result.out;
}

TEST(Failure, ExitCodeOfTheFirstFailingRank) {
  const Result result = run_hvdrun({"-np", "4", rank_program(), "exit", "2", "3"});
  EXPECT_EQ(result.code, 3);
  const std::string message = last_message(result);
  EXPECT_THAT(message, StartsWith("hvdrun: rank 2 failed first: exited with code 3  host "));
  EXPECT_THAT(message, HasSubstr("local rank 2  pid "));
  EXPECT_THAT(message, HasSubstr("stopped the other "));
  EXPECT_THAT(message, HasSubstr("exit code 3\n"));
}

TEST(Failure, QuotesTheLastTwentyLinesOfStderr) {
  const Result result = run_hvdrun({"-np", "2", rank_program(), "exit", "1", "7"});
  const std::string message = last_message(result);
  EXPECT_THAT(message, Not(HasSubstr("| stderr line 10 of rank 1\n")));
  EXPECT_THAT(message, HasSubstr("| stderr line 11 of rank 1\n"));
  EXPECT_THAT(message, HasSubstr("| stderr line 30 of rank 1\n"));
  EXPECT_EQ(count(result.err, "[1] stderr line "), 30);
}

TEST(Failure, TailCanBeChosen) {
  const Result result = run_hvdrun({"-np", "1", "--tail", "2", rank_program(), "exit", "0", "7"});
  EXPECT_EQ(count(last_message(result), "| stderr line "), 2);
}

TEST(Failure, NamesTheSignalThatKilledTheRank) {
  for (const int signal : {SIGKILL, SIGSEGV}) {
    const Result result =
        run_hvdrun({"-np", "3", rank_program(), "signal", "1", std::to_string(signal)});
    EXPECT_EQ(result.code, 128 + signal);
    EXPECT_THAT(last_message(result), StartsWith(text("hvdrun: rank 1 failed first: killed by ",
                                                      signal_name(signal), " (", signal, ")")));
    EXPECT_EQ(count(result.err, "out-of-memory"), signal == SIGKILL ? 1 : 0);
  }
}

TEST(Failure, UncaughtException) {
  const Result result = run_hvdrun({"-np", "2", rank_program(), "throw", "1"});
  EXPECT_EQ(result.code, 134);
  EXPECT_THAT(last_message(result),
              StartsWith("hvdrun: rank 1 failed first: killed by SIGABRT (6)"));
  EXPECT_THAT(last_message(result), HasSubstr("|   what():  the tensor is on fire\n"));
}

// In seed 1 of the campaign of last screens SIGFPE kills one rank. The other rank catches the error
// and saves its work.
TEST(Failure, SurvivorsHaveTimeToSaveTheirWork) {
  Start start;
  start.environment = {{"LAST_SCREEN_SAVES", "1"}};
  start.arguments = {"-np", "2", HVD_TEST_LAST_SCREEN_PROGRAM, "1"};
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 128 + SIGFPE) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[0] saved\n"));
  EXPECT_THAT(result.err, HasSubstr("hvdrun: 1 rank (0) ended after it; exit code 136\n"));
  start.arguments = {"-np", "2", "--fail-grace", "0.1", HVD_TEST_LAST_SCREEN_PROGRAM, "1"};
  const Result hurried = HvdrunProcess(start).wait();
  EXPECT_EQ(hurried.code, 128 + SIGFPE) << hurried.err;
  EXPECT_THAT(hurried.out, Not(HasSubstr("saved")));
}

TEST(Failure, OfAnMpiProgramShowsNoBacktraceOfOpenMpi) {
  const Result result = run_hvdrun({"-np", "2", mpi_program(), "segv"});
  EXPECT_EQ(result.code, 139) << result.err;
  EXPECT_THAT(result.err, Not(HasSubstr("Process received signal")));
}

TEST(Failure, MpirunKilled) {
  const std::string marker = unique_marker();
  HvdrunProcess process(
      {.arguments = {"-np", "2", "sh", "-c",
                     "echo folder $OMPI_MCA_btl_vader_backing_directory; exec \"$@\"", "sh",
                     mpi_program(), "stay", marker}});
  ASSERT_TRUE(process.wait_for("sum 5", 2));
  const std::size_t begin = process.out().find("folder ") + 7;
  const std::filesystem::path segments =
      process.out().substr(begin, process.out().find('\n', begin) - begin);
  EXPECT_FALSE(std::filesystem::is_empty(segments));
  // mpirun is the oldest of the processes that hvdrun has started.
  std::vector<pid_t> pids = processes_with(marker);
  std::erase(pids, process.pid());
  ASSERT_FALSE(pids.empty());
  ::kill(*std::min_element(pids.begin(), pids.end()), SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 70) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: mpirun was killed by SIGKILL (9), not by hvdrun"));
  EXPECT_EQ(wait_until_gone(marker).size(), 0U);
  EXPECT_FALSE(std::filesystem::exists(segments)) << "Open MPI's shared memory";
}

TEST(Failure, ARankThatOnlyGotSigtermFromUsIsNotBlamed) {
  for (int i = 0; i < 5; ++i) {
    const Result result =
        run_hvdrun({"-np", "4", rank_program(), "signal", "3", std::to_string(SIGTERM)});
    EXPECT_EQ(result.code, 143);
    EXPECT_THAT(last_message(result), StartsWith("hvdrun: rank 3 failed first: killed by SIGTERM"));
  }
}

TEST(Failure, OfAnMpiProgramIsReportedOnce) {
  for (const auto& [mode, code, message] : {std::tuple("abort", 5, "exited with code 5"),
                                            std::tuple("kill", 137, "killed by SIGKILL (9)")}) {
    const Result result = run_hvdrun({"-np", "3", mpi_program(), mode});
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(last_message(result), StartsWith(text("hvdrun: rank 1 failed first: ", message)));
    EXPECT_THAT(result.err, Not(AnyOf(HasSubstr("mpirun"), HasSubstr("MPI_ABORT was invoked"))));
  }
}

TEST(Failure, MpirunsAccountIsShownWithVerbose) {
  const Result result = run_hvdrun({"-np", "2", "--verbose", mpi_program(), "leave"});
  EXPECT_THAT(result.err, HasSubstr("has exited due to process rank 1"));
}

TEST(Failure, LeavingWithoutFinalize) {
  const Result result = run_hvdrun({"-np", "3", mpi_program(), "leave"});
  EXPECT_EQ(result.code, 1) << result.err;
  EXPECT_THAT(last_message(result),
              StartsWith("hvdrun: rank 1 ended with code 0 but without MPI_Finalize"));
  EXPECT_THAT(result.err, Not(HasSubstr("exiting improperly")));
}

TEST(Program, MissingOneIsNamedBeforeAnythingStarts) {
  const Result result = run_hvdrun({"-np", "2", "./no-such-program", "arg"});
  EXPECT_EQ(result.code, 127);
  EXPECT_THAT(result.err, StartsWith("hvdrun: program './no-such-program' not found"));
  EXPECT_EQ(lines_of(result.err).size(), 1U);
  EXPECT_EQ(result.out, "");
}

TEST(Program, NotExecutable) {
  const Result result = run_hvdrun({"-np", "1", __FILE__});
  EXPECT_EQ(result.code, 126);
  EXPECT_THAT(result.err, HasSubstr("without execute permission"));
}

TEST(Hosts, OneOutOfReachIs69) {
  const Result result =
      run_hvdrun({"--rsh", HVD_TEST_PRETENDED_AGENT, "-np", "3", "-H", "localhost:1,dead.example:2",
                  rank_program(), "wait", unique_marker()});
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("No route to host\n"));
  EXPECT_THAT(result.err,
              HasSubstr("hvdrun: host dead.example (ranks 1 and 2) could not be reached "
                        "or was lost ("));
  EXPECT_EQ(result.out, "") << "no program starts before all supervisors are there";
}

TEST(Hosts, OneWithoutHvdrunIs127) {
  if (std::system("unshare --mount true 2>/dev/null") != 0)
    GTEST_SKIP() << "may not make a mount namespace";
  const std::string hvdrun = HVD_TEST_HVDRUN;
  HvdrunProcess process(
      {.arguments = {"--rsh", HVD_TEST_PRETENDED_AGENT, "-np", "2", "-H",
                     "localhost:1,empty.example:1", rank_program(), "wait", unique_marker()},
       .environment = {{"LAUNCHER_TEST_HIDDEN", hvdrun.substr(0, hvdrun.rfind('/'))}}});
  const Result result = process.wait(30);
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("did not find hvdrun on every host"));
}

TEST(Usage, IsTwo) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{},
        {"-np", "0", "ls"},
        {"-np", "x", "ls"},
        {"--nonsense", "ls"},
        {"-np", "2"},
        {"-np", "2", "-H", "a:b", "ls"},
        {"-np", "1", "-x", "LAUNCHER_TEST_UNSET", "ls"}}) {
    const Result result = run_hvdrun(arguments);
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_THAT(result.err, StartsWith("hvdrun: "));
  }
}

TEST(Slots, TooFewAre69) {
  const Result result = run_hvdrun({"-np", "5", "-H", "localhost:2", "ls"});
  EXPECT_EQ(result.code, 69);
  EXPECT_THAT(result.err, HasSubstr("-np 5"));
  EXPECT_THAT(result.err, HasSubstr("got 2 (localhost:2)"));
}

TEST(Slots, MoreRanksThanCoresNeedNoFlag) {
  const Result result = run_hvdrun({"-np", "9", rank_program(), "environment", "HVD_SIZE"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "HVD_SIZE=9\n"), 9);
}

TEST(Mpirun, MissingOneIsNamed) {
  HvdrunProcess process(
      {.arguments = {"-np", "1", "ls"}, .environment = {{"HVD_MPIRUN", "no-such-mpirun"}}});
  const Result result = process.wait();
  EXPECT_EQ(result.code, 127);
  EXPECT_THAT(result.err, HasSubstr("cannot run 'no-such-mpirun'"));
  EXPECT_THAT(result.err, HasSubstr("HVD_MPIRUN"));
}

TEST(Mpirun, ItsOwnErrorsArePassedOn) {
  const Result result = run_hvdrun({"-np", "1", "--mpi-args", "--no-such-mpirun-option", "ls"});
  EXPECT_NE(result.code, 0);
  EXPECT_THAT(result.err, HasSubstr("no-such-mpirun-option"));
}

TEST(DryRun, PrintsTheLineAndRunsNothing) {
  const Result result =
      run_hvdrun({"--controller", "mpi", "-np", "2", "--dry-run", rank_program(), "lines", "3"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(lines_of(result.out).size(), 1U);
  EXPECT_THAT(result.out, HasSubstr("mpirun -np 2 "));
  EXPECT_THAT(result.out, HasSubstr("--bind-to none"));
  EXPECT_THAT(result.out, HasSubstr(rank_program() + " lines 3\n"));
}

TEST(CheckBuild, NamesVersions) {
  const Result result = run_hvdrun({"--check-build"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("hvdrun: "));
  EXPECT_THAT(result.out, HasSubstr("mpirun: "));
  EXPECT_THAT(result.out, HasSubstr("LibTorch: "));
}

}  // namespace
}  // namespace hvd::launcher::test
