#include "command/mpirun_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/text.h"
#include "mpirun/job_folder.h"
#include "system/text.h"

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

LaunchPlan local_plan() {
  LaunchPlan plan;
  plan.np = 2;
  plan.hvdrun = "/opt/hvd/bin/hvdrun";
  plan.program = {"./train", "--lr", "0.1"};
  return plan;
}

LaunchPlan remote_plan() {
  LaunchPlan plan = local_plan();
  plan.hosts = {{"h1", 2}, {"h2", 2}};
  plan.np = 4;
  plan.local_only = false;
  return plan;
}

bool has_run(const Words& words, const Words& run) {
  return std::search(words.begin(), words.end(), run.begin(), run.end()) != words.end();
}

TEST(MpirunCommand, Lines) {
  const std::string rest =
      " --map-by slot --bind-to none --mca odls_base_sigkill_timeout 0 --mca "
      "btl_vader_single_copy_mechanism none";
  const std::string end = " /opt/hvd/bin/hvdrun --supervise -- ./train --lr 0.1";
  EXPECT_EQ(format_command(build_mpirun_command(local_plan())),
            "mpirun -np 2 --oversubscribe" + rest + " --mca pml ob1" + end);
  EXPECT_EQ(format_command(build_mpirun_command(remote_plan())),
            "mpirun -np 4 -H h1:2,h2:2" + rest + end);
}

TEST(MpirunCommand, TheUserMayChooseHowMessagesTravelOnOneHost) {
  LaunchPlan plan = local_plan();
  plan.mpi_args = {"--mca", "pml", "ucx"};
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("ob1")));
  plan = local_plan();
  plan.environment = {"OMPI_MCA_mtl=psm2"};
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("ob1")));
}

TEST(MpirunCommand, LinesForHydra) {
  LaunchPlan plan = remote_plan();
  plan.mpirun_kind = MpirunKind::kMpich;
  plan.exports = {"SECRET"};
  plan.variables = {{"A", "1"}};
  const std::string end = " /opt/hvd/bin/hvdrun --supervise -- ./train --lr 0.1";
  EXPECT_EQ(format_command(build_mpirun_command(plan)), "A=1 mpirun -n 4 -hosts h1:2,h2:2" + end);
  plan.bind = Bind::kNuma;
  plan.remote_shell = {"ssh", "-p", "2222"};
  plan.mpi_args = {"-iface", "eth0"};
  EXPECT_EQ(format_command(build_mpirun_command(plan)),
            "A=1 HYDRA_LAUNCHER_EXTRA_ARGS='-p 2222' mpirun -n 4 -hosts h1:2,h2:2 -bind-to numa "
            "-launcher ssh -launcher-exec ssh -iface eth0" +
                end);
  plan = local_plan();
  plan.mpirun_kind = MpirunKind::kIntelMpi;
  EXPECT_EQ(format_command(build_mpirun_command(plan)), "I_MPI_PIN=off mpirun -n 2" + end)
      << "hvdrun's supervisors bind the ranks";
  plan.bind = Bind::kCore;
  EXPECT_EQ(format_command(build_mpirun_command(plan)),
            "I_MPI_PIN=on I_MPI_PIN_DOMAIN=core mpirun -n 2" + end);
  plan.environment = {"I_MPI_PIN=off", "I_MPI_PIN_DOMAIN=auto"};
  EXPECT_EQ(format_command(build_mpirun_command(plan)), "mpirun -n 2" + end);
}

TEST(MpirunCommand, IntelMpiGetsAnArgumentSetPerHost) {
  LaunchPlan plan = remote_plan();
  plan.mpirun_kind = MpirunKind::kIntelMpi;
  plan.environment = {"I_MPI_PIN=off"};
  plan.mpi_args = {"-iface", "eth0"};
  plan.hosts = {{"h1", 1}, {"h2", 4}, {"h3", 2}};
  const std::string end = " /opt/hvd/bin/hvdrun --supervise -- ./train --lr 0.1";
  EXPECT_EQ(format_command(build_mpirun_command(plan)),
            "mpirun -iface eth0 -host h1 -n 1" + end + " : -host h2 -n 3" + end);
}

TEST(MpirunCommand, TheKindIsFoundByTheFilesBesideMpirun) {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& name) {
    const auto path = folder.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "#!/bin/sh\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path.string();
  };
  EXPECT_EQ(kind_of_mpirun(make("a/mpirun")), MpirunKind::kOpenMpi);
  const std::string mpich = make("b/mpiexec");
  make("b/hydra_pmi_proxy");
  EXPECT_EQ(kind_of_mpirun(mpich), MpirunKind::kMpich);
  std::filesystem::create_directories(folder.path() / "c");
  std::filesystem::create_symlink(mpich, folder.path() / "c/mpirun");
  EXPECT_EQ(kind_of_mpirun(folder.path() / "c/mpirun"), MpirunKind::kMpich);
  make("b/impi_info");
  EXPECT_EQ(kind_of_mpirun(mpich), MpirunKind::kIntelMpi);
  EXPECT_EQ(kind_of_mpirun(make("b/orterun")), MpirunKind::kOpenMpi) << "several in one folder";
  EXPECT_EQ(kind_of_mpirun("/no/such/mpirun"), MpirunKind::kOpenMpi);
}

