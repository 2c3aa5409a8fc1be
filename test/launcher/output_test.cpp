#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "agent/core_share.h"
#include "base/cpu_quota.h"
#include "hvdrun_process.h"
#include "mpirun/job_folder.h"
#include "reports/rank_output.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;

std::string expected_line(int rank, int i) {
  const std::string filler(static_cast<std::size_t>(20 + (i * 7 + rank * 13) % 60),
                           static_cast<char>('a' + rank));
  return std::to_string(rank) + " " + std::to_string(i) + " " + filler;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Output, TenMegabytesArriveWholeAndInOrder) {
  constexpr int kRanks = 3;
  constexpr int kLines = 70'000;  // about 60 bytes each
  const Result result =
      run_hvdrun({"-np", "3", rank_program(), "lines", std::to_string(kLines)}, 60);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_GT(result.out.size(), 10'000'000U);
  std::array<int, kRanks> next{};
  int bad = 0;
  for (const std::string& line : lines_of(result.out)) {
    const int rank = line.size() > 1 ? line[1] - '0' : -1;
    if (rank < 0 || rank >= kRanks ||
        line != rank_prefix(rank, kRanks) + expected_line(rank, next[rank])) {
      if (++bad < 5) ADD_FAILURE() << "not the next line of any rank: " << line.substr(0, 200);
      continue;
    }
    ++next[rank];
  }
  EXPECT_EQ(bad, 0);
  for (const int lines : next) EXPECT_EQ(lines, kLines);
}

TEST(Output, NoTagLeavesBytesAsTheyAre) {
  const Result result = run_hvdrun({"-np", "1", "--no-tag", rank_program(), "partial"});
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.out, "rank 0: out without end");
  EXPECT_EQ(result.err, "rank 0: err without end");
}

TEST(Output, ALastLineWithoutNewlineIsNotLost) {
  const Result result = run_hvdrun({"-np", "3", rank_program(), "partial"});
  EXPECT_EQ(result.code, 0);
  for (int rank = 0; rank < 3; ++rank) {
    const std::string line = rank_prefix(rank, 3) + "rank " + std::to_string(rank);
    EXPECT_THAT(result.out, HasSubstr(line + ": out without end\n"));
    EXPECT_THAT(result.err, HasSubstr(line + ": err without end\n"));
  }
}

TEST(Output, ProgressBarsKeepTheirCarriageReturns) {
  const Result result = run_hvdrun({"-np", "1", rank_program(), "bar"});
  EXPECT_EQ(result.out, "[0] 10%\r[0] 20%\r[0] 30%\n[0] done\n");
}

TEST(Output, PrefixesAreOneWidth) {
  const Result result = run_hvdrun({"-np", "11", rank_program(), "environment", "HVD_RANK"});
  EXPECT_THAT(result.out, HasSubstr("[ 3] HVD_RANK=3\n"));
  EXPECT_THAT(result.out, HasSubstr("[10] HVD_RANK=10\n"));
}

TEST(Output, FilesPerRank) {
  const TemporaryFolder folder;
  const Result result = run_hvdrun({"-np", "11", "--output-filename",
                                    (folder.path() / "logs").string(), rank_program(), "partial"});
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("[ 3] rank 3: out without end\n"))
      << "the console still shows it";
  EXPECT_EQ(content(folder.path() / "logs" / "rank.03" / "stdout"), "rank 3: out without end");
  EXPECT_EQ(content(folder.path() / "logs" / "rank.10" / "stderr"), "rank 10: err without end");
}

