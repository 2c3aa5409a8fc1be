// Tests how ranks find each other through hvdrun, with real processes that are wrapped and started
// as users do it, and with jobs that must not start. start_campaign tests kills at random moments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "start/other_build.h"

namespace hvd::launcher::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Words = std::vector<std::string>;

class HvdrunMeeting : public ::testing::Test {
 protected:
  void SetUp() override {
    if (program_.empty()) GTEST_SKIP() << "hvd was built without UCX";
    if (!finds_ucx()) GTEST_SKIP() << "libucp.so.0 cannot be loaded";
  }
  static Start with(const Words& arguments) {
    Start start{.arguments = {"--controller", "ucx"}};
    start.arguments.insert(start.arguments.end(), arguments.begin(), arguments.end());
    return start;
  }
  static Result run(const Words& arguments) { return HvdrunProcess(with(arguments)).wait(60); }
  /// Runs a job of three ranks in which rank 1 goes wrong after all have begun. The others have
  /// much time to report it: one that waits instead is killed, and prints no line.
  static Result run_three(const Words& command, const Words& options = {}) {
    const TemporaryFolder folder;
    Words words = {"-np", "3",  "--fail-grace",
                   "20",  "-x", "HVD_TEST_MEETING_FOLDER=" + folder.path().string()};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), command.begin(), command.end());
    return run(words);
  }
  /// Runs a job of three ranks in which rank 1 behaves as `mode` defines.
  Result run_mode(const std::string& mode, const Words& options = {}) const {
    return run_three({program_, mode}, options);
  }
  /// Expects that ranks 0 and 2 have each printed `text`.
  static void expect_of_others(const Result& result, const std::string& text) {
    for (const int rank : {0, 2}) {
      EXPECT_THAT(result.out, HasSubstr("[" + std::to_string(rank) + "] " + text))
          << "rank " << rank << " was not informed\n"
          << result.err;
    }
  }
  static void expect_lives(const Result& result, int ranks, int lives,
                           const std::string& method = "hvdrun://") {
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(count(result.out,
                      "OK " + std::to_string(rank) + " " + std::to_string(ranks) + " " + method),
                lives)
          << result.out << result.err;
    }
  }

  const std::string program_ = HVD_TEST_MEETING_PROGRAM;
};

TEST_F(HvdrunMeeting, RanksMeetAgainAndAgain) {
  expect_lives(run({"-np", "3", program_, "lives"}), 3, 3);
  expect_lives(run({"-np", "3", "-H", "localhost:1,b:2", "--rsh", HVD_TEST_PRETENDED_AGENT,
                    program_, "lives"}),
               3, 3);
}

// The shell and Python wrappers close descriptors, fork, and stay alive while the rank runs.
TEST_F(HvdrunMeeting, ThroughShellsAndPythons) {
  expect_lives(run({"-np", "2", "sh", "-c", "exec 3>&- 4>&- 5>&-; \"$@\"; code=$?; exit $code",
                    "sh", program_, "lives"}),
               2, 3);
  const std::string python =
      "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], close_fds=True))";
  if (std::system("python3 -c pass") != 0) GTEST_SKIP() << "there is no python3";
  expect_lives(run({"-np", "2", "python3", "-c", python, program_, "lives"}), 2, 3);
}

TEST_F(HvdrunMeeting, WithoutTheVariablesARankIsAloneAsWithoutAnyLauncher) {
  const Result result = run({"-np", "2", "env", "-i", program_, "lives"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "OK 0 1 local://"), 6) << result.out;
}

TEST_F(HvdrunMeeting, FiveVariablesAreEnough) {
  const std::string some =
      "exec env -i HVD_INIT_METHOD=$HVD_INIT_METHOD HVD_RANK=$HVD_RANK HVD_SIZE=$HVD_SIZE "
      "HVD_JOB_NAME=$HVD_JOB_NAME ";
  expect_lives(run({"-np", "2", "sh", "-c", some + "HVD_JOB_TOKEN=$HVD_JOB_TOKEN \"$@\"", "sh",
                    program_, "lives"}),
               2, 3);
  const Result result = run({"-np", "2", "sh", "-c", some + "\"$@\"", "sh", program_, "lives"});
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("UsageError hvd::init: a process (host "),
                                HasSubstr("HVD_JOB_TOKEN"), HasSubstr("start it as hvdrun does")));
}

TEST_F(HvdrunMeeting, AnotherWayThatIsAskedForWins) {
  expect_lives(run({"-np", "2", "-x", "HVD_INIT_METHOD=env://", program_, "lives"}), 2, 3,
               "tcp://127.0.0.1:");
  const TemporaryFolder folder;
  const std::string file = "file://" + (folder.path() / "job").string();
  expect_lives(run({"-np", "2", "-x", "HVD_INIT_METHOD=" + file, program_, "lives"}), 2, 3, file);
}

TEST_F(HvdrunMeeting, AJobMayHaveANameOfItsOwn) {
  expect_lives(
      run({"-np", "2", "-x", "HVD_JOB_NAME=mine", "-x", "HVD_JOB_TOKEN=secret", program_, "lives"}),
      2, 3);
  Start start = with({"-np", "2", "-x", "HVD_JOB_NAME", program_, "lives"});
  start.environment = {{"HVD_JOB_NAME", "from outside"}};
  expect_lives(HvdrunProcess(start).wait(60), 2, 3);
}

TEST_F(HvdrunMeeting, InARankOfAnother) {
  const Result result =
      run({"-np", "2", hvdrun(), "--controller", "ucx", "--no-tag", "-np", "2", program_, "lives"});
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  for (const char* const rank : {"OK 0 2 ", "OK 1 2 "})
    EXPECT_EQ(count(result.out, rank), 6) << result.out;
}

