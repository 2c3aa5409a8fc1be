#include "command/rank_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace hvd::launcher {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

Lookup in(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

TEST(RankIdentity, FromOpenMpi) {
  EXPECT_EQ(identify_rank(in({{"OMPI_COMM_WORLD_RANK", "5"},
                              {"OMPI_COMM_WORLD_SIZE", "8"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                              {"PMIX_RANK", "7"}})),
            (RankIdentity{5, 8, 1, 4}));
}

TEST(RankIdentity, WithoutOrWithInvalidVariables) {
  EXPECT_EQ(identify_rank(in({})), (RankIdentity{0, 1, 0, 1}));
  EXPECT_EQ(identify_rank(in({{"OMPI_COMM_WORLD_RANK", "x"}, {"PMIX_RANK", "2"}})).rank, 2);
}

TEST(OmpThreads, ShareTheCores) {
  EXPECT_EQ(default_omp_threads(Bind::kNone, 16, 16, 4), 4);
  EXPECT_EQ(default_omp_threads(Bind::kNone, 2, 2, 4), 1);
  EXPECT_EQ(default_omp_threads(Bind::kNone, 7, 16, 2), 3)
      << "a container's share, not the machine's cores";
  EXPECT_EQ(default_omp_threads(Bind::kCore, 1, 16, 4), 1);
  EXPECT_EQ(default_omp_threads(Bind::kNuma, 8, 16, 4), 4);
  EXPECT_EQ(default_omp_threads(Bind::kNone, 4, 4, 0), 4);
}

TEST(RankEnvironment, SetsOursAndHidesTheLaunchers) {
  EXPECT_THAT(
      rank_environment({"A=1", "HVD_RANK=9", "HVD_LAUNCHER_TOKEN=abc", "HVD_TIMELINE=t", "OMP_X=1",
                        "OMPI_MCA_orte_local_tmpdir_base=/tmp/x", "OMPI_MCA_opal_signal=6"},
                       {1, 4, 1, 2}, 3),
      UnorderedElementsAre("A=1", "HVD_TIMELINE=t", "OMP_X=1", "HVD_RANK=1", "HVD_SIZE=4",
                           "HVD_LOCAL_RANK=1", "HVD_LOCAL_SIZE=2", "HOROVOD_RANK=1",
                           "HOROVOD_SIZE=4", "HOROVOD_LOCAL_RANK=1", "HOROVOD_LOCAL_SIZE=2",
                           "RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
                           "OMP_NUM_THREADS=3", "OMPI_MCA_opal_signal=6"));
  EXPECT_THAT(rank_environment({}, {0, 1, 0, 1}, 0),
              AllOf(Contains("HVD_RANK=0"), Contains("OMPI_MCA_opal_signal="),
                    Not(Contains(HasSubstr("OMP_NUM_THREADS")))))
      << "no backtraces of Open MPI, unless the user wants them";
}

TEST(RankEnvironment, OfANodeOfTorchrun) {
  const auto environment = rank_environment(
      {"HVD_LAUNCHER_FIRST_RANK=4", "HVD_LAUNCHER_WORLD_SIZE=8", "HVD_LAUNCHER_RUN_ID=job7",
       "HVD_LAUNCHER_ROLE=trainer", "TORCHELASTIC_RUN_ID=outer", "TORCHELASTIC_ERROR_FILE=/e"},
      {.rank = 1, .size = 4, .local_rank = 1, .local_size = 4}, 0);
  for (const char* variable :
       {"RANK=5", "HVD_RANK=5", "HOROVOD_RANK=5", "ROLE_RANK=5", "WORLD_SIZE=8", "HVD_SIZE=8",
        "ROLE_WORLD_SIZE=8", "ROLE_NAME=trainer", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4",
        "TORCHELASTIC_RUN_ID=job7", "TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_MAX_RESTARTS=0",
        "TORCHELASTIC_USE_AGENT_STORE=False", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1"})
    EXPECT_THAT(environment, Contains(variable));
  EXPECT_THAT(environment, Not(Contains(HasSubstr("HVD_LAUNCHER"))));
  EXPECT_THAT(environment, Not(Contains(HasSubstr("ERROR_FILE"))));
}

TEST(RankEnvironment, CountsTheRestarts) {
  const auto environment =
      rank_environment({"HVD_LAUNCHER_RUN_ID=none", "HVD_LAUNCHER_ROLE=default",
                        "HVD_LAUNCHER_MAX_RESTARTS=3", "HVD_LAUNCHER_RESTART_COUNT=2"},
                       {0, 1, 0, 1}, 0);
  for (const char* variable :
       {"TORCHELASTIC_RUN_ID=none", "TORCHELASTIC_RESTART_COUNT=2", "TORCHELASTIC_MAX_RESTARTS=3"})
    EXPECT_THAT(environment, Contains(variable));
}

TEST(SilenceLimit, IsThePeerTimeout) {
  EXPECT_EQ(silence_limit_ms(std::nullopt), 30'000);
  EXPECT_EQ(silence_limit_ms("2.5"), 2'500);
  EXPECT_EQ(silence_limit_ms("0.01"), 1'000) << "TCP's clocks are coarse";
  EXPECT_EQ(silence_limit_ms("soon"), 30'000);
}

TEST(Segments, LieInTheJobsFolderUnlessTheUserChose) {
  std::vector<std::string> environment = {"OMPI_MCA_osc_sm_backing_directory=/x"};
  put_segments_into(environment, "/dev/shm/j");
  EXPECT_THAT(environment, UnorderedElementsAre("OMPI_MCA_osc_sm_backing_directory=/x",
                                                "OMPI_MCA_btl_vader_backing_directory=/dev/shm/j",
                                                "OMPI_MCA_btl_sm_backing_directory=/dev/shm/j"));
}

TEST(Bind, Names) {
  EXPECT_EQ(parse_bind("auto"), Bind::kAuto);
  EXPECT_EQ(parse_bind("core"), Bind::kCore);
  EXPECT_EQ(parse_bind("numa"), Bind::kNuma);
  EXPECT_EQ(parse_bind("none"), Bind::kNone);
  EXPECT_EQ(parse_bind("Core"), std::nullopt);
}

TEST(RankEnvironment, HasNoVariablesOfATorchrunAroundHvdrun) {
  EXPECT_THAT(rank_environment({"TORCHELASTIC_RUN_ID=x", "TORCHELASTIC_USE_AGENT_STORE=True"},
                               {0, 1, 0, 1}, 0),
              Not(Contains(HasSubstr("TORCHELASTIC"))));
}

}  // namespace
}  // namespace hvd::launcher
