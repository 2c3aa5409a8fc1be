// hvd::launch(): each test runs one scenario of launch_program, and checks that the program leaves
// no child and no file behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <utility>

#include "support/process.h"

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Launch : public ::testing::Test {
 protected:
  Launch() {
    std::string name = ::testing::TempDir() + "launch-test-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~Launch() override { std::filesystem::remove_all(folder_); }

  Process start(const std::string& scenario) const {
    return Process({HVD_LAUNCH_PROGRAM, scenario}, {{"TMPDIR", folder_.string()}});
  }
  static Process::Deadline deadline() {
    return std::chrono::steady_clock::now() + std::chrono::seconds(60);
  }
  void expect_no_files() const {
    EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "files are left behind";
  }
  /// The output of a scenario that ends by itself.
  std::string output_of(const std::string& scenario) const {
    const auto end = start(scenario).wait(deadline());
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_EQ(count(end.output, "begin\n"), 1) << end.output;
    EXPECT_EQ(count(end.output, "no children\n"), 1) << end.output;
    expect_no_files();
    return end.output;
  }

  std::filesystem::path folder_;
};

TEST_F(Launch, ReturnsTheResultsInTheOrderOfTheRanksAndCanBeRepeated) {
  const std::string results = "0 of 3: a text 33\n1 of 3: a text 33\n2 of 3: a text 33\n";
  EXPECT_THAT(output_of("results"), HasSubstr(results + results));
}

TEST_F(Launch, RunsFunctionsThatDoNotCallInit) {
  const std::string output = output_of("without_init");
  EXPECT_THAT(output, HasSubstr("1 0 1 0 "));
  EXPECT_EQ(count(output, "a void function\n"), 2) << output;
  EXPECT_THAT(output, HasSubstr("1 result of a job of 1\n20971520 bytes\n"));
}

TEST_F(Launch, ThrowsTheFirstFailureWithItsRankAndText) {
  EXPECT_THAT(output_of("throws"),
              HasSubstr("RankError rank 1 signal 0: hvd::launch: rank 1 failed: out of data (and 2 "
                        "more ranks failed or were ended)"));
  const std::string from_torch = output_of("throws_from_torch");
  EXPECT_THAT(from_torch, HasSubstr("hvd::launch: rank 1 failed: a tensor is wrong"));
  EXPECT_THAT(from_torch, Not(HasSubstr("frame #")));
}

TEST_F(Launch, NamesAKilledRankAndOneThatHasCalledExit) {
  EXPECT_THAT(output_of("killed"),
              HasSubstr("RankError rank 1 signal 9: hvd::launch: rank 1 was killed by signal 9 "
                        "(Killed)"));
  EXPECT_THAT(output_of("exits"),
              HasSubstr("RankError rank 1 signal 0: hvd::launch: rank 1 ended with exit code 3 "
                        "before its function returned"));
}

TEST_F(Launch, EndsRanksThatGoOnAfterAFailure) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string output = output_of("slow_others");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  EXPECT_EQ(count(output, "RankError rank 1 signal 0: hvd::launch: rank 1 failed: out of data"), 2)
      << output;
}

TEST_F(Launch, EndsTheRanksAndThenTheProgramOnCtrlC) {
  for (const auto& [number, to_group] :
       {std::pair(SIGINT, true), std::pair(SIGINT, false), std::pair(SIGTERM, false)}) {
    Process program = start("endless");
    ASSERT_TRUE(program.wait_for(" runs\n", 2, deadline())) << program.written();
    ::kill(to_group ? -program.pid() : program.pid(), number);
    // The output ends when no process has it open.
    const auto end = program.wait(deadline());
    EXPECT_EQ(end.code, 128 + number) << end.output;
    expect_no_files();
  }
}

TEST_F(Launch, ThrowsForASignalThatTheProgramHandles) {
  Process program = start("handled_signal");
  ASSERT_TRUE(program.wait_for("rank runs\n", 2, deadline())) << program.written();
  program.signal(SIGINT);
  const auto end = program.wait(deadline());
  EXPECT_EQ(end.code, 0);
  EXPECT_THAT(end.output, HasSubstr("Error: hvd::launch: interrupted by signal 2 (Interrupt); its "
                                    "ranks have ended\nno children\n"));
  expect_no_files();
}

TEST_F(Launch, RanksEndWithAParentThatIsKilled) {
  Process program = start("endless");
  ASSERT_TRUE(program.wait_for(" runs\n", 2, deadline())) << program.written();
  program.signal(SIGKILL);
  const auto end = program.wait(deadline());
  EXPECT_EQ(end.code, 128 + SIGKILL) << end.output;
  EXPECT_THAT(end.output, Not(HasSubstr("THE TEST HAS KILLED IT")));
}

TEST_F(Launch, RefusesWrongArguments) {
  const std::string output = output_of("wrong_arguments");
  EXPECT_THAT(output,
              HasSubstr("UsageError: hvd::launch: num_processes: expected at least 1, got 0"));
  EXPECT_THAT(output,
              HasSubstr("UsageError: hvd::launch: grace: expected 0 or more milliseconds, got -1"));
}

TEST_F(Launch, IsRefusedInAJobAndWorksAfterIt) {
  const std::string output = output_of("around_a_job");
  EXPECT_THAT(output, HasSubstr("UsageError: hvd::launch: this process is rank 0 of 1 of a job"));
  EXPECT_THAT(output, HasSubstr("call launch() before init() or after shutdown()"));
  EXPECT_THAT(output, HasSubstr("after shutdown: 2\n"));
}

TEST_F(Launch, ARankLaunchesRanksBeforeInitOnly) {
  const std::string output = output_of("nested");
  EXPECT_THAT(output, HasSubstr("3 in 2\n3 in 2\n"));
  EXPECT_THAT(output, HasSubstr("failed: hvd::launch: this process is rank"));
}

TEST_F(Launch, RefusesAProcessThatHasUsedCuda) {
  const std::string output = output_of("cuda");
  if (count(output, "no permission\n") > 0) GTEST_SKIP() << "cannot mount a /dev";
  EXPECT_THAT(output, HasSubstr("UsageError: hvd::launch: this process has used CUDA"));
  EXPECT_THAT(output, HasSubstr("without the file: launched\n"));
}

TEST_F(Launch, RefusesAThreadWhileAnotherLaunches) {
  const std::string output = output_of("concurrent");
  EXPECT_THAT(output, HasSubstr("UsageError: hvd::launch: another thread of this process is in "
                                "launch(); expected one at a time"));
  EXPECT_THAT(output, HasSubstr("other: 1\n"));
  EXPECT_THAT(output, HasSubstr("afterwards: 5\n"));
}

TEST_F(Launch, RefusesAProcessWithThreadsUnlessTheyAreAllowed) {
  const std::string output = output_of("threads");
  EXPECT_THAT(output, HasSubstr("UsageError: hvd::launch: this process has "));
  EXPECT_THAT(output, HasSubstr("pass allow_threads = true"));
  EXPECT_EQ(count(output, "1 thread\n"), 2) << output;
}

}  // namespace
}  // namespace hvd::testing
