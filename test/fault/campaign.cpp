// The fault campaign: many short jobs in which one rank fails at a random moment. Each job must end
// in time on every rank, with the right class of error or the right results.
//
//   campaign [options of support/campaign.h] [--ucx]
//   --ucx: jobs without MPI, whose ranks meet in a file
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "fault/campaign_judge.h"
#include "fault/campaign_plan.h"
#include "support/campaign.h"
#include "support/mpiexec.h"
#include "support/process.h"

namespace hvd::campaign {
namespace {

using Clock = std::chrono::steady_clock;
using testing::CampaignOptions;
using testing::Process;

constexpr auto kHardLimit = std::chrono::seconds(40);
// How long a rank may take to end after its last output.
constexpr auto kEndTimeout = std::chrono::seconds(6);

/// Starts the ranks under an mpirun that does not end them by itself, or in a shell.
Process start_ranks(const Plan& plan, const std::string& meeting) {
  const std::string ranks = std::to_string(plan.ranks);
  const std::string seed = std::to_string(plan.seed);
  testing::Environment environment;
  if (!plan.hosts.empty()) environment["HVD_TEST_HOSTS"] = plan.hosts;
  if (meeting.empty()) {
    std::vector<std::string> words = testing::tolerant_mpiexec(HVD_MPIEXEC, plan.ranks);
    words.insert(words.end(), {HVD_CAMPAIGN_PROGRAM, seed});
    return {words, environment};
  }
  environment["HVD_INIT_METHOD"] = "file://" + meeting;
  environment["WORLD_SIZE"] = ranks;
  std::string script;
  for (int rank = 0; rank < plan.ranks; ++rank)
    script += text("RANK=", rank, " " HVD_CAMPAIGN_PROGRAM " ", seed, " & ");
  return {{"sh", "-c", script + "wait"}, environment};
}

class Job {
 public:
  Job(const Plan& plan, const CampaignOptions& options, const std::string& meeting)
      : plan_(plan), options_(options), process_(start_ranks(plan, meeting)) {}

  Run watch();

 private:
  void read_lines();
  bool survivors_have_reported() const;
  bool survivors_live() const;
  void end_all(const std::string& why);

  const Plan& plan_;
  const CampaignOptions& options_;
  const Clock::time_point begin_ = Clock::now();
  Process process_;
  std::size_t read_ = 0;  ///< bytes of the output
  Run run_;
};

void Job::read_lines() {
  const std::string& text = process_.written();
  for (auto end = text.find('\n', read_); end != std::string::npos; end = text.find('\n', read_)) {
    read_line(text.substr(read_, end - read_), run_.ranks);
    read_ = end + 1;
  }
}

bool Job::survivors_have_reported() const {
  return std::all_of(plan_.survivors.begin(), plan_.survivors.end(), [this](int rank) {
    const auto found = run_.ranks.find(rank);
    return found != run_.ranks.end() && !found->second.end.empty();
  });
}

bool Job::survivors_live() const {
  return std::any_of(plan_.survivors.begin(), plan_.survivors.end(),
                     [this](int rank) { return testing::exists(run_.ranks.at(rank).pid); });
}

void Job::end_all(const std::string& why) {
  run_.cut_off = true;
  run_.output += "--- " + why + '\n';
  for (const auto& [rank, witness] : run_.ranks) {
    if (!testing::exists(witness.pid)) continue;
    run_.output +=
        text("--- rank ", rank, " lives\n", testing::end_late_process(witness.pid, options_));
  }
}

Run Job::watch() {
  std::optional<Clock::time_point> reported;  // when the last survivor printed its end
  bool victim_ended = plan_.fault != Fault::kStop;
  const auto last_limit = begin_ + kHardLimit + 2 * kEndTimeout;
  while (process_.read_some(Clock::now() + std::chrono::milliseconds(50)) != Process::Read::kEnd) {
    read_lines();
    const auto now = Clock::now();
    if (!reported && survivors_have_reported()) reported = now;
    const bool late = reported && now - *reported > kEndTimeout;
    if (!victim_ended && reported && (late || !survivors_live())) {
      const Witness& victim = run_.ranks[plan_.victim];
      victim_ended = true;
      if (late) end_all("the others have printed their end and do not end");
      if (victim.fault > 0 && testing::exists(victim.pid)) ::kill(victim.pid, SIGKILL);
    }
    if (!run_.cut_off && (now - begin_ > kHardLimit || (late && victim_ended)))
      end_all("out of time");
    if (run_.cut_off && now > last_limit) break;
  }
  run_.output = process_.wait(last_limit).output + '\n' + run_.output;
  run_.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  return std::move(run_);
}

testing::JudgedJob run_job(std::uint64_t seed, const CampaignOptions& options) {
  const Plan plan = make_plan(seed);
  const std::string meeting =
      options.own.empty() ? "" : "/tmp/hvd_campaign." + std::to_string(::getpid());
  const Run run = Job(plan, options, meeting).watch();
  if (!meeting.empty()) std::filesystem::remove_all(meeting);
  return judge(plan, run);
}

}  // namespace
}  // namespace hvd::campaign

int main(int argc, char** argv) {
  using namespace hvd::campaign;
  for (const auto& [name, value] :
       hvd::testing::Environment{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                 {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                 {"OMP_NUM_THREADS", "1"},
                                 {"HVD_PEER_TIMEOUT", std::to_string(kPeerTimeout)},
                                 {"HVD_STALL_WARNING", "1"},
                                 {"HVD_STALL_SHUTDOWN", std::to_string(kStallShutdown)},
                                 {"HVD_START_TIMEOUT", std::to_string(kStartTimeout)}})
    ::setenv(name.c_str(), value.c_str(), 1);
  return hvd::testing::run_campaign(argc, argv,
                                    {.seeds = 200, .own_option = "--ucx", .run_job = run_job});
}
