// Kills workers of a real elastic job under hvdrun (test/elastic/elastic_program.cpp), which sums
// and checks in every step. The seed is printed.
//
//   elastic_kill_campaign [--seed N] [--kills N] [--ranks N] [--least N] [--spares N]
//                         [--hosts N] [--gap LEAST MOST] [--agents PERCENT] [--jobs N]
//                         [--kill-hvdrun PERCENT]
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "command/controller.h"
#include "elastic/abandoned_memory.h"
#include "elastic/board.h"
#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

using testing::Board;

struct Plan {
  int seed = 1, kills = 30;
  int ranks = 4, min_np = 1, spares = 0, hosts = 1;
  int min_gap = 50, max_gap = 400;  ///< milliseconds
  int agents = 0;                   ///< percent of the kills that hit an agent
  int jobs = 1;                     ///< one after the other, with the next seeds
  int kill_hvdrun = 0;              ///< percent of the jobs whose hvdrun is killed at last
};

Plan parse(int argc, char** argv) {
  Plan plan;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const int value = std::atoi(argv[i + 1]);
    if (option == "--seed") plan.seed = value;
    if (option == "--kills") plan.kills = value;
    if (option == "--ranks") plan.ranks = value;
    if (option == "--least") plan.min_np = value;
    if (option == "--spares") plan.spares = value;
    if (option == "--hosts") plan.hosts = value;
    if (option == "--agents") plan.agents = value;
    if (option == "--jobs") plan.jobs = value;
    if (option == "--kill-hvdrun") plan.kill_hvdrun = value;
    if (option == "--gap") {
      plan.min_gap = value;
      plan.max_gap = std::atoi(argv[++i + 1]);
    }
  }
  return plan;
}

void require(bool holds, const std::string& text) {
  if (!holds) throw std::runtime_error(text);
}

class Job {
 public:
  explicit Job(const Plan& plan);
  void run();

 private:
  Start start() const;
  void kill_one();
  void print_repairs() const;

  const Plan plan_;
  const int file_ = ::memfd_create("board", 0);  // hvdrun, its agents and the workers inherit it
  const std::string marker_ = unique_marker();
  std::set<pid_t> workers_;  ///< all that were alive at some kill
  std::mt19937 random_;
  Board* board_ = nullptr;
  std::unique_ptr<HvdrunProcess> hvdrun_;
  std::vector<std::int64_t> killed_at_;
  std::int64_t last_step_ = 0;
  int idle_ = 0;  ///< milliseconds between kills without a step
};

Job::Job(const Plan& plan) : plan_(plan), random_(static_cast<unsigned>(plan.seed)) {
  require(file_ >= 0 && ::ftruncate(file_, sizeof(Board)) == 0, "cannot make the board");
  board_ = Board::map(file_);
  require(board_ != nullptr, "cannot map the board");
}

Start Job::start() const {
  const auto text = [](int number) { return std::to_string(number); };
  Start start;
  start.arguments = {"--bind",   "none",
                     "-np",      text(plan_.ranks),
                     "--min-np", text(plan_.min_np),
                     "--spares", text(plan_.spares)};
  if (plan_.hosts > 1) {
    const int slots = (plan_.ranks + plan_.spares + plan_.hosts - 1) / plan_.hosts;
    std::string hosts = "localhost:" + text(slots);
    for (int host = 1; host < plan_.hosts; ++host)
      hosts += "," + std::string(1, static_cast<char>('a' + host)) + ":" + text(slots);
    start.arguments.insert(start.arguments.end(), {"-H", hosts, "--rsh", HVD_TEST_PRETENDED_AGENT});
  }
  start.arguments.insert(start.arguments.end(),
                         {HVD_TEST_ELASTIC_PROGRAM, "1000", "1000", text(file_), marker_});
  return start;
}

