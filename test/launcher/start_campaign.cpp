// The campaign of starts: many short jobs under hvdrun, whose ranks join, work and leave three
// times. One process (a rank, a supervisor or hvdrun) is killed at a random moment. No rank may
// wait for it, blame another process, or outlive the job.
//
//   start_campaign [options of support/campaign.h]
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "support/campaign.h"
#include "support/seeds.h"

namespace hvd::launcher::test {
namespace {

/// Seconds until a job counts as hanging: far less than a rank waits for others to connect, and far
/// more than a job takes.
constexpr double kLimit = 100;
constexpr int kLives = 3;
/// Longer than the limit: a rank that waits instead of reporting the loss makes the job hang, since
/// it ignores SIGTERM (programs/meeting_program.cpp) and hvdrun does not kill it before.
constexpr const char* kGrace = "200";

enum class Victim { kRank, kSupervisor, kHvdrun };

struct Plan {
  int ranks = 2;
  bool hosts = false;  ///< the last rank runs on another host, which is simulated
  Victim victim = Victim::kRank;
  int rank = 0;
  int delay_us = 0;  ///< after the victim has started
};

Plan make_plan(std::uint64_t seed) {
  testing::Random random(seed, 0);
  Plan plan;
  plan.ranks = 2 + random.below(3);
  plan.hosts = random.below(3) == 0;
  const int victim = random.below(10);
  plan.victim = victim < 6 ? Victim::kRank : victim < 9 ? Victim::kSupervisor : Victim::kHvdrun;
  plan.rank = random.below(plan.ranks);
  plan.delay_us = random.chance(50) ? random.below(30'000) : random.below(400'000);
  return plan;
}

/// Reads a file of /proc. Its words each end with a zero byte.
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

/// Kills the victim at its moment. Returns false if it ended before.
bool kill_victim(const Plan& plan, const HvdrunProcess& hvdrun, const std::string& marker) {
  std::optional<pid_t> victim;
  for (int i = 0; plan.victim != Victim::kHvdrun && i < 20'000 && !victim; ++i) {
    if (!testing::exists(hvdrun.pid())) break;
    victim = find_victim(plan, marker);
    if (!victim) ::usleep(500);
  }
  ::usleep(static_cast<useconds_t>(plan.delay_us));
  if (plan.victim == Victim::kHvdrun) {
    hvdrun.signal(SIGKILL);
    return true;
  }
  // Search again, because the process may have ended and another may have its number.
  return victim && find_victim(plan, marker) == victim && ::kill(*victim, SIGKILL) == 0;
}

/// Describes the defect of a run; empty if it is correct.
std::string judge(const Plan& plan, const Result& result, bool killed, const std::string& marker) {
  if (result.code == -1) return "did not end in time";
  if (!wait_until_gone(marker, 20).empty()) return "left processes";
  if (plan.victim == Victim::kHvdrun) return "";
  const std::string lost = "PeerLostError " + std::to_string(plan.rank) + " ";
  int ends = 0, fine = 0;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::string tag = "[" + std::to_string(rank) + "] ";
    const int lives = count(result.out, tag + "OK ");
    const bool lost_one = count(result.out, tag + lost) == 1;
    // Stopped before its main(), or never started.
    const bool stopped = count(result.out, tag) == 0 && result.code != 0;
    if (lives == kLives) ++fine;
    if (lives == kLives || lost_one || stopped || rank == plan.rank) ++ends;
  }
  if (count(result.out, "Error ") != count(result.out, lost)) return "another error than the loss";
  if (ends != plan.ranks) return "a rank has neither reported the loss nor finished";
  if (fine == plan.ranks) return "";  // killed too late to have an effect
  if (!killed) return "failed by itself";
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

testing::JudgedJob run_job(std::uint64_t seed, const testing::CampaignOptions&) {
  constexpr std::array kVictims = {"rank", "supervisor", "hvdrun"};
  const Plan plan = make_plan(seed);
  const std::string marker = unique_marker();
  const std::string ranks = std::to_string(plan.ranks);
  Start start;
  start.arguments = {"--controller", "ucx", "--bind", "none", "--fail-grace", kGrace, "-np", ranks};
  if (plan.hosts) {
    start.arguments.insert(start.arguments.end(),
                           {"-H", "localhost:" + std::to_string(plan.ranks - 1) + ",b:1", "--rsh",
                            HVD_TEST_PRETENDED_AGENT});
  }
  start.arguments.insert(start.arguments.end(), {HVD_TEST_MEETING_PROGRAM, "lives", marker});
  HvdrunProcess hvdrun(start);
  const bool killed = kill_victim(plan, hvdrun, marker);
  const Result result = hvdrun.wait(kLimit);
  const std::string defect = judge(plan, result, killed, marker);
  const std::string victim = kVictims[static_cast<std::size_t>(plan.victim)];
  testing::JudgedJob job{
      .plan = "seed " + std::to_string(seed) + ": " + victim + " " + std::to_string(plan.rank) +
              " of " + ranks + (plan.hosts ? " on two hosts" : "") + " after " +
              std::to_string(plan.delay_us) + " us",
      .row = victim,
      .output =
          "--- stdout ---\n" + result.out + "--- stderr ---\n" + result.err + "--------------\n",
      .happened = killed};
  if (!defect.empty()) job.defects.push_back(defect);
  return job;
}

}  // namespace
}  // namespace hvd::launcher::test

int main(int argc, char** argv) {
  if (!hvd::launcher::finds_ucx()) {
    std::printf("SKIPPED: libucp.so.0 cannot be loaded\n");
    return 77;  // ctest's SKIP_RETURN_CODE
  }
  return hvd::testing::run_campaign(argc, argv,
                                    {.seeds = 100, .run_job = hvd::launcher::test::run_job});
}
