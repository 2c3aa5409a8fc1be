// The campaign of starts by hand: pairs of jobs with one rendezvous (a port, a file or a program's
// store). In two thirds of the pairs a rank of the first job is killed at a random moment. The
// second job follows at once, and must run as if the first had never been there. No rank may wait
// for the victim longer than the start timeout, name another rank as the cause, work with a rank of
// the other job, or leave files or shared memory behind.
//
//   hand_campaign --way tcp|file|store [options of support/campaign.h]
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/campaign.h"
#include "support/free_port.h"
#include "support/process.h"
#include "support/seeds.h"

namespace hvd::testing {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// Start timeout of the ranks. A rank that is killed before it has arrived is named when this time
/// has passed.
constexpr int kStartTimeout = 5;
/// Time until a rank counts as hanging.
constexpr auto kTimeout = std::chrono::seconds(30);

struct Plan {
  std::string way = {};
  std::vector<int> delays_us = {};  ///< of each rank of the first job
  std::optional<int> victim = {};   ///< of the first job
  int kill_us = 0;                  ///< after the victim's start
  bool named = false;               ///< each job has a name of its own
  bool overlaps = false;            ///< the second job begins as soon as the victim is dead
  int size() const { return static_cast<int>(delays_us.size()); }
};

Plan make_plan(std::uint64_t seed, const std::string& way) {
  Random random(seed << 8U, way.size());  // no two seeds share a part of the sequence
  Plan plan{.way = way};
  const int size = 2 + random.below(3);
  const int spread_us = random.chance(80) ? 20'000 : random.chance(80) ? 200'000 : 3'000'000;
  for (int rank = 0; rank < size; ++rank) plan.delays_us.push_back(random.below(spread_us));
  const int victim = random.below(size);
  if (seed % 3 != 0) plan.victim = victim;
  plan.kill_us = random.below(random.chance(70) ? 120'000 : 500'000);
  plan.named = random.chance(50);
  // A rank 0 that lives on keeps its port.
  plan.overlaps = plan.named && plan.victim && (way != "tcp" || victim == 0);
  return plan;
}

/// The rendezvous of a pair of jobs.
class Rendezvous {
 public:
  explicit Rendezvous(const std::string& way) : way_(way), port_(free_port()) {
    std::string made = (fs::temp_directory_path() / "hvd-hand-campaign-XXXXXX").string();
    if (::mkdtemp(made.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = made;
  }
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous() { fs::remove_all(folder_); }

  std::string option() const {
    if (way_ == "store") return "store=" + folder_.string();
    if (way_ == "file") return "init_method=file://" + (folder_ / "job").string();
    return "init_method=tcp://127.0.0.1:" + std::to_string(port_);
  }
  /// Number of files. The values in a store belong to the program.
  std::ptrdiff_t files() const {
    return way_ == "store" ? 0 : std::distance(fs::directory_iterator(folder_), {});
  }

 private:
  const std::string way_;
  const int port_;
  fs::path folder_;
};

class Job {
 public:
  Job(const Plan& plan, const Rendezvous& rendezvous, std::uint64_t number, const std::string& name)
      : plan_(plan), rendezvous_(rendezvous), number_(number) {
    if (plan.named) environment_["HVD_JOB_NAME"] = name + std::to_string(number);
  }
  void start(int rank) {
    ranks_.emplace_back(
        rank,
        Process({HVD_START_PROGRAM, "run", rendezvous_.option(), "run=" + std::to_string(number_),
                 "rank=" + std::to_string(rank), "world_size=" + std::to_string(plan_.size()),
                 "init_timeout=" + std::to_string(kStartTimeout)},
                environment_));
    pids_.push_back(ranks_.back().second.pid());
  }
  /// Returns false if the rank ended before.
  bool kill(int victim) {
    for (auto& [rank, process] : ranks_) {
      if (rank != victim) continue;
      const bool ended = process.has_ended();
      process.signal(SIGKILL);
      return !ended;
    }
    return false;
  }
  void wait() {
    ends_.resize(ranks_.size());
    const auto deadline = Clock::now() + kTimeout;
    for (auto& [rank, process] : ranks_)
      ends_[static_cast<std::size_t>(rank)] = process.wait(deadline);
  }
  const std::vector<Process::End>& ends() const { return ends_; }
  const std::vector<pid_t>& pids() const { return pids_; }

 private:
  const Plan& plan_;
  const Rendezvous& rendezvous_;
  const std::uint64_t number_;
  Environment environment_ = {{"HVD_LOG_LEVEL", "error"}};
  std::vector<std::pair<int, Process>> ranks_;
  std::vector<Process::End> ends_;
  std::vector<pid_t> pids_;
};

/// Starts the ranks of the first job, and kills the victim at its moment. Returns whether it was
/// alive then.
bool run_first(const Plan& plan, Job& job) {
  std::vector<std::pair<int, std::optional<int>>> events;  // time, rank to start or the kill
  for (int rank = 0; rank < plan.size(); ++rank)
    events.emplace_back(plan.delays_us[static_cast<std::size_t>(rank)], rank);
  if (plan.victim)
    events.emplace_back(plan.delays_us[static_cast<std::size_t>(*plan.victim)] + plan.kill_us,
                        std::nullopt);
  std::sort(events.begin(), events.end());
  bool killed = false;
  const auto begin = Clock::now();
  for (const auto& [time, rank] : events) {
    std::this_thread::sleep_until(begin + std::chrono::microseconds(time));
    if (rank) {
      job.start(*rank);
    } else {
      killed = job.kill(*plan.victim);
    }
  }
  return killed;
}

/// Whether a rank of the first job has ended as it may after the kill.
bool ended_by_the_kill(const Plan& plan, int rank, const Process::End& end) {
  if (rank == *plan.victim) return end.code == 128 + SIGKILL;
  // Rank 0 of the second job has refused it.
  if (plan.way == "tcp" && plan.overlaps && end.code == 2)
    return count(end.output, "begins job 'second") == 1;
  return end.code == 3 &&
         count(end.output, "PeerLostError " + std::to_string(*plan.victim) + " ") == 1;
}

void judge(const std::string& name, const Job& job, const Plan& plan, bool killed,
           std::vector<std::string>& defects) {
  for (std::size_t rank = 0; rank < job.ends().size(); ++rank) {
    const Process::End& end = job.ends()[rank];
    const std::string whole = "OK " + std::to_string(rank) + ' ' + std::to_string(plan.size());
    const bool fine = end.code == 0 && count(end.output, whole) == 1;
    if (fine || (killed && ended_by_the_kill(plan, static_cast<int>(rank), end))) continue;
    defects.push_back("rank " + std::to_string(rank) + " of the " + name + " job ended with code " +
                      std::to_string(end.code));
  }
}

std::string outputs_of(const char* name, const Job& job) {
  std::string text;
  for (std::size_t rank = 0; rank < job.ends().size(); ++rank) {
    const Process::End& end = job.ends()[rank];
    text += std::string(name) + " job, rank " + std::to_string(rank) + ": code " +
            std::to_string(end.code) + "\n" + end.output;
  }
  return text;
}

/// Names in /dev/shm that these processes have made.
std::vector<std::string> segments_of(const std::vector<pid_t>& pids) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    for (const pid_t pid : pids)
      if (name.starts_with("hvd-segment-" + std::to_string(pid) + "-")) names.push_back(name);
  }
  return names;
}

std::string to_string(const Plan& plan, std::uint64_t seed) {
  std::string text = "seed " + std::to_string(seed) + ": " + plan.way + ", " +
                     std::to_string(plan.size()) + (plan.named ? " named" : "") + " ranks";
  if (plan.victim)
    text += ", rank " + std::to_string(*plan.victim) + " killed after " +
            std::to_string(plan.kill_us) + " us";
  return text + (plan.overlaps ? ", the next job at once" : "");
}

JudgedJob run_pair(std::uint64_t seed, const CampaignOptions& options) {
  const Plan plan = make_plan(seed, options.own.size() > 1 ? options.own[1] : "tcp");
  const Rendezvous rendezvous(plan.way);
  Job first(plan, rendezvous, 2 * seed, "first"), second(plan, rendezvous, 2 * seed + 1, "second");
  const bool killed = run_first(plan, first);
  if (!plan.overlaps) first.wait();
  for (int rank = 0; rank < plan.size(); ++rank) second.start(rank);
  second.wait();
  if (plan.overlaps) first.wait();

  JudgedJob job{.plan = to_string(plan, seed),
                .row = !plan.victim    ? "none"
                       : plan.overlaps ? "kill, next at once"
                                       : "kill",
                .output = outputs_of("first", first) + outputs_of("second", second),
                .happened = killed};
  judge("first", first, plan, killed, job.defects);
  judge("second", second, plan, false, job.defects);
  // A named job without its rank 0 leaves its files for the next job of that name.
  const bool may_leave_files = killed && plan.named && *plan.victim == 0;
  if (rendezvous.files() > (may_leave_files ? 1 : 0)) job.defects.emplace_back("left files");
  std::vector<pid_t> pids = second.pids();
  // Shared memory of a killed job is removed by the next one that begins after its end.
  if (!plan.overlaps) pids.insert(pids.end(), first.pids().begin(), first.pids().end());
  for (const std::string& name : segments_of(pids)) job.defects.push_back("left /dev/shm/" + name);
  return job;
}

}  // namespace
}  // namespace hvd::testing

int main(int argc, char** argv) {
  return hvd::testing::run_campaign(
      argc, argv,
      {.seeds = 60, .own_option = "--way tcp|file|store", .run_job = hvd::testing::run_pair});
}
