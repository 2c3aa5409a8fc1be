// The fault campaign: many short jobs in which one rank fails at a random moment. Each job must end
// in time on every rank, with the right class of error or the right results.
//
//   campaign [--seeds N] [--first SEED] [--verbose] [--stacks] [--ucx]
//   --stacks: the stacks of every rank that hangs, from gdb
//   --ucx: jobs without MPI, whose ranks meet in a file
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "fault/campaign_judge.h"
#include "fault/campaign_plan.h"

namespace hvd::campaign {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kHardLimit = 40;
// How long a rank may take to end after its last output.
constexpr double kPatienceAtEnd = 6;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

bool alive(pid_t pid) { return pid > 0 && ::kill(pid, 0) == 0; }

std::string stacks_of(pid_t pid) {
  const std::string command =
      "timeout 30 gdb -p " + std::to_string(pid) + " -batch -ex 'thread apply all bt 40' 2>&1";
  std::FILE* const gdb = ::popen(command.c_str(), "r");
  if (gdb == nullptr) return {};
  std::string text;
  std::array<char, 4096> buffer;
  while (const std::size_t size = std::fread(buffer.data(), 1, buffer.size(), gdb))
    text.append(buffer.data(), size);
  ::pclose(gdb);
  return text;
}

struct Options {
  std::uint64_t first = 0;
  std::uint64_t seeds = 200;
  bool verbose = false;
  bool stacks = false;
  bool ucx = false;
};

/// One job, under an mpirun that does not end it by itself, or under a process that replaces
/// mpirun.
class Job {
 public:
  Job(const Plan& plan, const Options& options) : plan_(plan), options_(options) { start(); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    ::close(output_);
    if (options_.ucx) ::unlink(meeting_.c_str());
  }

  Run watch();

 private:
  void start();
  [[noreturn]] void become_mpirun() const;
  [[noreturn]] void start_ranks_and_wait() const;
  bool read_some();
  bool survivors_spoke() const;
  bool survivors_live() const;
  void end_all(const std::string& why);

  const Plan& plan_;
  const Options& options_;
  const std::string meeting_ = "/tmp/hvd_campaign." + std::to_string(::getpid());
  pid_t mpirun_ = -1;
  int output_ = -1;
  std::string line_;
  Run run_;
};

void Job::start() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) std::abort();
  mpirun_ = ::fork();
  if (mpirun_ == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    if (!plan_.hosts.empty()) ::setenv("HVD_TEST_HOSTS", plan_.hosts.c_str(), 1);
    options_.ucx ? start_ranks_and_wait() : become_mpirun();
  }
  ::close(ends[1]);
  output_ = ends[0];
}

void Job::become_mpirun() const {
  const std::string ranks = std::to_string(plan_.ranks);
  const std::string seed = std::to_string(plan_.seed);
  ::execlp(HVD_MPIEXEC, HVD_MPIEXEC, "--enable-recovery", "--mca", "orte_abort_on_non_zero_status",
           "0", "--oversubscribe", "--bind-to", "none", "-np", ranks.c_str(), HVD_CAMPAIGN_PROGRAM,
           seed.c_str(), nullptr);
  ::_exit(127);
}

void Job::start_ranks_and_wait() const {
  ::setenv("HVD_INIT_METHOD", ("file://" + meeting_).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(plan_.ranks).c_str(), 1);
  for (int rank = 0; rank < plan_.ranks; ++rank) {
    if (::fork() != 0) continue;
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::execl(HVD_CAMPAIGN_PROGRAM, HVD_CAMPAIGN_PROGRAM, std::to_string(plan_.seed).c_str(),
            nullptr);
    ::_exit(127);
  }
  while (::wait(nullptr) > 0) {
  }
  ::_exit(0);
}

/// False at the end of the output.
bool Job::read_some() {
  pollfd entry = {output_, POLLIN, 0};
  if (::poll(&entry, 1, 50) <= 0) return true;
  std::array<char, 4096> buffer;
  const ssize_t size = ::read(output_, buffer.data(), buffer.size());
  if (size <= 0) return false;
  for (const char c : std::string(buffer.data(), static_cast<std::size_t>(size))) {
    run_.output += c;
    if (c != '\n') {
      line_ += c;
      continue;
    }
    read_line(line_, run_.ranks);
    line_.clear();
  }
  return true;
}

bool Job::survivors_spoke() const {
  return std::all_of(plan_.survivors.begin(), plan_.survivors.end(), [this](int rank) {
    const auto found = run_.ranks.find(rank);
    return found != run_.ranks.end() && !found->second.end.empty();
  });
}

bool Job::survivors_live() const {
  return std::any_of(plan_.survivors.begin(), plan_.survivors.end(),
                     [this](int rank) { return alive(run_.ranks.at(rank).pid); });
}

void Job::end_all(const std::string& why) {
  run_.cut_off = true;
  run_.output += "--- " + why + '\n';
  for (const auto& [rank, witness] : run_.ranks) {
    if (!alive(witness.pid)) continue;
    run_.output += "--- rank " + std::to_string(rank) + " lives\n";
    if (options_.stacks) run_.output += stacks_of(witness.pid);
  }
  for (const auto& [rank, witness] : run_.ranks) {
    if (alive(witness.pid)) ::kill(witness.pid, SIGKILL);
  }
}

