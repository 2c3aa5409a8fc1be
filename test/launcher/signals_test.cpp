#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "hvdrun_process.h"
#include "system/text.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

bool blocks(pid_t process, int signal) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:"))
      return (std::strtoull(line.c_str() + 7, nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

/// hvdrun with ranks that have all printed "ready".
struct Running {
  explicit Running(const std::string& mode, std::vector<std::string> options = {"-np", "2"})
      : process([&] {
          options.insert(options.end(), {rank_program(), mode, marker});
          return Start{.arguments = options};
        }()) {
    ready = process.wait_for("ready", 2);
  }
  std::string marker = unique_marker();
  HvdrunProcess process;
  bool ready = false;
};

TEST(Signals, InterruptEndsTheJobWith130) {
  Running job("wait");
  ASSERT_TRUE(job.ready);
  job.process.signal(SIGINT);
  const Result result = job.process.wait();
  EXPECT_EQ(result.code, 130);
  EXPECT_THAT(result.err,
              HasSubstr("hvdrun: got SIGINT; stopped 2 ranks (0 and 1); exit code 130\n"));
  EXPECT_THAT(wait_until_gone(job.marker), IsEmpty());
}

TEST(Signals, AreSentToTheRanks) {
  for (const auto& [signal, code] : {std::pair(SIGTERM, 143), std::pair(SIGUSR1, 0)}) {
    Running job("graceful");
    ASSERT_TRUE(job.ready);
    job.process.signal(signal);
    const Result result = job.process.wait();
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_EQ(count(result.out, "got " + signal_name(signal) + "\n"), 2)
        << result.out << result.err;
  }
}

TEST(Signals, CtrlCOfATerminalReachesTheRanksThroughHvdrunOnly) {
  // mpirun gets the signal too, and would kill the ranks before they could finish their work.
  Running job("graceful");
  ASSERT_TRUE(job.ready);
  job.process.signal_group(SIGINT);
  const Result result = job.process.wait();
  EXPECT_EQ(result.code, 130);
  EXPECT_EQ(count(result.out, "got SIGINT\n"), 2) << result.out << result.err;
}

// SIGUSR1 requests a state dump. A program without a handler, or whose handler is not installed
// yet, continues to run.
TEST(Signals, ARequestForAStateDumpEndsNothing) {
  for (const int delay_us : {0, 5'000, 50'000, 100'000, 200'000, 300'000}) {
    HvdrunProcess process({.arguments = {"-np", "2", "sleep", "0.5"}});
    // Wait, because a signal before hvdrun's main() ends it.
    for (int i = 0; i < 5000 && !blocks(process.pid(), SIGUSR1); ++i) ::usleep(1000);
    ::usleep(static_cast<useconds_t>(delay_us));
    process.signal(SIGUSR1);
    const Result result = process.wait(15);
    EXPECT_EQ(result.code, 0) << "after " << delay_us << " us: " << result.err;
  }
}

TEST(Signals, AUserSignalThatKillsARankIsItsFailure) {
  Running job("wait");
  ASSERT_TRUE(job.ready);
  job.process.signal(SIGUSR2);
  const Result result = job.process.wait();
  EXPECT_EQ(result.code, 128 + SIGUSR2) << result.err;
  EXPECT_THAT(result.err, HasSubstr("killed by SIGUSR2"));
}

TEST(Signals, StubbornRanksAreKilledAfterTheGrace) {
  Running job("stubborn", {"-np", "2", "--grace", "0.5"});
  ASSERT_TRUE(job.ready);
  const auto start = std::chrono::steady_clock::now();
  job.process.signal(SIGTERM);
  const Result result = job.process.wait();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(result.code, 143);
  EXPECT_GE(took.count(), 0.45);
  EXPECT_LT(took.count(), 10) << "a busy machine takes seconds to end processes, not tens of them";
  EXPECT_THAT(result.err, HasSubstr("2 ranks (0 and 1) did not end within 0.50 s and were killed"));
  EXPECT_THAT(wait_until_gone(job.marker), IsEmpty());
}

TEST(Signals, ASecondInterruptEndsTheGrace) {
  Running job("stubborn", {"-np", "2", "--grace", "60"});
  ASSERT_TRUE(job.ready);
  job.process.signal(SIGINT);
  // hvdrun takes a second signal within 0.2 s for the same request. It has the first one before the
  // ranks have it.
  ASSERT_TRUE(job.process.wait_for("stays", 2));
  ::usleep(300'000);
  job.process.signal(SIGINT);
  const Result result = job.process.wait(40);
  EXPECT_EQ(result.code, 130);
  EXPECT_LT(result.seconds, 40);
  EXPECT_THAT(result.err, HasSubstr("hvdrun: got SIGINT; stopped 2 ranks (0 and 1)"));
  EXPECT_THAT(result.err, Not(HasSubstr("within 60"))) << "the grace was shorter";
}

// `timeout 1h hvdrun ...` sends SIGTERM to hvdrun and at once to its process group.
TEST(Signals, ASignalThatIsSentTwiceAtOnceLeavesTheGrace) {
  Running job("stubborn", {"-np", "2", "--grace", "0.7"});
  ASSERT_TRUE(job.ready);
  job.process.signal(SIGTERM);
  ::usleep(20'000);
  job.process.signal_group(SIGTERM);
  const Result result = job.process.wait(30);
  EXPECT_EQ(result.code, 143);
  EXPECT_THAT(result.err, HasSubstr("2 ranks (0 and 1) did not end within 0.70 s and were killed"));
}

TEST(Signals, InterruptWhileStarting) {
  for (const int delay_us : {0, 5'000, 20'000, 40'000, 60'000, 80'000}) {
    const std::string marker = unique_marker();
    HvdrunProcess process({.arguments = {"-np", "3", rank_program(), "wait", marker}});
    ::usleep(static_cast<useconds_t>(delay_us));
    process.signal(SIGINT);
    const Result result = process.wait(15);
    // Until hvdrun handles signals, the default action ends it. A shell reports this as 130 too.
    EXPECT_EQ(result.code, 130) << "after " << delay_us << " us: " << result.err;
    EXPECT_THAT(wait_until_gone(marker), IsEmpty()) << "after " << delay_us << " us";
  }
}

TEST(Signals, KillingHvdrunLeavesNothing) {
  for (const std::string mode : {"wait", "stubborn"}) {
    Running job(mode);
    ASSERT_TRUE(job.ready);
    ASSERT_GE(processes_with(job.marker).size(), 3U) << "hvdrun and two programs";
    job.process.signal(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(wait_until_gone(job.marker), IsEmpty());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("after kill -9 of hvdrun the last process of '%s' was gone in %.3f s\n",
                mode.c_str(), took.count());
    EXPECT_EQ(job.process.wait().code, 137);
  }
}

TEST(Signals, TheFilesOfAKilledHvdrunAreRemovedByTheNext) {
  const TemporaryFolder folder;
  const std::string marker = unique_marker();
  const auto start_of = [&](std::vector<std::string> arguments) {
    return Start{.arguments = std::move(arguments),
                 .environment = {{"TMPDIR", folder.path().string()}}};
  };
  HvdrunProcess killed(start_of({"-np", "2", rank_program(), "wait", marker}));
  ASSERT_TRUE(killed.wait_for("ready", 2));
  killed.signal(SIGKILL);
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
  const auto left = [&] {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      found.push_back(entry.path());
    return found;
  };
  ASSERT_EQ(left().size(), 1U) << "or this test tests nothing";
  const timespec long_ago[2] = {};
  ASSERT_EQ(::utimensat(AT_FDCWD, left()[0].c_str(), long_ago, 0), 0);
  HvdrunProcess next(start_of({"-np", "1", "true"}));
  EXPECT_EQ(next.wait().code, 0);
  EXPECT_THAT(left(), IsEmpty());
}

TEST(Signals, TimeoutIs124) {
  Running job("wait", {"-np", "2", "--timeout", "1"});
  const Result result = job.process.wait();
  EXPECT_EQ(result.code, 124);
  EXPECT_THAT(result.err, HasSubstr("ran longer than --timeout 1.00 s"));
  EXPECT_THAT(wait_until_gone(job.marker), IsEmpty());
}

}  // namespace
}  // namespace hvd::launcher::test
