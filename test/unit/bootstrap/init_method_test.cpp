#include "bootstrap/init_method.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"

namespace hvd::runtime {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::vector<std::pair<const char*, const char*>>;

const Variables kTorchrun = {
    {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}};

class InitMethodTest : public ::testing::Test {
 protected:
  InitMethodTest() { clear(); }
  ~InitMethodTest() override { clear(); }

  static void set(const Variables& variables) {
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
  }
  static InitMethod choose(const RuntimeOptions& options = {}, bool mpi_active = false) {
    return choose_init_method(options, mpi_active);
  }
  static std::string refusal(const RuntimeOptions& options = {}) {
    try {
      const InitMethod method = choose(options);
      return "accepted " + method.url;
    } catch (const UsageError& error) {
      return error.what();
    }
  }
  static RuntimeOptions with(const std::string& method) {
    RuntimeOptions options;
    options.init_method = method;
    return options;
  }

 private:
  static void clear() {
    for (const char* name :
         {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_SIZE",
          "HVD_RANK", "HVD_SIZE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "HVD_JOB_NAME", "PMIX_NAMESPACE",
          "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"})
      ::unsetenv(name);
  }
};

TEST_F(InitMethodTest, AnMpiOfOneRankInALargerJobIsWarnedOf) {
  set({{"HVD_RANK", "1"}, {"HVD_SIZE", "4"}});
  const RuntimeOptions options = with("hvdrun://abc");
  EXPECT_EQ(warning_for_single_rank_mpi(choose(options), false), std::nullopt);
  const auto warning = warning_for_single_rank_mpi(choose(options, true), true);
  ASSERT_TRUE(warning);
  EXPECT_THAT(*warning, HasSubstr("MPI_COMM_WORLD has one rank, and hvd's job has 4"));
  set({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}});
  EXPECT_EQ(warning_for_single_rank_mpi(choose(options, true), true), std::nullopt)
      << "mpirun has started the program";
}

TEST_F(InitMethodTest, NoVariablesMeanOneRank) {
  const InitMethod method = choose();
  EXPECT_EQ(method.controller, Controller::kLocal);
  EXPECT_EQ(method.url, "local://");
  EXPECT_EQ(method.size, 1);
}

TEST_F(InitMethodTest, AnMpiLauncherMeansMpi) {
  set({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}});
  EXPECT_EQ(choose().controller, Controller::kMpi);
  // hvdrun over mpirun sets its own variables to the same values.
  set({{"HVD_SIZE", "2"}, {"HVD_RANK", "1"}});
  EXPECT_EQ(choose().controller, Controller::kMpi);
}

TEST_F(InitMethodTest, AProgramThatHasStartedMpiMeansMpi) {
  EXPECT_EQ(choose({}, true).controller, Controller::kMpi);
}

