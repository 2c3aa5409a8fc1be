#include "agent/worker_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hvd::launcher {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::Not;
using ::testing::StartsWith;

TEST(WorkerEnvironment, NamesTheWorkerAndNoRank) {
  const auto environment = worker_environment(
      {"USER_S=1", "RANK=5", "WORLD_SIZE=6", "HVD_RANK=5", "HVD_INIT_METHOD=env://",
       "MASTER_PORT=1", "PMIX_RANK=5", "HVD_LAUNCHER_TOKEN=secret", "HVD_LAUNCHER_RUN_ID=job",
       "HVD_LAUNCHER_MAX_RESTARTS=9", "HVD_PEER_TIMEOUT=7"},
      {.local_rank = 2, .omp_threads = 3, .member_socket = 11},
      {.node = 1, .nodes = 2, .worker = 42, .restarts = 4}, "secret", {});
  for (const char* const variable :
       {"USER_S=1", "HVD_WORKER_ID=42", "HVD_MEMBER_SOCKET=11", "LOCAL_RANK=2", "GROUP_RANK=1",
        "OMP_NUM_THREADS=3", "TORCHELASTIC_RUN_ID=job", "TORCHELASTIC_RESTART_COUNT=4",
        "TORCHELASTIC_MAX_RESTARTS=9", "HVD_PEER_TIMEOUT=7"})
    EXPECT_THAT(environment, Contains(variable));
  EXPECT_THAT(environment, Contains(StartsWith("HVD_JOB_TOKEN=")));
  for (const char* const name :
       {"RANK=", "WORLD_SIZE=", "LOCAL_WORLD_SIZE=", "HVD_RANK=", "HVD_SIZE=", "HVD_LOCAL_RANK=",
        "HOROVOD_", "HVD_INIT_METHOD=", "MASTER_PORT=", "PMIX_", "HVD_LAUNCHER_TOKEN="})
    EXPECT_THAT(environment, Each(Not(StartsWith(name))));
}

TEST(WorkerEnvironment, EachStartOfAJobHasAnIdANameAndATokenOfItsOwn) {
  const auto environment = [](const std::string& job, const std::vector<std::string>& kept) {
    return worker_environment({"HVD_JOB_NAME=mine", "HVD_JOB_ID=outer"}, {}, {.job = job}, "secret",
                              kept);
  };
  const auto one = environment("1", {}), other = environment("2", {});
  EXPECT_THAT(one, Contains("HVD_JOB_ID=1"));
  EXPECT_THAT(other, Contains("HVD_JOB_ID=2"));
  for (const std::string& variable : one) {
    if (variable.starts_with("HVD_JOB_")) EXPECT_THAT(other, Not(Contains(variable)));
  }
  const auto named = environment("1", {"HVD_JOB_NAME", "HVD_JOB_ID"});
  EXPECT_THAT(named, Contains("HVD_JOB_NAME=mine"));
  EXPECT_THAT(named, Contains("HVD_JOB_ID=1"));
}

}  // namespace
}  // namespace hvd::launcher