TEST(Output, FilesThatCannotBeMade) {
  const Result result =
      run_hvdrun({"-np", "1", "--output-filename", "/proc/no/such", rank_program(), "partial"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--output-filename: cannot create /proc/no/such/rank.0"));
}

TEST(Output, ATerminalIsPassedOnToTheRanks) {
  HvdrunProcess process({.arguments = {"-np", "2", rank_program(), "unflushed"}, .terminal = true});
  EXPECT_TRUE(process.wait_for("isatty 1 HVD_OUTPUT_TTY 1", 2)) << process.out();
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait().code, 143);
}

TEST(Output, APipeIsNoTerminal) {
  const Result result = run_hvdrun({"-np", "1", rank_program(), "environment", "HVD_OUTPUT_TTY"});
  EXPECT_EQ(result.out, "[0] HVD_OUTPUT_TTY=0\n");
}

TEST(Output, AReaderThatStopsDoesNotHoldTheSignals) {
  HvdrunProcess process({.arguments = {"-np", "2", rank_program(), "lines", "500000"}});
  ASSERT_TRUE(process.wait_for("[0] 0 10 ", 1));
  ::usleep(500'000);  // no process reads, so every buffer on the way is full
  process.signal(SIGINT);
  ::usleep(300'000);
  process.signal(SIGINT);
  const Result result = process.wait(10);
  EXPECT_EQ(result.code, 130);
}

/// Runs hvdrun by a shell script that redirects its stdout.
Result run_redirected(const std::string& script, const std::vector<std::string>& arguments) {
  Start start;
  start.prefix = {"bash", "-c", script, "bash"};
  start.arguments = arguments;
  return HvdrunProcess(start).wait(20);
}

TEST(LostOutput, AClosedStdoutIsReported) {
  const Result result = run_redirected("exec \"$@\" >&-", {"-np", "2", "echo", "hi"});
  EXPECT_EQ(result.code, 74) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: cannot write stdout: Bad file descriptor"));
  EXPECT_EQ(run_redirected("exec \"$@\" >&-", {"-np", "2", "true"}).code, 0) << "nothing was lost";
  EXPECT_EQ(run_redirected("exec \"$@\" <&- 2>&-", {"-np", "2", "true"}).code, 0);
}

TEST(LostOutput, AFullDiskIsReported) {
  const Result result =
      run_redirected("exec \"$@\" >/dev/full", {"-np", "2", "seq", "1", "100000"});
  EXPECT_EQ(result.code, 74) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: cannot write stdout: No space left on device"));
  EXPECT_EQ(count(result.err, "cannot write"), 1);
  EXPECT_THAT(result.err, HasSubstr("part of what they printed was lost; exit code 74\n"));
}

TEST(LostOutput, AFullDiskUnderTheFilesIsReported) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "rank.1");
  std::filesystem::create_symlink("/dev/full", folder.path() / "rank.1" / "stdout");
  const Result result = run_hvdrun(
      {"-np", "2", "--output-filename", folder.path().string(), rank_program(), "partial"});
  EXPECT_EQ(result.code, 74) << result.err;
  EXPECT_THAT(result.err, HasSubstr("rank.1/stdout: No space left on device"));
  EXPECT_THAT(result.out, HasSubstr("[1] rank 1: out without end\n")) << "the console has it";
}

// A FIFO without a reader blocks like a file system whose server is gone.
TEST(LostOutput, AFileSystemThatHangsDoesNotDelayTheJob) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "rank.1");
  const std::filesystem::path stuck = folder.path() / "rank.1" / "stdout";
  ASSERT_EQ(::mkfifo(stuck.c_str(), 0600), 0);
  const UniqueFd reader(::open(stuck.c_str(), O_RDONLY | O_NONBLOCK));
  HvdrunProcess process(
      {.arguments = {"-np", "2", "--output-filename", folder.path().string(), "sh", "-c",
                     "seq 1 50000; [ $HVD_RANK = 0 ] && sleep 1 && exit 3; sleep 60"}});
  ASSERT_TRUE(process.wait_for("[1] 50000\n", 1));
  ::usleep(2'500'000);  // hvdrun waits for the file, and gets another signal
  process.signal(SIGTERM);
  const Result result = process.wait(10);
  EXPECT_EQ(result.code, 3) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 0 failed first: exited with code 3"));
  EXPECT_THAT(result.err,
              HasSubstr("no data was accepted for 1 s; the ranks' output is not kept there"));
}