TEST(MpirunCommand, ABatchSystemDecidesOnSlots) {
  LaunchPlan plan = local_plan();
  plan.managed = true;
  plan.local_only = false;
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("--oversubscribe")));
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("-H")));
}

TEST(MpirunCommand, BindingOptionsOfMpirunTakePrecedence) {
  LaunchPlan plan;
  EXPECT_EQ(effective_bind(plan), Bind::kAuto);
  plan.mpi_args = {"--bind-to", "core:overload-allowed"};
  EXPECT_EQ(effective_bind(plan), Bind::kCore);
  plan.mpi_args = {"-bind-to", "none"};
  EXPECT_EQ(effective_bind(plan), Bind::kNone);
  plan.mpi_args = {"--bind-to", "numa"};
  EXPECT_EQ(effective_bind(plan), Bind::kNuma);
  plan.mpi_args = {"--cpu-set", "0,2"};
  EXPECT_EQ(effective_bind(plan), Bind::kCore);
  plan.bind = Bind::kNone;
  EXPECT_EQ(effective_bind(plan), Bind::kNone);
}

TEST(MpirunCommand, PlannedHosts) {
  LaunchPlan plan;
  EXPECT_EQ(planned_host(plan, 0), "");
  plan.hosts = {{"a", 1}, {"b", 2}};
  EXPECT_EQ(planned_host(plan, 0), "a");
  EXPECT_EQ(planned_host(plan, 2), "b");
  EXPECT_EQ(planned_host(plan, 3), "");
  plan.mpi_args = {"--map-by", "node"};
  EXPECT_EQ(planned_host(plan, 0), "") << "the user's arguments place the ranks";
}

TEST(MpirunCommand, Binding) {
  LaunchPlan plan = local_plan();
  for (const auto& [bind, word] : {std::pair{Bind::kCore, "core"},
                                   {Bind::kNuma, "numa"},
                                   {Bind::kNone, "none"},
                                   {Bind::kAuto, "none"}}) {
    plan.bind = bind;
    EXPECT_TRUE(has_run(build_mpirun_command(plan).argv, {"--bind-to", word}));
  }
}

TEST(MpirunCommand, TheUsersOwnArgumentsWin) {
  LaunchPlan plan = local_plan();
  plan.mpi_args = {
      "--map-by", "node", "--bind-to", "socket", "--mca", "btl_vader_single_copy_mechanism", "cma"};
  const Words argv = build_mpirun_command(plan).argv;
  EXPECT_EQ(std::count(argv.begin(), argv.end(), "--map-by"), 1);
  EXPECT_EQ(std::count(argv.begin(), argv.end(), "--bind-to"), 1);
  EXPECT_EQ(std::count(argv.begin(), argv.end(), "btl_vader_single_copy_mechanism"), 1);
  EXPECT_TRUE(has_run(argv, plan.mpi_args));
  EXPECT_TRUE(has_run(argv, {"cma", "/opt/hvd/bin/hvdrun", "--supervise"}));
}

TEST(MpirunCommand, SingleCopyFromTheEnvironmentStands) {
  LaunchPlan plan = local_plan();
  plan.environment = {"OMPI_MCA_btl_vader_single_copy_mechanism=cma"};
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("btl_vader_single_copy_mechanism")));
}

TEST(MpirunCommand, AFolderOfItsOwnUnlessTheUserChose) {
  LaunchPlan plan = local_plan();
  plan.session_folder = "/tmp/x";
  EXPECT_TRUE(
      has_run(build_mpirun_command(plan).argv, {"--mca", "orte_local_tmpdir_base", "/tmp/x"}));
  plan.environment = {"OMPI_MCA_orte_tmpdir_base=/scratch"};
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("/tmp/x"))) << "mpirun refuses both";
  plan.environment = {};
  plan.mpi_args = {"--mca", "orte_tmpdir_base", "/scratch"};
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("/tmp/x")));
}

