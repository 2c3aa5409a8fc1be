#include "support/campaign.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>

#include "support/run_command.h"

namespace hvd::testing {
namespace {

struct SummaryRow {
  int jobs = 0, happened = 0, wrong = 0;
  double detection = 0;

  void add(const SummaryRow& other) {
    jobs += other.jobs;
    happened += other.happened;
    wrong += other.wrong;
    detection = std::max(detection, other.detection);
  }
};

void print_row(const std::string& name, const SummaryRow& row) {
  std::printf("%-22s %5d %9d %6d %6d  %.2f s\n", name.c_str(), row.jobs, row.happened,
              row.jobs - row.wrong, row.wrong, row.detection);
}

struct CommandLine {
  std::uint64_t first = 0, seeds = 0;
  bool verbose = false;
  CampaignOptions options = {};
};

bool parse(int argc, char** argv, const std::string& own_option, CommandLine& line) {
  const std::string own = own_option.substr(0, own_option.find(' '));
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--verbose") {
      line.verbose = true;
    } else if (name == "--stacks") {
      line.options.stacks = true;
    } else if (name == own_option) {
      line.options.own = {name};
    } else if (++i == argc) {
      return false;
    } else if (name == own) {
      line.options.own = {name, argv[i]};
    } else if (name == "--first") {
      line.first = std::strtoull(argv[i], nullptr, 10);
    } else if (name == "--seeds") {
      line.seeds = std::strtoull(argv[i], nullptr, 10);
    } else {
      return false;
    }
  }
  return true;
}

std::optional<JudgedJob> run_one(const Campaign& campaign, std::uint64_t seed,
                                 const CampaignOptions& options) {
  try {
    return campaign.run_job(seed, options);
  } catch (const std::exception& error) {
    return JudgedJob{.plan = "seed " + std::to_string(seed),
                     .row = "not judged",
                     .defects = {std::string("the campaign failed: ") + error.what()}};
  }
}

}  // namespace

int run_campaign(int argc, char** argv, const Campaign& campaign) {
  CommandLine line{.seeds = campaign.seeds};
  if (!parse(argc, argv, campaign.own_option, line)) {
    std::fprintf(stderr, "usage: %s [--seeds N] [--first SEED] [--verbose] [--stacks] %s\n",
                 argv[0], campaign.own_option.c_str());
    return 2;
  }
  std::map<std::string, SummaryRow> rows;
  SummaryRow all;
  std::string repetitions;
  for (std::uint64_t seed = line.first; seed < line.first + line.seeds; ++seed) {
    const auto begin = std::chrono::steady_clock::now();
    const std::optional<JudgedJob> job = run_one(campaign, seed, line.options);
    if (!job) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const bool right = job->defects.empty();
    const SummaryRow row{1, job->happened ? 1 : 0, right ? 0 : 1, job->detection};
    rows[job->row].add(row);
    all.add(row);
    std::printf("%s: %s after %.1f s\n", job->plan.c_str(), right ? "right" : "WRONG",
                seconds.count());
    for (const std::string& defect : job->defects) std::printf("    %s\n", defect.c_str());
    if (line.verbose || !right) std::printf("%s", job->output.c_str());
    std::fflush(stdout);
    if (right) continue;
    repetitions += "wrong: " + job->plan + "; to repeat it: " + argv[0] + " --first " +
                   std::to_string(seed) + " --seeds 1 --stacks";
    for (const std::string& word : line.options.own) repetitions += ' ' + word;
    repetitions += '\n';
  }
  std::printf("\n%-22s %5s %9s %6s %6s  %s\n", "fault", "jobs", "happened", "right", "wrong",
              "slowest detection");
  for (const auto& [name, row] : rows) print_row(name, row);
  print_row("all", all);
  std::printf("%s", repetitions.c_str());
  return all.wrong == 0 ? 0 : 1;
}

bool exists(pid_t pid) { return pid > 0 && ::kill(pid, 0) == 0; }

std::string end_late_process(pid_t pid, const CampaignOptions& options) {
  std::string stacks;
  if (options.stacks) {
    stacks = run_command("gdb -p " + std::to_string(pid) + " -batch -ex 'thread apply all bt 40'",
                         /*seconds=*/30)
                 .output;
  }
  ::kill(pid, SIGKILL);
  return stacks;
}

}  // namespace hvd::testing
