// Programs with LibTorch whose ranks meet in the store of torchrun's agent or in a store of their
// own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "start/torchrun.h"
#include "start/torchrun_hosts.h"

namespace hvd::testing {
namespace {

TEST(TorchStart, RanksOfTorchrunMeetInItsAgentsStore) {
  const auto end = run_torchrun({HVD_TORCH_START_PROGRAM, "agent"});
  EXPECT_EQ(end.code, 0) << end.output;
  EXPECT_EQ(count(end.output, "OK 0 2 0 ucx store://"), 2) << end.output;
  EXPECT_EQ(count(end.output, "OK 1 2 1 ucx store://"), 2) << end.output;
}

void expect_all_met_at_the_agent(const std::string& output, const std::string& place) {
  for (const char* const rank : {"0 4 0", "1 4 1", "2 4 0", "3 4 1"})
    EXPECT_EQ(count(output, std::string("OK ") + rank + " ucx store://" + place), 2) << output;
}

TEST_F(TorchrunHosts, StaticsAgentHasAStoreForBothHosts) {
  start_static({HVD_TORCH_START_PROGRAM, "agent"});
  expect_all_met_at_the_agent(wait_for_both(), "10.79.0.1:29400\n");
}

TEST_F(TorchrunHosts, SoHasC10ds) {
  start_c10d({HVD_TORCH_START_PROGRAM, "agent"});
  expect_all_met_at_the_agent(wait_for_both(), hosts_.name(0).substr(0, 4));
}

TEST(TorchStart, RanksMeetInAStoreOfTheProgram) {
  const auto file =
      std::filesystem::temp_directory_path() / ("hvd-store." + std::to_string(::getpid()));
  std::vector<Process> ranks;
  for (const char* const rank : {"0", "1"}) {
    ranks.emplace_back(
        std::vector<std::string>{HVD_TORCH_START_PROGRAM, "store", file.string(), rank, "2"},
        Environment{{"OMP_NUM_THREADS", "1"}});
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (Process& rank : ranks) {
    const auto end = rank.wait(deadline);
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_EQ(count(end.output, " ucx store://\n"), 2) << end.output;
  }
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace hvd::testing
