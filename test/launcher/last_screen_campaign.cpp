// The campaign of last screens: many short jobs under hvdrun in which one rank fails. The last
// message must name that rank, how it ended and its error text, however the other ranks react.
//
//   last_screen_campaign [options of support/campaign.h]
#include <array>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "hvdrun_process.h"
#include "last_screen_plan.h"
#include "support/campaign.h"
#include "system/text.h"

namespace hvd::launcher::test {
namespace {

constexpr double kLimit = 25;
constexpr int kScreenLines = 30;

std::string last_screen(const std::string& text) {
  const std::vector<std::string> lines = lines_of(text);
  const std::size_t begin = lines.size() > kScreenLines ? lines.size() - kScreenLines : 0;
  std::string screen;
  for (std::size_t i = begin; i < lines.size(); ++i) screen += lines[i] + "\n";
  // The ranks' output precedes hvdrun's own message.
  const std::size_t account = screen.rfind("hvdrun: rank ");
  return account == std::string::npos ? screen : screen.substr(account);
}

struct Expected {
  std::string first, also;
  std::optional<int> code;
};

Expected expected_of(const Plan& plan) {
  const std::string rank = "rank " + std::to_string(plan.victim);
  const std::string failed = "hvdrun: " + rank + " failed first: ";
  switch (plan.fault) {
    case Fault::kThrow:
    case Fault::kBadAlloc:
      if (plan.caught) return {failed + "exited with code 1", what_of(plan), 1};
      return {failed + "killed by SIGABRT (6)", what_of(plan), 134};
    case Fault::kExit:
      return {failed + "exited with code " + std::to_string(plan.code), "", plan.code};
    case Fault::kMpiAbort:
      return {failed + "exited with code " + std::to_string(plan.code), "", plan.code};
    case Fault::kExitZero:
      return {"hvdrun: " + rank + " ended with code 0 but without hvd::shutdown()", "", 1};
    case Fault::kSignal:
      return {failed + "killed by " + signal_name(plan.signal), "", 128 + plan.signal};
    case Fault::kAbort:
      return {failed + "killed by SIGABRT (6)", "", 134};
    // Every rank gets the error, and any rank may be the first to end because of it.
    case Fault::kMismatch:
      return {" failed first: ", "shape differs", std::nullopt};
    case Fault::kStall:
      return {" failed first: ", "missing: " + rank, std::nullopt};
  }
  return {};
}

/// Describes the defect of a run; empty if it is correct.
std::string judge(const Plan& plan, const Result& result) {
  const Expected expected = expected_of(plan);
  const std::string screen = last_screen(result.err);
  if (result.code == -1)
    return "it did not end within " + std::to_string(static_cast<int>(kLimit)) + " s";
  if (result.code == 0) return "exit code 0";
  if (expected.code && result.code != *expected.code)
    return "exit code " + std::to_string(result.code) + ", expected " +
           std::to_string(*expected.code);
  for (const std::string& text : {expected.first, expected.also}) {
    if (screen.find(text) == std::string::npos) return "the last screen lacks '" + text + "'";
  }
  return {};
}

std::optional<testing::JudgedJob> run_job(std::uint64_t seed, const testing::CampaignOptions&) {
  constexpr std::array kFaultNames = {"throw", "bad_alloc", "exit",     "exit(0)", "signal",
                                      "abort", "MPI_Abort", "mismatch", "stall"};
  constexpr std::array kMoments = {"before init", "in a step", "among submits", "in a thread"};
  const Plan plan = make_plan(seed);
  const char* const controller = std::getenv("LAUNCHER_TEST_CONTROLLER");
  if (plan.fault == Fault::kMpiAbort && controller != nullptr &&
      std::string_view(controller) == "ucx")
    return std::nullopt;
  Start start;
  // The error of a stalled rank is not tested here.
  start.arguments = {"-np", std::to_string(plan.ranks),   "--fail-grace",
                     "1",   HVD_TEST_LAST_SCREEN_PROGRAM, std::to_string(seed)};
  start.environment = {{"HVD_STALL_SHUTDOWN", "1"}, {"OMP_NUM_THREADS", "1"}};
  const Result result = HvdrunProcess(start).wait(kLimit);
  const std::string fault = kFaultNames[static_cast<std::size_t>(plan.fault)];
  testing::JudgedJob job{
      .plan = "seed " + std::to_string(seed) + ": " + fault +
              (plan.fault == Fault::kSignal ? " " + std::to_string(plan.signal) : "") +
              " on rank " + std::to_string(plan.victim) + " of " + std::to_string(plan.ranks) +
              ", " + kMoments[static_cast<std::size_t>(plan.moment)] + " " +
              std::to_string(plan.step) + (plan.caught ? ", caught" : "") +
              (plan.others_catch ? ", the others catch" : ""),
      .row = fault,
      .output = "--- stderr ---\n" + result.err + "--------------\n"};
  if (const std::string defect = judge(plan, result); !defect.empty())
    job.defects.push_back(defect);
  return job;
}

}  // namespace
}  // namespace hvd::launcher::test

int main(int argc, char** argv) {
  return hvd::testing::run_campaign(argc, argv,
                                    {.seeds = 200, .run_job = hvd::launcher::test::run_job});
}