TEST_F(HvdrunMeeting, ARankThatEndsBeforeItJoinsIsNamedAtOnce) {
  const Result result = run_mode("exit");  // at once: the time to begin is five minutes
  EXPECT_EQ(result.code, 3) << result.out << result.err;
  expect_of_others(result,
                   "PeerLostError 1 hvd::init: rank 1 has ended (exit code 3) and will not join at "
                   "hvdrun://\n");
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 1 failed first: exited with code 3"));
}

TEST_F(HvdrunMeeting, ARankThatDoesNotJoinIsNamedInTime) {
  const Result result = run_mode("absent", {"-x", "HVD_START_TIMEOUT=2"});
  EXPECT_EQ(
      count(result.out, "PeerLostError 1 hvd::init: rank 1 has not joined at hvdrun:// within "), 2)
      << result.out << result.err;
}

TEST_F(HvdrunMeeting, ARankThatContradictsHvdrunIsRefused) {
  for (const std::string mode : {"size", "rank"}) {
    const Result result = run_mode(mode);
    EXPECT_EQ(result.code, 2) << result.out << result.err;
    EXPECT_THAT(result.out,
                AllOf(HasSubstr("[1] UsageError hvd::init: the program and hvdrun's variables "
                                "contradict each other"),
                      HasSubstr(mode == "size" ? "Options::world_size=5" : "Options::rank=0")));
    expect_of_others(result, "PeerLostError 1 ");
  }
}

// All ranks refuse to start if one rank's variables contradict hvdrun's.
TEST_F(HvdrunMeeting, ARankWithOtherVariablesContradictsAll) {
  const Result result = run_three(
      {"sh", "-c", "[ $HVD_RANK = 1 ] && HVD_SIZE=5; exec \"$@\"", "sh", program_, "lives"});
  const std::string text =
      "UsageError hvd::init: hvdrun has started rank 1 of 3, which has joined as rank 1 of 5 ";
  EXPECT_THAT(result.out, HasSubstr("[1] " + text));
  expect_of_others(result, text);
}

TEST_F(HvdrunMeeting, ARankThatCannotBeginFailsTheOthersWithItsReason) {
  const Result result = run_mode("device");
  EXPECT_EQ(count(result.out, "HVD_DEVICE"), 3) << result.out << result.err;
}

TEST_F(HvdrunMeeting, AnotherBuildOfTheLibraryIsRefused) {
  const TemporaryFolder folder;
  const auto other = testing::library_of_another_build(HVD_TEST_CORE_LIBRARY, folder.path());
  ASSERT_FALSE(other.empty());
  const std::string script =
      "[ $HVD_RANK = 1 ] && export LD_PRELOAD=" + other.string() + "; exec \"$@\"";
  const Result result = run_three({"sh", "-c", script, "sh", program_, "lives"});
  EXPECT_THAT(result.out, AllOf(HasSubstr("[1] UsageError hvd::init: rank "),
                                HasSubstr("; start the same program everywhere\n")));
  expect_of_others(result, "UsageError hvd::init: rank ");
}

TEST_F(HvdrunMeeting, TheSecondProcessOfARankIsRefused) {
  const Result result = run_mode("fork");
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(count(result.out, "OK 1 3 "), 1) << result.out;
  EXPECT_EQ(count(result.out, "UsageError hvd::init: rank 1 (host "), 1) << result.out;
  EXPECT_THAT(result.out, HasSubstr("has joined at hvdrun:// twice, first from host "));
}

TEST_F(HvdrunMeeting, TheSecondProcessIsRefusedLongAfterTheFirstHasBegun) {
  const Result result = run_mode("second");
  expect_lives(result, 3, 1);
  EXPECT_THAT(result.out, HasSubstr("twice, first from host "));
  EXPECT_THAT(result.out, HasSubstr("which has not called hvd::shutdown() since"));
}

TEST_F(HvdrunMeeting, NoRankOutlivesHvdrunWhileItWaitsForOthers) {
  const std::string marker = unique_marker();
  HvdrunProcess process(
      with({"-np", "3", "sh", "-c", "[ $HVD_RANK = 0 ] && echo ready; exec \"$@\"", "sh", program_,
            "absent", marker}));
  ASSERT_TRUE(process.wait_for("ready", 1));
  ::usleep(100'000);
  process.signal(SIGKILL);
  process.wait();
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST_F(HvdrunMeeting, WithoutItsHvdrunTheErrorGivesAdvice) {
  const Result result =
      run({"-np", "1", "sh", "-c", "HVD_INIT_METHOD=hvdrun://0; HVD_SIZE=2; exec \"$@\"", "sh",
           program_, "lives"});
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("UsageError hvd::init: init_method hvdrun:// names a "
                                          "supervisor of hvdrun that cannot be reached"),
                                HasSubstr("its hvdrun has ended")));
}

// Programs that read MASTER_ADDR and MASTER_PORT can still rendezvous at that address.
TEST_F(HvdrunMeeting, ProgramsOfTorchMeetAtThePortOfRankZero) {
  const std::string python = HVD_TEST_PYTHON;
  if (python.empty() || std::system((python + " -c 'import torch.distributed'").c_str()) != 0)
    GTEST_SKIP() << "there is no Python with torch";
  const std::string script =
      "import torch, torch.distributed as d; d.init_process_group('gloo'); t = torch.ones(1); "
      "d.all_reduce(t); print('sum', t.item(), flush=True); d.destroy_process_group()";
  const Result result = HvdrunProcess(with({"-np", "2", python, "-c", script})).wait(100);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "sum 2.0"), 2) << result.out;
}

}  // namespace
}  // namespace hvd::launcher::test