void Job::kill_one() {
  const bool agent = static_cast<int>(random_() % 100) < plan_.agents;
  const std::vector<pid_t> workers = processes_with(marker_);
  workers_.insert(workers.begin(), workers.end());
  const std::vector<pid_t> victims = agent ? agents_of(hvdrun_->pid()) : workers;
  std::vector<pid_t> own;
  for (const pid_t pid : victims)
    if (::getpgid(pid) != ::getpgid(hvdrun_->pid())) own.push_back(pid);
  if (own.empty()) {  // hvdrun waits before it starts workers again that have failed repeatedly
    const std::int64_t before = board_->steps.load();
    for (int i = 0; i < 6000 && board_->steps.load() == before; ++i) ::usleep(10'000);
    return;
  }
  if (::kill(own[random_() % own.size()], SIGKILL) == 0) killed_at_.push_back(Board::now());
}

void Job::run() {
  hvdrun_ = std::make_unique<HvdrunProcess>(start());
  constexpr double kLimit = 60;
  for (int i = 0; i < 6000 && board_->steps.load() == 0; ++i) ::usleep(10'000);
  require(board_->steps.load() > 0, "the job did not begin");
  while (static_cast<int>(killed_at_.size()) < plan_.kills) {
    const int gap =
        plan_.min_gap +
        static_cast<int>(random_() % static_cast<unsigned>(plan_.max_gap - plan_.min_gap + 1));
    ::usleep(static_cast<useconds_t>(gap) * 1000);
    if (std::exchange(last_step_, board_->last_step.load()) == last_step_) {
      idle_ += gap;  // no time in which this process was stopped
    } else {
      idle_ = 0;
    }
    require(idle_ < 60'000, "the job hangs");
    kill_one();
  }
  if (static_cast<int>(random_() % 100) < plan_.kill_hvdrun) {
    ::kill(hvdrun_->pid(), SIGKILL);
    require(board_->wrong.load() == 0 && board_->undone.load() == 0, "a sum or a commit was wrong");
    return require(wait_until_gone(marker_, 30).empty(), "processes are left");
  }
  const std::int64_t before = board_->steps.load();
  for (int i = 0; i < 6000 && board_->steps.load() < before + 100; ++i) ::usleep(10'000);
  board_->finish.store(1);
  const Result result = hvdrun_->wait(kLimit);
  if (result.code != 0) std::printf("%s%s", result.out.c_str(), result.err.c_str());
  require(result.code != -1, "the job did not end");
  require(result.code == 0, "exit code " + std::to_string(result.code));
  require(board_->wrong.load() == 0, "a sum was wrong");
  require(board_->undone.load() == 0, "a commit was undone");
  require(wait_until_gone(marker_, 10).empty(), "processes are left");
  for (const std::string& name : testing::abandoned_memory(workers_))
    require(false, "left in /dev/shm: " + name);
  print_repairs();
}

/// The time from a kill to the first step of a later generation.
void Job::print_repairs() const {
  std::vector<std::int64_t> firsts;
  for (const auto& first : board_->first_step)
    if (first.load() > 0) firsts.push_back(first.load());
  std::sort(firsts.begin(), firsts.end());
  std::vector<double> repairs;
  for (const std::int64_t kill : killed_at_) {
    const auto next = std::upper_bound(firsts.begin(), firsts.end(), kill);
    if (next != firsts.end()) repairs.push_back(static_cast<double>(*next - kill) / 1e6);
  }
  std::sort(repairs.begin(), repairs.end());
  if (repairs.empty()) return;
  std::printf(
      "%zu kills, %zu generations, %lld steps; from a kill to the next generation's first "
      "step: median %.1f ms, 99 of 100 %.1f ms, longest %.1f ms\n",
      killed_at_.size(), firsts.size(), static_cast<long long>(board_->steps.load()),
      repairs[repairs.size() / 2], repairs[repairs.size() * 99 / 100], repairs.back());
}

}  // namespace
}  // namespace hvd::launcher::test

int main(int argc, char** argv) {
  using namespace hvd::launcher;
  if (!finds_ucx()) {
    std::printf("SKIPPED: libucp.so.0 cannot be loaded\n");
    return 77;  // ctest's SKIP_RETURN_CODE
  }
  test::Plan plan = test::parse(argc, argv);
  for (int job = 0; job < plan.jobs; ++job, ++plan.seed) {
    std::printf("seed %d\n", plan.seed);
    std::fflush(stdout);
    try {
      test::Job(plan).run();
    } catch (const std::exception& error) {
      std::printf("FAILED: %s\n", error.what());
      return 1;
    }
  }
  return 0;
}
