// The campaign of elastic jobs in hvdrun: workers without a data plane
// (programs/worker_program.cpp), of which some are killed at random moments, and agents too. The
// job must end with 0, account for every worker that was killed, and leave nothing.
//
//   elastic_job_campaign [options of support/campaign.h] [--kills N]
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "support/campaign.h"
#include "support/seeds.h"

namespace hvd::launcher::test {
namespace {

constexpr double kLimit = 120;

struct Plan {
  int ranks = 2, min_np = 1, spares = 0, hosts = 1;
  int kills = 1;
  int steps = 100;
};

Plan make_plan(testing::Random& random, int kills) {
  Plan plan;
  plan.ranks = 1 + random.below(6);
  plan.min_np = 1 + random.below(plan.ranks);
  plan.spares = random.chance(30) ? 1 + random.below(2) : 0;
  plan.hosts = random.chance(50) ? 1 : 2 + random.below(2);
  plan.kills = kills > 0 ? kills : 1 + random.below(12);
  plan.steps = 50 + random.below(250);
  return plan;
}

std::string describe(const Plan& plan) {
  return std::to_string(plan.ranks) + " ranks, least " + std::to_string(plan.min_np) + ", " +
         std::to_string(plan.spares) + " spares, " + std::to_string(plan.hosts) + " hosts, " +
         std::to_string(plan.kills) + " kills, " + std::to_string(plan.steps) + " steps";
}

Start start_of(const Plan& plan, const std::string& marker) {
  const auto number = [](int value) { return std::to_string(value); };
  Start start;
  start.arguments = {"--bind",   "none",
                     "-np",      number(plan.ranks),
                     "--min-np", number(plan.min_np),
                     "--spares", number(plan.spares)};
  if (plan.hosts > 1) {
    const int slots = plan.ranks + plan.spares;
    std::string hosts = "localhost:" + number(slots);
    for (int host = 1; host < plan.hosts; ++host)
      hosts += "," + std::string(1, static_cast<char>('a' + host)) + ":" + number(slots);
    start.arguments.insert(start.arguments.end(), {"-H", hosts, "--rsh", HVD_TEST_PRETENDED_AGENT});
  }
  start.arguments.insert(start.arguments.end(),
                         {HVD_TEST_WORKER_PROGRAM, "load", "ms=5", "steps=" + number(plan.steps),
                          "program=" + marker});
  start.environment = {{"HVD_PEER_TIMEOUT", "3"}};
  return start;
}

/// Kills at random moments. Returns how many processes it has killed.
int kill_some(const Plan& plan, const HvdrunProcess& hvdrun, const std::string& marker,
              testing::Random& random) {
  int killed = 0;
  for (int i = 0; i < plan.kills && testing::exists(hvdrun.pid()); ++i) {
    ::usleep(static_cast<useconds_t>(random.chance(50) ? random.below(30'000)
                                                       : 50'000 + random.below(350'000)));
    const bool agent = random.chance(8);
    std::vector<pid_t> victims = agent ? agents_of(hvdrun.pid()) : processes_with(marker);
    std::erase(victims, hvdrun.pid());
    std::erase_if(victims, [&](pid_t pid) { return ::getpgid(pid) == ::getpgid(hvdrun.pid()); });
    if (victims.empty()) continue;
    const pid_t victim =
        victims[static_cast<std::size_t>(random.below(static_cast<int>(victims.size())))];
    killed += ::kill(victim, SIGKILL) == 0 ? 1 : 0;
  }
  return killed;
}

/// The ids of the workers in lines such as "[w3] worker 3 pid 17 ..." or "hvdrun: worker 3 on ...".
std::set<int> workers_in(const std::string& text, const std::string& before,
                         const std::string& after) {
  std::set<int> ids;
  for (const std::string& line : lines_of(text)) {
    const std::size_t at = line.find(before);
    if (at == std::string::npos || line.find(after) == std::string::npos) continue;
    ids.insert(std::atoi(line.c_str() + at + before.size()));
  }
  return ids;
}

std::string judge(const Result& result, const std::string& marker) {
  if (result.code == -1) return "did not end in time";
  if (!wait_until_gone(marker, 20).empty()) return "left processes";
  if (result.code != 0) return "exit code " + std::to_string(result.code);
  const std::set<int> started = workers_in(result.out, "worker ", " pid ");
  const std::set<int> ended = workers_in(result.out, "worker ", " ends at commit ");
  const std::set<int> lost = workers_in(result.err, "hvdrun: worker ", " was lost ");
  for (const int id : started)
    if (!ended.contains(id) && !lost.contains(id) &&
        result.out.find("[w" + std::to_string(id) + "] exits") == std::string::npos)
      return "worker " + std::to_string(id) + " is missing in the account";
  return "";
}

testing::JudgedJob run_job(std::uint64_t seed, const testing::CampaignOptions& options) {
  testing::Random random(seed, 0);
  const int kills = options.own.size() == 2 ? std::atoi(options.own[1].c_str()) : 0;
  Plan plan = make_plan(random, kills);
  if (kills > 0) plan.steps = 50 * kills;
  const std::string marker = unique_marker();
  HvdrunProcess hvdrun(start_of(plan, marker));
  const bool began = hvdrun.wait_for("runs generation 1", plan.ranks, kLimit);
  const int killed = began ? kill_some(plan, hvdrun, marker, random) : 0;
  const Result result = hvdrun.wait(kLimit);
  const std::string defect = began ? judge(result, marker) : "did not begin";
  testing::JudgedJob job{.plan = "seed " + std::to_string(seed) + ": " + describe(plan),
                         .row = plan.hosts > 1 ? "several hosts" : "one host",
                         .output = "--- stdout ---\n" + result.out + "--- stderr ---\n" +
                                   result.err + "--------------\n",
                         .happened = killed > 0};
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
  return hvd::testing::run_campaign(
      argc, argv,
      {.seeds = 100, .own_option = "--kills N", .run_job = hvd::launcher::test::run_job});
}