TEST(MpirunCommand, ADaemonThatIsCutOffEndsWithItsRanks) {
  LaunchPlan plan = remote_plan();
  plan.silence_limit_s = 30;
  const auto argv = build_mpirun_command(plan).argv;
  EXPECT_TRUE(has_run(argv, {"--mca", "oob_tcp_keepalive_time", "10"}));
  EXPECT_TRUE(has_run(argv, {"--mca", "oob_tcp_keepalive_intvl", "10"}));
  EXPECT_TRUE(has_run(argv, {"--mca", "oob_tcp_keepalive_probes", "2"}));
  plan.environment = {"OMPI_MCA_oob_tcp_keepalive_time=300"};
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("oob_tcp_keepalive_probes")));
  plan = local_plan();
  plan.silence_limit_s = 30;
  EXPECT_THAT(build_mpirun_command(plan).argv, Not(Contains("oob_tcp_keepalive_time")));
}

TEST(MpirunCommand, NeverForcesATransport) {
  const std::string line = join_text(build_mpirun_command(remote_plan()).argv, " ");
  for (const char* forced : {"pml", "ob1", "tcp", "openib"})
    EXPECT_THAT(line, Not(HasSubstr(forced)));
}

TEST(MpirunCommand, ForwardsToOtherHostsByName) {
  LaunchPlan plan = remote_plan();
  plan.environment = shell_split(
      "HVD_CACHE=1 HOROVOD_CYCLE_TIME=1 NCCL_DEBUG=INFO OMP_NUM_THREADS=2 MKL_X=1 UCX_TLS=tcp "
      "CUDA_VISIBLE_DEVICES=0 LD_LIBRARY_PATH=/x PATH=/bin HOME=/root SECRET=1 XNCCL_=1");
  plan.exports = {"MINE"};
  plan.variables = {{"MINE", "value"}, {"HVD_LAUNCHER_TOKEN", "abc123"}};
  const Words argv = build_mpirun_command(plan).argv;
  for (const char* name :
       {"HVD_CACHE", "HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "OMP_NUM_THREADS", "MKL_X", "UCX_TLS",
        "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PATH", "MINE", "HVD_LAUNCHER_TOKEN"}) {
    EXPECT_TRUE(has_run(argv, {"-x", name})) << name;
  }
  for (const char* name : {"HOME", "SECRET", "XNCCL_"}) EXPECT_THAT(argv, Not(Contains(name)));
  for (const std::string& word : argv) {
    EXPECT_THAT(word, Not(HasSubstr("abc123")))
        << "a token on the command line can be read by every user";
    EXPECT_THAT(word, Not(HasSubstr("value")));
  }
}

TEST(MpirunCommand, OnOneHostOnlyRequestedVariablesAreExported) {
  LaunchPlan plan = local_plan();
  plan.environment = {"NCCL_DEBUG=INFO", "MINE=1"};
  plan.exports = {"MINE"};
  const Words argv = build_mpirun_command(plan).argv;
  EXPECT_TRUE(has_run(argv, {"-x", "MINE"}));
  EXPECT_THAT(argv, Not(Contains("NCCL_DEBUG")));
}

TEST(MpirunCommand, RootIsAllowedOnlyToRoot) {
  LaunchPlan plan = local_plan();
  EXPECT_TRUE(build_mpirun_command(plan).added_variables.empty());
  plan.as_root = true;
  EXPECT_THAT(build_mpirun_command(plan).added_variables,
              Contains(Pair("OMPI_ALLOW_RUN_AS_ROOT", "1")));
  EXPECT_THAT(build_mpirun_command(plan).added_variables,
              Contains(Pair("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")));
}

TEST(MpirunCommand, FormattedForAShell) {
  LaunchPlan plan = local_plan();
  plan.mpirun = "/opt/my mpi/mpirun";
  plan.program = {"sh", "-c", "echo $HVD_RANK"};
  plan.variables = {{"A", "1 2"}, {"HVD_LAUNCHER_TOKEN", "abc"}};
  const std::string line = format_command(build_mpirun_command(plan));
  EXPECT_THAT(line, HasSubstr("A='1 2' '/opt/my mpi/mpirun' -np 2 "));
  EXPECT_THAT(line, HasSubstr("--supervise -- sh -c 'echo $HVD_RANK'"));
  EXPECT_THAT(line, Not(HasSubstr("abc")));
}

TEST(MpirunCommand, RemoteShell) {
  LaunchPlan plan = remote_plan();
  plan.remote_shell = {"ssh", "-p", "2222"};
  EXPECT_TRUE(has_run(build_mpirun_command(plan).argv, {"--mca", "plm_rsh_agent", "ssh -p 2222"}));
  plan.mpi_args = {"--mca", "plm_rsh_agent", "rsh"};
  EXPECT_FALSE(has_run(build_mpirun_command(plan).argv, {"--mca", "plm_rsh_agent", "ssh -p 2222"}));
}

}  // namespace
}  // namespace hvd::launcher
