// HVD_SHM_ALLOCATOR=1 in whole programs: how they end, and what they do where the system gives no memory.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>

namespace {

struct Outcome {
  int exit_code = -1;
  std::string output;

  int count(const std::string& what) const {
    int found = 0;
    for (auto at = output.find(what); at != std::string::npos; at = output.find(what, at + 1)) ++found;
    return found;
  }
};

Outcome run(const std::string& command) {
  std::FILE* const pipe = ::popen(("timeout -s KILL 60 " + command + " 2>&1").c_str(), "r");
  Outcome outcome;
  std::array<char, 4096> buffer;
  while (const std::size_t size = std::fread(buffer.data(), 1, buffer.size(), pipe)) outcome.output.append(buffer.data(), size);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

const std::string kMpirun = HVD_MPIEXEC " --oversubscribe --bind-to none";
const std::string kProgram = HVD_PROGRAM;

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("hvd")) names.insert(name);  // others are of MPI
  }
  return names;
}

class SharedAllocatorProcess : public ::testing::Test {
 protected:
  // Other tests' jobs may come and go meanwhile.
  void TearDown() override {
    for (const std::string& name : shared_files()) EXPECT_TRUE(before_.contains(name)) << "left behind: " << name;
  }

 private:
  const std::set<std::string> before_ = shared_files();
};

TEST_F(SharedAllocatorProcess, TensorsOutliveEverything) {
  for (const int ranks : {1, 2}) {
    for (const std::string way : {"return", "exit", "exit without shutdown"}) {
      const Outcome outcome =
          run(kMpirun + " -np " + std::to_string(ranks) + " -x HVD_SHM_ALLOCATOR=1 " + kProgram + " '" + way + "'");
      EXPECT_EQ(outcome.exit_code, 0) << way << '\n' << outcome.output;
      EXPECT_EQ(outcome.count("SHARED"), ranks) << outcome.output;
      EXPECT_EQ(outcome.count("SURVIVED"), ranks) << way << '\n' << outcome.output;
    }
  }
}

// As long as one rank wants them, nobody takes buckets, and nobody waits for ever.
TEST_F(SharedAllocatorProcess, OneRankHasItAndTheOtherHasNot) {
  const Outcome outcome = run(kMpirun + " -np 1 -x HVD_SHM_ALLOCATOR=1 " + kProgram + " return : -np 1 " + kProgram + " return");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.count("SHARED"), 1) << outcome.output;
  EXPECT_EQ(outcome.count("ORDINARY"), 1) << outcome.output;
}

TEST_F(SharedAllocatorProcess, WhereThereIsNoneTensorsAreOrdinary) {
  // No file may be as large as an arena; to exceed the limit would be a SIGXFSZ.
  const Outcome outcome = run("env HVD_SHM_ALLOCATOR=1 sh -c 'ulimit -f 4; exec \"$0\" return' " + kProgram);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.count("ORDINARY"), 1) << outcome.output;
  EXPECT_EQ(outcome.count("HVD_SHM_ALLOCATOR=1 has no effect"), 1) << outcome.output;
}

TEST_F(SharedAllocatorProcess, AFullArenaIsToldOnce) {
  // 128 KiB.
  const Outcome outcome = run("env HVD_SHM_ALLOCATOR=1 sh -c 'ulimit -f 256; exec \"$0\" return' " + kProgram);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.count("ORDINARY"), 1) << outcome.output;
  EXPECT_EQ(outcome.count("no shared memory for a tensor of"), 1) << outcome.output;
}

}  // namespace
