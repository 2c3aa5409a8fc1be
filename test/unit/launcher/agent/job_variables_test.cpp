#include "agent/job_variables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hvd::launcher {
namespace {

using Variables = std::vector<std::string>;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

/// The environment after add_job_variables(), for an order with or without a port for rank 0.
Variables job_variables(Variables environment, const std::string& init_method, int master_port,
                        const Variables& kept = {}) {
  const StartOrder order{.address = "10.0.0.7",
                         .master_port = master_port,
                         .node = 1,
                         .nodes = 2,
                         .cross_rank = 1,
                         .cross_size = 2};
  add_job_variables(environment, order, init_method, "secret", kept);
  return environment;
}

TEST(JobVariables, WithoutMpi) {
  EXPECT_THAT(
      job_variables({"HVD_INIT_METHOD=tcp://of.another.job:1", "GROUP_RANK=7",
                     "OMPI_COMM_WORLD_RANK=0", "PMIX_RANK=0", "PMI_SIZE=2"},
                    "hvdrun://0a1", 4001),
      UnorderedElementsAre("HVD_INIT_METHOD=hvdrun://0a1", "HVD_JOB_NAME=" + job_name("secret"),
                           "HVD_JOB_TOKEN=" + job_token("secret"), "MASTER_ADDR=10.0.0.7",
                           "MASTER_PORT=4001", "GROUP_RANK=1", "GROUP_WORLD_SIZE=2",
                           "HOROVOD_CROSS_RANK=1", "HOROVOD_CROSS_SIZE=2"));
  EXPECT_THAT(job_variables({"OMPI_MCA_btl=self"}, "hvdrun://0a1", 4001),
              AllOf(Contains("OMPI_MCA_btl=self"), Not(Contains(HasSubstr("secret")))));
}

TEST(JobVariables, NameAnotherHostOnlyIfThereIsOne) {
  Variables environment = {"HVD_LAUNCHER_PEER=10.0.0.9"};  // of another job
  add_job_variables(environment, {.address = "10.0.0.7", .peer = "10.0.0.8"}, "hvdrun://0a1", "",
                    {});
  EXPECT_THAT(environment, Contains("HVD_LAUNCHER_PEER=10.0.0.8"));
  add_job_variables(environment, {.address = "10.0.0.7"}, "hvdrun://0a1", "", {});
  EXPECT_THAT(environment, Not(Contains(HasSubstr("HVD_LAUNCHER_PEER"))));
}

TEST(JobVariables, UnderMpiTheRanksGetNoInitMethod) {
  EXPECT_THAT(job_variables({"HVD_INIT_METHOD=tcp://of.another.job:1", "HVD_JOB_NAME=another",
                             "HVD_JOB_TOKEN=its", "OMPI_COMM_WORLD_RANK=0"},
                            "", 4001),
              UnorderedElementsAre("OMPI_COMM_WORLD_RANK=0", "MASTER_ADDR=10.0.0.7",
                                   "MASTER_PORT=4001", "GROUP_RANK=1", "GROUP_WORLD_SIZE=2",
                                   "HOROVOD_CROSS_RANK=1", "HOROVOD_CROSS_SIZE=2"));
}

TEST(JobVariables, VariablesOfDashXAreKept) {
  EXPECT_THAT(job_variables({"HVD_INIT_METHOD=file:///shared/x", "MASTER_PORT=29500"},
                            "hvdrun://0a1", 4001, {"MASTER_PORT", "HVD_INIT_METHOD"}),
              AllOf(Contains("HVD_INIT_METHOD=file:///shared/x"), Contains("MASTER_PORT=29500"),
                    Contains(HasSubstr("HVD_JOB_NAME="))));
}

TEST(JobVariables, WithoutAPortThereIsNoMaster) {
  EXPECT_THAT(job_variables({}, "", 0),
              UnorderedElementsAre("GROUP_RANK=1", "GROUP_WORLD_SIZE=2", "HOROVOD_CROSS_RANK=1",
                                   "HOROVOD_CROSS_SIZE=2"));
}

}  // namespace
}  // namespace hvd::launcher