Run Job::watch() {
  const auto begin = Clock::now();
  auto spoke = Clock::time_point::max();
  bool victim_ended = plan_.fault != Fault::kStop;
  while (read_some()) {
    if (spoke == Clock::time_point::max() && survivors_spoke()) spoke = Clock::now();
    const bool late = spoke != Clock::time_point::max() && seconds_since(spoke) > kPatienceAtEnd;
    if (!victim_ended && spoke != Clock::time_point::max() && (late || !survivors_live())) {
      const Witness& victim = run_.ranks[plan_.victim];
      victim_ended = true;
      if (late) end_all("the others have spoken their last word and do not end");
      if (victim.fault > 0 && alive(victim.pid)) ::kill(victim.pid, SIGKILL);
    }
    if (!run_.cut_off && (seconds_since(begin) > kHardLimit || (late && victim_ended)))
      end_all("out of time");
    if (run_.cut_off && seconds_since(begin) > kHardLimit + 2 * kPatienceAtEnd) {
      ::kill(mpirun_, SIGKILL);
      break;
    }
  }
  int status = 0;
  ::waitpid(mpirun_, &status, 0);
  run_.seconds = seconds_since(begin);
  return std::move(run_);
}

struct Tally {
  int runs = 0;
  int happened = 0;
  int wrong = 0;
  double slowest = 0;
};

void print_table(const std::map<std::pair<std::string, int>, Tally>& tallies) {
  std::printf("\n%-12s %5s %5s %9s %6s %6s  %s\n", "fault", "ranks", "runs", "happened", "right",
              "wrong", "slowest detection");
  Tally all;
  for (const auto& [name, tally] : tallies) {
    std::printf("%-12s %5d %5d %9d %6d %6d  %.2f s\n", name.first.c_str(), name.second, tally.runs,
                tally.happened, tally.runs - tally.wrong, tally.wrong, tally.slowest);
    all.runs += tally.runs;
    all.happened += tally.happened;
    all.wrong += tally.wrong;
    all.slowest = std::max(all.slowest, tally.slowest);
  }
  std::printf("%-12s %5s %5d %9d %6d %6d  %.2f s\n", "all", "", all.runs, all.happened,
              all.runs - all.wrong, all.wrong, all.slowest);
}

int run_campaign(const Options& options, const char* program) {
  std::map<std::pair<std::string, int>, Tally> tallies;
  std::vector<std::uint64_t> bad;
  for (std::uint64_t seed = options.first; seed < options.first + options.seeds; ++seed) {
    const Plan plan = make_plan(seed);
    const Run run = Job(plan, options).watch();
    const Verdict verdict = judge(plan, run);
    Tally& tally = tallies[{to_string(plan.fault), plan.ranks}];
    ++tally.runs;
    tally.happened += verdict.happened ? 1 : 0;
    tally.slowest = std::max(tally.slowest, verdict.slowest);
    std::printf("%s: %s after %.1f s\n", describe(plan).c_str(),
                verdict.faults.empty() ? "right" : "WRONG", run.seconds);
    for (const auto& fault : verdict.faults) std::printf("    %s\n", fault.c_str());
    if (options.verbose || !verdict.faults.empty()) std::printf("%s", run.output.c_str());
    std::fflush(stdout);
    if (verdict.faults.empty()) continue;
    ++tally.wrong;
    bad.push_back(seed);
  }
  print_table(tallies);
  for (const auto seed : bad) {
    std::printf("wrong: %s; to repeat it: %s --first %llu --seeds 1 --stacks%s\n",
                describe(make_plan(seed)).c_str(), program, static_cast<unsigned long long>(seed),
                options.ucx ? " --ucx" : "");
  }
  return bad.empty() ? 0 : 1;
}

void set_environment() {
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), 1);
  };
  set("OMPI_ALLOW_RUN_AS_ROOT", "1");
  set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  set("OMP_NUM_THREADS", "1");
  set("HVD_PEER_TIMEOUT", std::to_string(kPeerTimeout));
  set("HVD_STALL_WARNING", "1");
  set("HVD_STALL_SHUTDOWN", std::to_string(kStallShutdown));
  set("HVD_START_TIMEOUT", std::to_string(kStartTimeout));
}

}  // namespace
}  // namespace hvd::campaign

int main(int argc, char** argv) {
  hvd::campaign::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool has_value = i + 1 < argc;
    if (name == "--verbose") {
      options.verbose = true;
    } else if (name == "--stacks") {
      options.stacks = true;
    } else if (name == "--ucx") {
      options.ucx = true;
    } else if (name == "--first" && has_value) {
      options.first = std::strtoull(argv[++i], nullptr, 10);
    } else if (name == "--seeds" && has_value) {
      options.seeds = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: %s [--seeds N] [--first SEED] [--verbose] [--stacks] [--ucx]\n",
                   argv[0]);
      return 2;
    }
  }
  hvd::campaign::set_environment();
  return hvd::campaign::run_campaign(options, argv[0]);
}
