// Spawns jobs on GPUs in which one rank fails, under an mpirun that does not kill the survivors,
// and reads the survivors' output. HVD_GPU_FAULT_SETTINGS has the variables of the job. ctest's
// environment has the paths of mpirun and the program, because the tests may run on another host
// than the build.
#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "support/run_command.h"

namespace hvd::testing {
namespace {

constexpr int kRanks = 3;

std::string path_in(const char* variable) {
  const char* const path = std::getenv(variable);
  if (path == nullptr)
    throw std::runtime_error(std::string(variable) + " is not set; ctest sets it");
  return path;
}

class GpuFaultTest : public ::testing::TestWithParam<std::string> {
 protected:
  static CommandResult run(const std::string& mode, int victim) {
    return run_command(
        "env HVD_PEER_TIMEOUT=5 HVD_STALL_SHUTDOWN=20 " HVD_GPU_FAULT_SETTINGS " " +
            path_in("HVD_TEST_MPIEXEC") +
            " --enable-recovery --mca orte_abort_on_non_zero_status 0 --oversubscribe --bind-to "
            "none -np " +
            std::to_string(kRanks) + " " + path_in("HVD_TEST_FAULT_PROGRAM") + " " + mode + " " +
            std::to_string(victim),
        100);
  }
};

// A survivor gets an error that names the victim, its communicators are aborted while their kernels
// wait for the victim, and shutdown() and the process end.
TEST_P(GpuFaultTest, SurvivorsGetAnErrorAndEnd) {
  for (const int victim : {0, 1}) {
    const CommandResult result = run(GetParam(), victim);
    if (result.output.find("skipped: ") != std::string::npos) GTEST_SKIP() << result.output;
    EXPECT_NE(result.exit_code, 128 + 9) << "it hangs:\n" << result.output;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const std::string who = std::to_string(rank);
      EXPECT_NE(result.output.find("RANK " + who + " PeerLostError of rank " +
                                   std::to_string(victim) + ": "),
                std::string::npos)
          << result.output;
      EXPECT_NE(result.output.find("SHUTDOWN " + who), std::string::npos) << result.output;
    }
    EXPECT_EQ(result.output.find("given up"), std::string::npos) << "an abort did not complete:\n"
                                                                 << result.output;
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, GpuFaultTest, ::testing::Values("kill", "exit", "throw"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace hvd::testing
