// The campaign of starts: many short jobs under hvdrun, whose ranks join, work and leave three
// times. One process (a rank, an agent or hvdrun) is killed at a random moment. No rank may wait
// for it, name another process as the cause, or outlive the job. No file may be left.
//
//   start_campaign [options of support/campaign.h]
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
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

enum class Victim { kRank, kAgent, kHvdrun };

struct Plan {
  int ranks = 2;
  bool hosts = false;  ///< the last rank runs on another host, which is simulated
  Victim victim = Victim::kRank;
  int rank = 0;      ///< the victim, or one whose agent is the victim
  int delay_us = 0;  ///< after the victim has started
};

Plan make_plan(std::uint64_t seed) {
  testing::Random random(seed, 0);
  Plan plan;
  plan.ranks = 2 + random.below(3);
  plan.hosts = random.below(3) == 0;
  const int victim = random.below(10);
  plan.victim = victim < 6 ? Victim::kRank : victim < 9 ? Victim::kAgent : Victim::kHvdrun;
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

/// The ranks that end with the victim.
bool ends_with_victim(const Plan& plan, int rank) {
  if (plan.victim != Victim::kAgent || !plan.hosts)
    return rank == plan.rank || plan.victim == Victim::kAgent;
  const int last = plan.ranks - 1;
  return (rank == last) == (plan.rank == last);
}

std::optional<pid_t> find_victim(const Plan& plan, const HvdrunProcess& hvdrun,
                                 const std::string& marker) {
  using namespace std::string_literals;
  if (plan.victim == Victim::kAgent) {
    // The remote shell that is simulated clears the environment.
    const bool remote = plan.hosts && plan.rank == plan.ranks - 1;
    for (const pid_t pid : agents_of(hvdrun.pid())) {
      const bool has_marker = read_words(pid, "environ").find(marker) != std::string::npos;
      if (has_marker != remote) return pid;
    }
    return std::nullopt;
  }
  const std::string variable = "\0HVD_RANK="s + std::to_string(plan.rank) + "\0"s;
  for (const pid_t pid : processes_with(marker))
    if (read_words(pid, "environ").find(variable) != std::string::npos) return pid;
  return std::nullopt;
}

/// Kills the victim at its moment. Returns false if it ended before.
bool kill_victim(const Plan& plan, const HvdrunProcess& hvdrun, const std::string& marker) {
  std::optional<pid_t> victim;
  for (int i = 0; plan.victim != Victim::kHvdrun && i < 20'000 && !victim; ++i) {
    if (!testing::exists(hvdrun.pid())) break;
    victim = find_victim(plan, hvdrun, marker);
    if (!victim) ::usleep(500);
  }
  ::usleep(static_cast<useconds_t>(plan.delay_us));
  if (plan.victim == Victim::kHvdrun) {
    hvdrun.signal(SIGKILL);
    return true;
  }
  // Search again, because the process may have ended and another may have its number.
  return victim && find_victim(plan, hvdrun, marker) == victim && ::kill(*victim, SIGKILL) == 0;
}

/// Describes the defect of a run; empty if it is correct.
std::string judge(const Plan& plan, const Result& result, bool killed, const std::string& marker) {
  if (result.code == -1) return "did not end in time";
  if (!wait_until_gone(marker, 20).empty()) return "left processes";
  if (plan.victim == Victim::kHvdrun) return "";
  int ends = 0, fine = 0, losses = 0, blamed = 0;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::string tag = "[" + std::to_string(rank) + "] ";
    const int lives = count(result.out, tag + "OK ");
    bool lost_one = false;
    for (int victim = 0; victim < plan.ranks; ++victim) {
      if (!ends_with_victim(plan, victim)) continue;
      const int reported = count(result.out, tag + "PeerLostError " + std::to_string(victim) + " ");
      losses += reported;
      lost_one = lost_one || reported == 1;
    }
    // Stopped before its main(), or never started.
    const bool stopped = count(result.out, tag) == 0 && result.code != 0;
    if (lives == kLives) ++fine;
    if (lives == kLives || lost_one || stopped || ends_with_victim(plan, rank)) ++ends;
    if (ends_with_victim(plan, rank))
      blamed += count(result.err, "rank " + std::to_string(rank) + " failed first: ");
  }
  if (count(result.out, "Error ") != losses) return "another error than the loss";
  if (ends != plan.ranks) return "a rank has neither reported the loss nor finished";
  if (fine == plan.ranks) return "";  // killed too late to have an effect
  if (!killed) return "failed by itself";
  // 70: the agent was killed before it had connected.
  const bool right_code = plan.victim == Victim::kRank
                              ? result.code == 137
                              : result.code == 69 || (result.code == 70 && result.out.empty());
  if (!right_code) return "exit code " + std::to_string(result.code);
  const int others = count(result.err, ") could not be reached or was lost") +
                     count(result.err, "hvdrun: the agent of this host ended");
  return blamed + others == 1 ? "" : "another rank is blamed";
}

testing::JudgedJob run_job(std::uint64_t seed, const testing::CampaignOptions&) {
  constexpr std::array kVictims = {"rank", "agent", "hvdrun"};
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
  const auto folder = std::filesystem::temp_directory_path() / ("hvd-start-campaign-" + marker);
  std::filesystem::create_directory(folder);
  start.environment = {{"HVD_TEST_MARKER", marker}, {"TMPDIR", folder.string()}};
  HvdrunProcess hvdrun(start);
  const bool killed = kill_victim(plan, hvdrun, marker);
  const Result result = hvdrun.wait(kLimit);
  std::string defect = judge(plan, result, killed, marker);
  if (defect.empty() && !std::filesystem::is_empty(folder)) defect = "left files";
  std::filesystem::remove_all(folder);
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