TEST_F(InitMethodTest, TorchrunsVariablesAreAPort) {
  set(kTorchrun);
  const InitMethod method = choose();
  EXPECT_EQ(method.controller, Controller::kUcx);
  EXPECT_EQ(method.url, "tcp://node7:29500");
  EXPECT_EQ(method.rank, 1);
  EXPECT_EQ(method.size, 4);
  EXPECT_FALSE(method.agent_store);
  set({{"TORCHELASTIC_USE_AGENT_STORE", "False"}});
  EXPECT_FALSE(choose().agent_store);
  set({{"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_TRUE(choose().agent_store);
}

// srun or mpirun has started one torchrun per host, whose workers inherit its variables.
TEST_F(InitMethodTest, TorchrunInsideAnotherLauncherWins) {
  set(kTorchrun);
  set({{"PMIX_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}});
  EXPECT_THAT(refusal(), HasSubstr("contradict each other"));
  set({{"TORCHELASTIC_RUN_ID", "7"}});
  const InitMethod method = choose();
  EXPECT_EQ(method.controller, Controller::kUcx);
  EXPECT_EQ(method.rank, 1);
  EXPECT_EQ(method.size, 4);
  EXPECT_THROW(choose({}, true), UsageError) << "the program uses MPI itself";
}

TEST_F(InitMethodTest, TheJobsNameComesFromTheInnermostLauncher) {
  EXPECT_EQ(job_name(), "");
  set({{"PMIX_NAMESPACE", "prterun-1"}});
  EXPECT_EQ(job_name(), "pmix.prterun-1");
  set({{"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "3"}});
  EXPECT_EQ(job_name(), "slurm.12") << "a step for each rank";
  set({{"SLURM_STEP_NUM_TASKS", "8"}});
  EXPECT_EQ(job_name(), "slurm.12.3");
  set({{"TORCHELASTIC_RUN_ID", "abc"}});
  EXPECT_EQ(job_name(), "torchrun.abc");
  set({{"HVD_JOB_NAME", "mine"}});
  EXPECT_EQ(job_name(), "mine");
}

TEST_F(InitMethodTest, OneRankOfTorchrunIsAlone) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(choose().controller, Controller::kLocal);
}

TEST_F(InitMethodTest, TwoThatContradictEachOtherAreBothNamed) {
  set(kTorchrun);
  set({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("OMPI_COMM_WORLD_SIZE=2"), HasSubstr("WORLD_SIZE=4"),
                               HasSubstr("contradict"), HasSubstr("HVD_INIT_METHOD")));
  // An explicit method resolves the contradiction.
  EXPECT_EQ(choose(with("env://")).controller, Controller::kUcx);
  EXPECT_EQ(choose(with("mpi://")).controller, Controller::kMpi);
}

TEST_F(InitMethodTest, TorchrunAndHvdrunMayNotContradictEachOther) {
  set(kTorchrun);
  set({{"HVD_RANK", "1"}, {"HVD_SIZE", "4"}});
  EXPECT_EQ(choose().controller, Controller::kUcx);
  set({{"HVD_RANK", "2"}});
  EXPECT_THAT(refusal(), AllOf(HasSubstr("HVD_RANK=2"), HasSubstr("RANK=1")));
}

TEST_F(InitMethodTest, TheProgramMayNotContradictALauncher) {
  set({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}});
  RuntimeOptions options;
  options.world_size = 3;
  EXPECT_THAT(refusal(options),
              AllOf(HasSubstr("Options::world_size=3"), HasSubstr("OMPI_COMM_WORLD_SIZE=2")));
}

TEST_F(InitMethodTest, SeveralRanksThatCannotMeetAreRefused) {
  for (const char* const name : {"WORLD_SIZE", "HVD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    ::setenv(name, "2", 1);
    EXPECT_THAT(refusal(), AllOf(HasSubstr(std::string(name) + "=2"), HasSubstr("tcp://HOST:PORT"),
                                 HasSubstr("hvdrun")));
    ::unsetenv(name);
  }
  RuntimeOptions options;
  options.world_size = 2;
  EXPECT_THAT(refusal(options), HasSubstr("Options::world_size=2"));
}

// Without the check, a program that passes mpi:// under hvdrun --controller ucx would silently run
// as that many jobs of one rank.
TEST_F(InitMethodTest, MpiWithoutItsLauncherIsRefused) {
  set({{"HVD_RANK", "1"}, {"HVD_SIZE", "2"}});
  EXPECT_THAT(refusal(with("mpi://")),
              AllOf(HasSubstr("HVD_SIZE=2"), HasSubstr("hvdrun --controller mpi")));
  set({{"PMIX_RANK", "1"}});
  EXPECT_EQ(choose(with("mpi://")).controller, Controller::kMpi);
  ::unsetenv("PMIX_RANK");
  set({{"HVD_RANK", "0"}, {"HVD_SIZE", "1"}});
  EXPECT_EQ(choose(with("mpi://")).controller, Controller::kMpi);
}

TEST_F(InitMethodTest, APlaceTakesRankAndSizeFromTheProgramThenHvdrunThenTorchrun) {
  set({{"RANK", "1"}, {"WORLD_SIZE", "4"}});
  EXPECT_EQ(choose(with("tcp://a:1")).rank, 1);
  set({{"HVD_RANK", "2"}, {"HVD_SIZE", "5"}});
  EXPECT_EQ(choose(with("file:///a")).rank, 2);
  EXPECT_EQ(choose(with("file:///a")).size, 5);
  RuntimeOptions options = with("tcp://a:1");
  options.rank = 6;
  options.world_size = 7;
  EXPECT_EQ(choose(options).rank, 6);
  EXPECT_EQ(choose(options).size, 7);
  EXPECT_EQ(choose(options).url, "tcp://a:1");
}

TEST_F(InitMethodTest, TheProgramMayNotContradictHvdrun) {
  set({{"HVD_RANK", "2"}, {"HVD_SIZE", "5"}, {"RANK", "1"}, {"WORLD_SIZE", "4"}});
  const InitMethod method = choose(with("hvdrun://0a1b"));
  EXPECT_EQ(method.controller, Controller::kUcx);
  EXPECT_EQ(method.url, "hvdrun://0a1b");
  EXPECT_EQ(method.rank, 2);
  EXPECT_EQ(method.size, 5);
  RuntimeOptions options = with("hvdrun://0a1b");
  options.rank = 2;
  EXPECT_EQ(choose(options).rank, 2);
  options.world_size = 1;
  EXPECT_THAT(refusal(options), AllOf(HasSubstr("Options::world_size=1"), HasSubstr("HVD_SIZE=5"),
                                      HasSubstr("contradict each other")));
}

TEST_F(InitMethodTest, MissingPartsOfAPlaceAreNamed) {
  EXPECT_THAT(refusal(with("tcp://a:1")),
              AllOf(HasSubstr("HVD_INIT_METHOD"), HasSubstr("HVD_SIZE"), HasSubstr("WORLD_SIZE")));
  set({{"HVD_SIZE", "2"}});
  EXPECT_THAT(refusal(with("tcp://a:1")), HasSubstr("needs the rank"));
  set({{"HVD_RANK", "2"}});
  EXPECT_THAT(refusal(with("tcp://a:1")), AllOf(HasSubstr("from 0 to 1"), HasSubstr("HVD_RANK=2")));
  set({{"HVD_RANK", "one"}});
  EXPECT_THAT(refusal(with("tcp://a:1")), AllOf(HasSubstr("HVD_RANK"), HasSubstr("'one'")));
  set({{"HVD_RANK", "0"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}});
  EXPECT_THAT(refusal(with("env://")), HasSubstr("MASTER_PORT"));
}

TEST_F(InitMethodTest, AnotherMethodIsRefusedWithThoseThereAre) {
  for (const char* const method : {"gloo://a", "a:1", "tcp:/a:1"}) {
    EXPECT_THAT(refusal(with(method)),
                AllOf(HasSubstr(std::string("'") + method + "'"), HasSubstr("tcp://HOST:PORT"),
                      HasSubstr("file:///path"), HasSubstr("mpi://")));
  }
}

TEST_F(InitMethodTest, AStoreOfTheProgramGoesBeforeEverything) {
  set(kTorchrun);
  const InitMethod method = method_of_store({}, "store://a", 2, 3);
  EXPECT_EQ(method.controller, Controller::kUcx);
  EXPECT_EQ(method.url, "store://a");
  EXPECT_EQ(method.rank, 2);
  EXPECT_EQ(method.size, 3);
  EXPECT_FALSE(method.agent_store);
  EXPECT_EQ(method_of_store({}, "store://a", 0, 1).controller, Controller::kLocal);
  EXPECT_THROW(method_of_store({}, "store://a", 3, 3), UsageError);
  EXPECT_THROW(method_of_store({}, "store://a", -1, 3), UsageError);
  RuntimeOptions options;
  options.rank = 1;
  EXPECT_THROW(method_of_store(options, "store://a", 2, 3), UsageError);
}

TEST_F(InitMethodTest, APortOfTorchrunsIsANumber) {
  set(kTorchrun);
  for (const char* const port : {"http", "0", "65536"}) {
    ::setenv("MASTER_PORT", port, 1);
    EXPECT_THAT(refusal(), AllOf(HasSubstr("MASTER_PORT"), HasSubstr(port)));
  }
}

TEST_F(InitMethodTest, MpisRankWinsAndIsComparedWithOtherSources) {
  EXPECT_EQ(contradiction_to_mpi({}, 0, 2, "MPI"), std::nullopt);
  set({{"HVD_SIZE", "2"}, {"HVD_RANK", "0"}});
  EXPECT_EQ(contradiction_to_mpi({}, 0, 2, "MPI"), std::nullopt);
  EXPECT_THAT(contradiction_to_mpi({}, 0, 1, "MPI").value_or(""),
              AllOf(HasSubstr("1 ranks"), HasSubstr("HVD_SIZE=2")));
  EXPECT_EQ(contradiction_to_mpi(with("mpi://"), 0, 1, "MPI"), std::nullopt);
}

TEST_F(InitMethodTest, AnMpiThatItsLauncherHasNotStartedIsNamedWithTheLauncher) {
  set({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}});
  EXPECT_EQ(contradiction_to_mpi({}, 1, 2, "MPICH Version: 5.0.2"), std::nullopt);
  EXPECT_THAT(contradiction_to_mpi({}, 0, 1, "Open MPI v4.1.4").value_or(""),
              AllOf(HasSubstr("MPICH's or Intel MPI's launcher"), HasSubstr("PMI_SIZE=2"),
                    HasSubstr("Open MPI v4.1.4")));
  // It is an error with an explicit method too: each rank would be a job of its own.
  EXPECT_NE(contradiction_to_mpi(with("mpi://"), 0, 1, "MPI"), std::nullopt);
  set({{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}});
  EXPECT_EQ(contradiction_to_mpi({}, 0, 1, "MPI"), std::nullopt);
  EXPECT_EQ(contradiction_to_launcher("MPICH Version: 5.0.2"), std::nullopt);
  set({{"OMPI_COMM_WORLD_SIZE", "1"}});
  EXPECT_EQ(contradiction_to_launcher("Open MPI v4.1.4"), std::nullopt);
  EXPECT_THAT(contradiction_to_launcher("MPICH Version: 5.0.2").value_or(""),
              AllOf(HasSubstr("Open MPI's launcher"), HasSubstr("MPICH Version: 5.0.2")));
}

}  // namespace
}  // namespace hvd::runtime