TEST(LostOutput, AReaderThatHasGoneEndsTheJob) {
  const Result result =
      run_redirected("\"$@\" | head -1 >/dev/null; exit ${PIPESTATUS[0]}", {"-np", "2", "yes"});
  EXPECT_EQ(result.code, 141) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("hvdrun: the reader of stdout has closed it; stopped 2 ranks (0 and 1)"));
}

TEST(LostOutput, AFailureIsReportedWithoutAReader) {
  const std::string marker = unique_marker();
  HvdrunProcess process(
      {.arguments = {"-np", "2", "sh", "-c",
                     "[ $HVD_RANK = 0 ] && exec yes \"$0\"; sleep 1; exit 3", marker}});
  ASSERT_TRUE(process.wait_for("[0] ", 1));
  std::vector<pid_t> left;
  for (int i = 0; i < 100; ++i) {
    left = processes_with(marker);
    std::erase(left, process.pid());
    if (left.empty()) break;
    ::usleep(100'000);
  }
  EXPECT_TRUE(left.empty()) << "the ranks wait for a reader";
  process.signal(SIGTERM);
  ::usleep(1'500'000);
  const Result result = process.wait(10);
  EXPECT_EQ(result.code, 3);
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 1 failed first: exited with code 3"));
}

TEST(Output, AGreatLineIsOneLine) {
  const Result result =
      run_hvdrun({"-np", "2", "sh", "-c", "head -c 10000000 /dev/zero | tr '\\0' x; echo"});
  ASSERT_EQ(result.code, 0) << result.err;
  const std::vector<std::string> lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 2U);
  for (const std::string& line : lines) EXPECT_EQ(line.size(), 10'000'004U);
}

// The program of the campaign of last screens links hvd, which makes its stdout line-buffered.
TEST(Output, LinesAppearAsTheyArePrintedInAPipeToo) {
  HvdrunProcess process({.arguments = {"-np", "2", HVD_TEST_LAST_SCREEN_PROGRAM, "unflushed"}});
  EXPECT_TRUE(process.wait_for("a line\n", 2)) << process.out();
}

TEST(Descriptors, TooFewAreNamedAtTheStart) {
  const Result result = run_redirected("ulimit -n 20; exec \"$@\"", {"-np", "2", "true"});
  EXPECT_EQ(result.code, 69);
  EXPECT_THAT(result.err, HasSubstr("too few file descriptors: expected at least 44"));
}

// A descriptor that a rank opens must not become its stdin, stdout or stderr.
TEST(Descriptors, TheFirstThreeAreOpenAtEachRankIfHvdrunsAreClosed) {
  const std::string script =
      "for fd in 0 1 2; do [ -e /proc/$$/fd/$fd ] || exit $((10 + fd)); done";
  EXPECT_EQ(
      run_redirected("exec \"$@\" <&- >&- 2>&-", {"-np", "2", "sh", "-c", script + "; :"}).code, 0);
}

TEST(Input, GoesToRankZero) {
  HvdrunProcess process(
      {.arguments = {"-np", "2", rank_program(), "stdin"}, .input = "first\nsecond\n"});
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0);
  EXPECT_THAT(result.out, HasSubstr("[0] stdin: first;second;\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] stdin: \n"));
}

TEST(Input, OpenMpirunMayGiveItToAnotherRank) {
  HvdrunProcess process(
      {.arguments = {"-np", "2", "--mpi-args", "--stdin 1", rank_program(), "stdin"},
       .input = "first\nsecond\n"});
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[0] stdin: \n"));
  EXPECT_THAT(result.out, HasSubstr("[1] stdin: first;second;\n"));
}

