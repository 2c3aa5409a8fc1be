// The campaign of starts: many short jobs under hvdrun, whose ranks join, work and leave three
// times. One process (a rank, a supervisor or hvdrun) is killed at a random moment. No rank may
// wait for it, blame another process, or outlive the job.
//
// start_campaign [--seeds N] [--first SEED] [--verbose]
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "campaign_seeds.h"
#include "command/controller.h"
#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

/// Far less than a rank waits for others to connect, and far more than a job takes.
constexpr double kLimit = 100;
constexpr int kLives = 3;

enum class Victim { kRank, kSupervisor, kHvdrun };

struct Plan {
  std::uint64_t seed = 0;
  int ranks = 2;
  bool hosts = false;  ///< the last rank runs on another host, which is simulated
  Victim victim = Victim::kRank;
  int rank = 0;
  int delay_us = 0;  ///< from when the victim is there
};

Plan make_plan(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int limit) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(limit));
  };
  Plan plan{.seed = seed};
  plan.ranks = 2 + below(3);
  plan.hosts = below(3) == 0;
  const int who = below(10);
  plan.victim = who < 6 ? Victim::kRank : who < 9 ? Victim::kSupervisor : Victim::kHvdrun;
  plan.rank = below(plan.ranks);
  plan.delay_us = below(2) == 0 ? below(30'000) : below(400'000);
  return plan;
}

std::string describe(const Plan& plan) {
  constexpr const char* kNames[] = {"rank", "supervisor of rank", "hvdrun of rank"};
  return "seed " + std::to_string(plan.seed) + ": " + kNames[static_cast<int>(plan.victim)] + " " +
         std::to_string(plan.rank) + " of " + std::to_string(plan.ranks) +
         (plan.hosts ? " on two hosts" : "") + " after " + std::to_string(plan.delay_us) + " us";
}

/// The words of the file, each of which ends with a zero byte.
std::string read_words(pid_t pid, const char* file) {
  std::ifstream stream("/proc/" + std::to_string(pid) + "/" + file);
  std::ostringstream text;
  text << stream.rdbuf();
  return '\0' + text.str();
}

std::optional<pid_t> find_victim(const Plan& plan, const std::string& marker) {
  using namespace std::string_literals;
  const bool rank = plan.victim == Victim::kRank;
  const std::string variable =
      "\0"s + (rank ? "HVD_RANK=" : "HVD_LAUNCHER_RANK=") + std::to_string(plan.rank) + "\0"s;
  for (const pid_t pid : processes_with(marker)) {
    const bool supervises =
        read_words(pid, "cmdline").find("\0--supervise\0"s) != std::string::npos;
    if (supervises == rank) continue;
    if (read_words(pid, "environ").find(variable) != std::string::npos) return pid;
  }
  return std::nullopt;
}

struct Run {
  Result result;
  bool killed = false;
};

Run run(const Plan& plan, const std::string& marker) {
  Start start;
  start.arguments = {"--controller", "ucx", "--bind", "none", "-np", std::to_string(plan.ranks)};
  if (plan.hosts) {
    start.arguments.insert(start.arguments.end(),
                           {"-H", "localhost:" + std::to_string(plan.ranks - 1) + ",b:1", "--rsh",
                            HVD_TEST_PRETENDED_AGENT});
  }
  start.arguments.insert(start.arguments.end(), {HVD_TEST_MEETING_PROGRAM, "lives", marker});
  HvdrunProcess process(start);
  std::optional<pid_t> victim = process.pid();
  if (plan.victim != Victim::kHvdrun) {
    victim.reset();
    for (int i = 0; i < 20'000 && !victim && ::kill(process.pid(), 0) == 0; ++i) {
      victim = find_victim(plan, marker);
      if (!victim) ::usleep(500);
    }
  }
  ::usleep(static_cast<useconds_t>(plan.delay_us));
  Run run;
  // Searched again, because the process may have ended and another may have its number.
  if (plan.victim == Victim::kHvdrun) {
    process.signal(SIGKILL);
    run.killed = true;
  } else if (victim && find_victim(plan, marker) == victim) {
    run.killed = ::kill(*victim, SIGKILL) == 0;
  }
  run.result = process.wait(kLimit);
  return run;
}

/// Describes the defect of a run; empty if it is correct.
std::string judge(const Plan& plan, const Run& run, const std::string& marker) {
  const Result& result = run.result;
  if (result.code == -1) return "did not end in time";
  if (!wait_until_gone(marker, 20).empty()) return "left processes";
  if (plan.victim == Victim::kHvdrun) return "";
  const std::string lost = "PeerLostError " + std::to_string(plan.rank) + " ";
  int ends = 0, fine = 0;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::string tag = "[" + std::to_string(rank) + "] ";
    const int lives = count(result.out, tag + "OK ");
    const bool told = count(result.out, tag + lost) == 1;
    // Killed before it had connected.
    const bool stopped = count(result.out, tag) == 0 && result.code != 0;
    if (lives == kLives) ++fine;
    if (lives == kLives || told || stopped || rank == plan.rank) ++ends;
  }
  if (count(result.out, "Error ") != count(result.out, lost)) return "another error than the loss";
  if (ends != plan.ranks) return "a rank has neither heard of the loss nor come to its end";
  if (fine == plan.ranks) return "";  // too late to matter
  if (!run.killed) return "failed by itself";
  // 70: the supervisor was killed before it had connected.
  const bool right_code = plan.victim == Victim::kRank
                              ? result.code == 137
                              : result.code == 69 || (result.code == 70 && result.out.empty());
  if (!right_code) return "exit code " + std::to_string(result.code);
  const std::string blame = "rank " + std::to_string(plan.rank) + " failed first: ";
  const std::string host = "(rank " + std::to_string(plan.rank) + ") could not be reached";
  const std::string supervisor = "the supervisor of rank " + std::to_string(plan.rank) + " ended";
  const int right =
      count(result.err, blame) + count(result.err, host) + count(result.err, supervisor);
  return right == 1 ? "" : "another rank is blamed";
}

}  // namespace
}  // namespace hvd::launcher::test

int main(int argc, char** argv) {
  using namespace hvd::launcher::test;
  const auto asked = campaign_seeds(argc, argv, 100);
  if (!asked) return 2;
  if (!hvd::launcher::finds_ucx()) {
    std::printf("SKIPPED: libucp.so.0 cannot be loaded\n");
    return 77;  // of ctest's SKIP_RETURN_CODE
  }
  int runs = 0, killed = 0, bad = 0;
  for (std::uint64_t seed = asked->first; seed < asked->first + asked->seeds; ++seed) {
    const Plan plan = make_plan(seed);
    const std::string marker = unique_marker();
    const Run run = hvd::launcher::test::run(plan, marker);
    const std::string fault = judge(plan, run, marker);
    ++runs;
    killed += run.killed ? 1 : 0;
    if (asked->verbose || !fault.empty())
      std::printf("%s: %s (%.2f s)\n", describe(plan).c_str(),
                  fault.empty() ? "right" : fault.c_str(), run.result.seconds);
    if (!fault.empty()) {
      ++bad;
      std::printf("--- stdout ---\n%s--- stderr ---\n%s--------------\n", run.result.out.c_str(),
                  run.result.err.c_str());
    }
    std::fflush(stdout);
  }
  std::printf("%d runs, %d kills, %d wrong\n", runs, killed, bad);
  return bad == 0 ? 0 : 1;
}
