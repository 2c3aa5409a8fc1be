// Tests how much time hvdrun adds to mpirun's own. Both are measured in the same run, so that the
// test does not fail on a slow machine. The best of several measurements counts, because other
// processes of the machine disturb them. Runs alone (RUN_SERIAL).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

constexpr int kTimes = 3;

struct Times {
  double hvdrun = std::numeric_limits<double>::infinity();
  double mpirun = std::numeric_limits<double>::infinity();
};

/// mpirun alone, as hvdrun would start it.
Start plain_mpirun(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--bind-to", "none", "--oversubscribe"});
  return {.arguments = std::move(arguments), .program = "mpirun"};
}

Start by_hvdrun(const std::string& controller, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"--controller", controller});
  return {.arguments = std::move(arguments)};
}

/// Measures hvdrun and mpirun alternately, and returns the best time of each.
template <class Measure>
Times best_of(const Measure& measure, const Start& hvdrun, const Start& mpirun) {
  Times best;
  for (int i = 0; i < kTimes; ++i) {
    best.mpirun = std::min(best.mpirun, measure(mpirun));
    best.hvdrun = std::min(best.hvdrun, measure(hvdrun));
  }
  return best;
}

/// The time from the start of the command to the first rank's main().
double seconds_to_main(const Start& start) {
  timespec before{};
  ::clock_gettime(CLOCK_REALTIME, &before);
  const Result result = HvdrunProcess(start).wait();
  const std::size_t at = result.out.find("main at ");
  EXPECT_EQ(result.code, 0) << result.err;
  if (at == std::string::npos) return std::numeric_limits<double>::infinity();
  return std::strtod(result.out.c_str() + at + 8, nullptr) -
         (static_cast<double>(before.tv_sec) + static_cast<double>(before.tv_nsec) * 1e-9);
}

TEST(Times, ToMainAreAtMostTwiceMpirunsOrASecond) {
  const std::vector<std::string> job = {"-np", "2", rank_program(), "now"};
  const Times best = best_of(seconds_to_main, by_hvdrun("mpi", job), plain_mpirun(job));
  std::printf("to main, best of %d: hvdrun %.3f s, mpirun %.3f s\n", kTimes, best.hvdrun,
              best.mpirun);
  EXPECT_LT(best.hvdrun, std::max(1.0, 2 * best.mpirun));
}

TEST(Times, ToMainWithoutMpirunAreAtMostMpirunsOrASecond) {
  const std::vector<std::string> job = {"-np", "2", rank_program(), "now"};
  const Times best = best_of(seconds_to_main, by_hvdrun("ucx", job), plain_mpirun(job));
  std::printf("to main without mpirun, best of %d: hvdrun %.3f s, mpirun %.3f s\n", kTimes,
              best.hvdrun, best.mpirun);
  EXPECT_LT(best.hvdrun, std::max(1.0, best.mpirun));
}

/// The time from a rank's death to the end of hvdrun or mpirun.
double seconds_to_end(Start start, const std::string& ready) {
  const std::string marker = unique_marker();
  start.arguments.push_back(marker);
  HvdrunProcess process(start);
  EXPECT_TRUE(process.wait_for(ready, 3));
  // Each program starts after the processes that start it, so the youngest process is a program.
  pid_t victim = -1;
  for (const pid_t pid : processes_with(marker)) victim = std::max(victim, pid);
  EXPECT_GT(victim, 0);
  if (victim <= 0) return std::numeric_limits<double>::infinity();
  const auto begin = std::chrono::steady_clock::now();
  ::kill(victim, SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 137) << result.err;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(Times, FromARanksDeathToTheEndAreAtMostTwiceMpirunsOrHalfASecond) {
  using Case = std::pair<const char*, bool>;  // the controller; a program that calls MPI
  for (const auto& [controller, mpi] :
       {Case("mpi", false), Case("mpi", true), Case("ucx", false)}) {
    const std::vector<std::string> job = {"-np", "3", mpi ? mpi_program() : rank_program(),
                                          mpi ? "stay" : "wait"};
    const auto measure = [ready = mpi ? "sum 14" : "ready"](const Start& start) {
      return seconds_to_end(start, ready);
    };
    const Times best = best_of(measure, by_hvdrun(controller, job), plain_mpirun(job));
    std::printf(
        "from a %s rank's death to the end, best of %d: hvdrun over %s %.3f s, mpirun %.3f "
        "s\n",
        mpi ? "MPI" : "plain", kTimes, controller, best.hvdrun, best.mpirun);
    EXPECT_LT(best.hvdrun, std::max(0.5, 2 * best.mpirun));
  }
}

}  // namespace
}  // namespace hvd::launcher::test