TEST(Environment, OfTheRanks) {
  HvdrunProcess process(
      {.arguments = {"-np", "2", "-x", "LAUNCHER_A=1 2;3", "-x", "LAUNCHER_B", "--timeline",
                     "/tmp/t.{rank}.json", rank_program(), "environment", "LAUNCHER_A",
                     "LAUNCHER_B", "HVD_SIZE", "HVD_LOCAL_RANK", "HVD_LOCAL_SIZE", "HVD_TIMELINE",
                     "HVD_LAUNCHER_TOKEN", "RANK", "WORLD_SIZE"},
       .environment = {{"LAUNCHER_B", "b"}}});
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (const char* expected : {"LAUNCHER_A=1 2;3", "LAUNCHER_B=b", "HVD_SIZE=2", "HVD_LOCAL_RANK=1",
                               "HVD_LOCAL_SIZE=2", "HVD_TIMELINE=/tmp/t.{rank}.json",
                               "HVD_LAUNCHER_TOKEN=<unset>", "RANK=1", "WORLD_SIZE=2"}) {
    EXPECT_THAT(result.out, HasSubstr("[1] " + std::string(expected) + "\n"));
  }
}

/// Formats a list of CPUs as the kernel does: "0-1,4".
std::string as_list(std::vector<int> cpus) {
  std::sort(cpus.begin(), cpus.end());
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(cpus[i]) +
            (last > i ? "-" + std::to_string(cpus[last]) : "");
    i = last + 1;
  }
  return text;
}

TEST(Binding, EachRankHasItsShareOfTheCores) {
  const std::vector<int> allowed = allowed_cpus();
  const std::vector<Core> cores = usable_cores(allowed);
  if (cores.size() < 2 || cpu_quota()) GTEST_SKIP() << "needs two cores and no quota";
  const std::string script =
      "echo $HVD_RANK threads $OMP_NUM_THREADS $(grep Cpus_allowed_list /proc/self/status)";
  Start start{.arguments = {"-np", "2", "sh", "-c", script},
              .environment = {{"OMP_NUM_THREADS", std::nullopt}}};
  Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  for (int rank = 0; rank < 2; ++rank) {
    const CoreShare share = share_of(cores, rank, 2, {});
    EXPECT_THAT(result.out,
                HasSubstr(std::to_string(rank) + " threads " + std::to_string(share.threads) +
                          " Cpus_allowed_list: " + as_list(share.cpus) + "\n"));
  }
  start.arguments = {"-np", "1", "sh", "-c", script};
  result = HvdrunProcess(start).wait();
  EXPECT_THAT(result.out, HasSubstr("0 threads " + std::to_string(cores.size()) + " "))
      << "at one rank too";
  start.arguments = {"-np", "2", "--bind", "none", "sh", "-c", script};
  result = HvdrunProcess(start).wait();
  const std::size_t first = result.out.find("Cpus_allowed_list"),
                    second = result.out.rfind("Cpus_allowed_list");
  EXPECT_EQ(result.out.substr(first, result.out.find('\n', first) - first),
            result.out.substr(second, result.out.find('\n', second) - second));
}

TEST(Environment, OmpThreadsAreSetOnlyWhenUnset) {
  const std::vector<std::string> arguments = {"-np",          "64",          "--verbose",
                                              rank_program(), "environment", "OMP_NUM_THREADS"};
  Result result =
      HvdrunProcess({.arguments = arguments, .environment = {{"OMP_NUM_THREADS", std::nullopt}}})
          .wait();
  EXPECT_EQ(count(result.err, "OMP_NUM_THREADS is unset: set to "), 1) << result.err;
  EXPECT_EQ(count(result.out, "OMP_NUM_THREADS="), 64);
  EXPECT_EQ(count(result.out, "OMP_NUM_THREADS=<unset>"), 0);
  result =
      HvdrunProcess({.arguments = arguments, .environment = {{"OMP_NUM_THREADS", "5"}}}).wait();
  EXPECT_EQ(count(result.out, "OMP_NUM_THREADS=5\n"), 64);
}

}  // namespace
}  // namespace hvd::launcher::test
