// HVD_SHM_ALLOCATOR=1 in complete programs: how they end, and how they run when the system has no
// shared memory.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

#include "support/run_command.h"

namespace {

using hvd::testing::CommandResult;

int count(const CommandResult& result, const std::string& what) {
  int found = 0;
  for (auto at = result.output.find(what); at != std::string::npos;
       at = result.output.find(what, at + 1))
    ++found;
  return found;
}

CommandResult run(const std::string& command) { return hvd::testing::run_command(command, 60); }

const std::string kMpirun = HVD_MPIEXEC " --oversubscribe --bind-to none";
const std::string kProgram = HVD_PROGRAM;

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("hvd")) names.insert(name);  // the others belong to MPI
  }
  return names;
}

class SharedAllocatorProcess : public ::testing::Test {
 protected:
  // Jobs of other tests may start and end in the meantime, and have named files for a moment.
  void TearDown() override {
    for (int i = 0; i < 100 && !left_behind().empty(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(left_behind(), "");
  }

 private:
  std::string left_behind() const {
    std::string names;
    for (const std::string& name : shared_files()) {
      if (!before_.contains(name)) names += name + ' ';
    }
    return names;
  }

  const std::set<std::string> before_ = shared_files();
};

TEST_F(SharedAllocatorProcess, TensorsOutliveEverything) {
  for (const int ranks : {1, 2}) {
    for (const std::string way : {"return", "exit", "exit without shutdown"}) {
      const CommandResult result = run(kMpirun + " -np " + std::to_string(ranks) +
                                       " -x HVD_SHM_ALLOCATOR=1 " + kProgram + " '" + way + "'");
      EXPECT_EQ(result.exit_code, 0) << way << '\n' << result.output;
      EXPECT_EQ(count(result, "SHARED"), ranks) << result.output;
      EXPECT_EQ(count(result, "SURVIVED"), ranks) << way << '\n' << result.output;
    }
  }
}

// The ranks' large tensors lie in different kinds of memory.
TEST_F(SharedAllocatorProcess, OneRankHasItAndTheOtherHasNot) {
  const CommandResult result = run(kMpirun + " -np 1 -x HVD_SHM_ALLOCATOR=1 " + kProgram +
                                   " return : -np 1 " + kProgram + " return");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result, "SHARED"), 1) << result.output;
  EXPECT_EQ(count(result, "ORDINARY"), 1) << result.output;
}

// Without the variable only gradients are shared, and if one rank cannot, no rank does.
TEST_F(SharedAllocatorProcess, OneRankIsRefusedSharedMemoryForGradients) {
  const CommandResult result =
      run(kMpirun + " -np 1 " + kProgram + " return : -np 1 " + kProgram + " refused");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result, "ORDINARY"), 2) << result.output;
  EXPECT_EQ(count(result, "cannot get shared memory for gradients"), 1) << result.output;
}

TEST_F(SharedAllocatorProcess, WhereThereIsNoneTensorsAreOrdinary) {
  // No file may be as large as an arena. Exceeding the limit would cause SIGXFSZ.
  const CommandResult result =
      run("env HVD_SHM_ALLOCATOR=1 sh -c 'ulimit -f 4; exec \"$0\" return' " + kProgram);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result, "ORDINARY"), 1) << result.output;
  EXPECT_EQ(count(result, "HVD_SHM_ALLOCATOR=1 has no effect"), 1) << result.output;
}

TEST_F(SharedAllocatorProcess, AFullArenaIsReportedOnce) {
  // The limit is 128 KiB.
  const CommandResult result =
      run("env HVD_SHM_ALLOCATOR=1 sh -c 'ulimit -f 256; exec \"$0\" return' " + kProgram);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(count(result, "ORDINARY"), 1) << result.output;
  EXPECT_EQ(count(result, "no shared memory for a tensor of"), 1) << result.output;
}

}  // namespace
