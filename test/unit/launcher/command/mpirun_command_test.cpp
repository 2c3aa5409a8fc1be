#include "command/mpirun_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/text.h"

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

LaunchSpec local_spec() {
  LaunchSpec spec;
  spec.np = 2;
  spec.hvdrun = "/opt/hvd/bin/hvdrun";
  spec.program = {"./train", "--lr", "0.1"};
  return spec;
}

LaunchSpec remote_spec() {
  LaunchSpec spec = local_spec();
  spec.hosts = {{"h1", 2}, {"h2", 2}};
  spec.np = 4;
  spec.local_only = false;
  return spec;
}

bool has_run(const Words& words, const Words& run) {
  return std::search(words.begin(), words.end(), run.begin(), run.end()) != words.end();
}

TEST(MpirunCommand, OneHost) {
  EXPECT_EQ(build_mpirun_command(local_spec()).argv, (Words{"mpirun",
                                                            "-np",
                                                            "2",
                                                            "--oversubscribe",
                                                            "--map-by",
                                                            "slot",
                                                            "--bind-to",
                                                            "none",
                                                            "--mca",
                                                            "odls_base_sigkill_timeout",
                                                            "0",
                                                            "--mca",
                                                            "btl_vader_single_copy_mechanism",
                                                            "none",
                                                            "/opt/hvd/bin/hvdrun",
                                                            "--supervise",
                                                            "--",
                                                            "./train",
                                                            "--lr",
                                                            "0.1"}));
}

TEST(MpirunCommand, SeveralHosts) {
  EXPECT_EQ(build_mpirun_command(remote_spec()).argv, (Words{"mpirun",
                                                             "-np",
                                                             "4",
                                                             "-H",
                                                             "h1:2,h2:2",
                                                             "--map-by",
                                                             "slot",
                                                             "--bind-to",
                                                             "none",
                                                             "--mca",
                                                             "odls_base_sigkill_timeout",
                                                             "0",
                                                             "--mca",
                                                             "btl_vader_single_copy_mechanism",
                                                             "none",
                                                             "/opt/hvd/bin/hvdrun",
                                                             "--supervise",
                                                             "--",
                                                             "./train",
                                                             "--lr",
                                                             "0.1"}));
}

TEST(MpirunCommand, ABatchSystemDecidesOnSlots) {
  LaunchSpec spec = local_spec();
  spec.managed = true;
  spec.local_only = false;
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("--oversubscribe")));
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("-H")));
}

TEST(MpirunCommand, BindingOptionsOfMpirunTakePrecedence) {
  LaunchSpec spec;
  EXPECT_EQ(effective_bind(spec), Bind::kAuto);
  spec.mpi_args = {"--bind-to", "core:overload-allowed"};
  EXPECT_EQ(effective_bind(spec), Bind::kCore);
  spec.mpi_args = {"-bind-to", "none"};
  EXPECT_EQ(effective_bind(spec), Bind::kNone);
  spec.mpi_args = {"--bind-to", "numa"};
  EXPECT_EQ(effective_bind(spec), Bind::kNuma);
  spec.mpi_args = {"--cpu-set", "0,2"};
  EXPECT_EQ(effective_bind(spec), Bind::kCore);
  spec.bind = Bind::kNone;
  EXPECT_EQ(effective_bind(spec), Bind::kNone);
}

TEST(MpirunCommand, PlannedHosts) {
  LaunchSpec spec;
  EXPECT_EQ(planned_host(spec, 0), "");
  spec.hosts = {{"a", 1}, {"b", 2}};
  EXPECT_EQ(planned_host(spec, 0), "a");
  EXPECT_EQ(planned_host(spec, 2), "b");
  EXPECT_EQ(planned_host(spec, 3), "");
  spec.mpi_args = {"--map-by", "node"};
  EXPECT_EQ(planned_host(spec, 0), "") << "the user maps";
}

TEST(MpirunCommand, Binding) {
  LaunchSpec spec = local_spec();
  for (const auto& [bind, word] : {std::pair{Bind::kCore, "core"},
                                   {Bind::kNuma, "numa"},
                                   {Bind::kNone, "none"},
                                   {Bind::kAuto, "none"}}) {
    spec.bind = bind;
    EXPECT_TRUE(has_run(build_mpirun_command(spec).argv, {"--bind-to", word}));
  }
}

TEST(MpirunCommand, TheUsersOwnArgumentsWin) {
  LaunchSpec spec = local_spec();
  spec.mpi_args = {
      "--map-by", "node", "--bind-to", "socket", "--mca", "btl_vader_single_copy_mechanism", "cma"};
  const Words argv = build_mpirun_command(spec).argv;
  EXPECT_EQ(std::count(argv.begin(), argv.end(), "--map-by"), 1);
  EXPECT_EQ(std::count(argv.begin(), argv.end(), "--bind-to"), 1);
  EXPECT_EQ(std::count(argv.begin(), argv.end(), "btl_vader_single_copy_mechanism"), 1);
  EXPECT_TRUE(has_run(argv, spec.mpi_args));
  EXPECT_TRUE(has_run(argv, {"cma", "/opt/hvd/bin/hvdrun", "--supervise"}));
}

TEST(MpirunCommand, SingleCopyFromTheEnvironmentStands) {
  LaunchSpec spec = local_spec();
  spec.environment = {"OMPI_MCA_btl_vader_single_copy_mechanism=cma"};
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("btl_vader_single_copy_mechanism")));
}

TEST(MpirunCommand, AFolderOfItsOwnUnlessTheUserChose) {
  LaunchSpec spec = local_spec();
  spec.session_folder = "/tmp/x";
  EXPECT_TRUE(
      has_run(build_mpirun_command(spec).argv, {"--mca", "orte_local_tmpdir_base", "/tmp/x"}));
  spec.environment = {"OMPI_MCA_orte_tmpdir_base=/scratch"};
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("/tmp/x"))) << "mpirun refuses both";
  spec.environment = {};
  spec.mpi_args = {"--mca", "orte_tmpdir_base", "/scratch"};
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("/tmp/x")));
}

TEST(MpirunCommand, ADaemonThatIsCutOffEndsWithItsRanks) {
  LaunchSpec spec = remote_spec();
  spec.silence_limit_s = 30;
  const auto argv = build_mpirun_command(spec).argv;
  EXPECT_TRUE(has_run(argv, {"--mca", "oob_tcp_keepalive_time", "10"}));
  EXPECT_TRUE(has_run(argv, {"--mca", "oob_tcp_keepalive_intvl", "10"}));
  EXPECT_TRUE(has_run(argv, {"--mca", "oob_tcp_keepalive_probes", "2"}));
  spec.environment = {"OMPI_MCA_oob_tcp_keepalive_time=300"};
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("oob_tcp_keepalive_probes")));
  spec = local_spec();
  spec.silence_limit_s = 30;
  EXPECT_THAT(build_mpirun_command(spec).argv, Not(Contains("oob_tcp_keepalive_time")));
}

TEST(MpirunCommand, NeverForcesATransport) {
  const std::string line = join_text(build_mpirun_command(remote_spec()).argv, " ");
  for (const char* forced : {"pml", "ob1", "tcp", "openib"})
    EXPECT_THAT(line, Not(HasSubstr(forced)));
}

TEST(MpirunCommand, ForwardsToOtherHostsByName) {
  LaunchSpec spec = remote_spec();
  spec.environment = {"HVD_CACHE=1",
                      "HOROVOD_CYCLE_TIME=1",
                      "NCCL_DEBUG=INFO",
                      "OMP_NUM_THREADS=2",
                      "MKL_X=1",
                      "UCX_TLS=tcp",
                      "CUDA_VISIBLE_DEVICES=0",
                      "LD_LIBRARY_PATH=/x",
                      "PATH=/bin",
                      "HOME=/root",
                      "SECRET=1",
                      "XNCCL_=1"};
  spec.exports = {"MINE"};
  spec.variables = {{"MINE", "value"}, {"HVD_LAUNCHER_TOKEN", "abc123"}};
  const Words argv = build_mpirun_command(spec).argv;
  for (const char* name :
       {"HVD_CACHE", "HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "OMP_NUM_THREADS", "MKL_X", "UCX_TLS",
        "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PATH", "MINE", "HVD_LAUNCHER_TOKEN"}) {
    EXPECT_TRUE(has_run(argv, {"-x", name})) << name;
  }
  for (const char* name : {"HOME", "SECRET", "XNCCL_"}) EXPECT_THAT(argv, Not(Contains(name)));
  for (const std::string& word : argv) {
    EXPECT_THAT(word, Not(HasSubstr("abc123")))
        << "a token on the command line can be read by everybody";
    EXPECT_THAT(word, Not(HasSubstr("value")));
  }
}

TEST(MpirunCommand, OnOneHostOnlyRequestedVariablesAreExported) {
  LaunchSpec spec = local_spec();
  spec.environment = {"NCCL_DEBUG=INFO", "MINE=1"};
  spec.exports = {"MINE"};
  const Words argv = build_mpirun_command(spec).argv;
  EXPECT_TRUE(has_run(argv, {"-x", "MINE"}));
  EXPECT_THAT(argv, Not(Contains("NCCL_DEBUG")));
}

TEST(MpirunCommand, RootIsAllowedOnlyToRoot) {
  LaunchSpec spec = local_spec();
  EXPECT_TRUE(build_mpirun_command(spec).added_variables.empty());
  spec.as_root = true;
  EXPECT_THAT(build_mpirun_command(spec).added_variables,
              Contains(Pair("OMPI_ALLOW_RUN_AS_ROOT", "1")));
  EXPECT_THAT(build_mpirun_command(spec).added_variables,
              Contains(Pair("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")));
}

TEST(MpirunCommand, FormattedForAShell) {
  LaunchSpec spec = local_spec();
  spec.mpirun = "/opt/my mpi/mpirun";
  spec.program = {"sh", "-c", "echo $HVD_RANK"};
  spec.variables = {{"A", "1 2"}, {"HVD_LAUNCHER_TOKEN", "abc"}};
  const std::string line = format_command(build_mpirun_command(spec));
  EXPECT_THAT(line, HasSubstr("A='1 2' '/opt/my mpi/mpirun' -np 2 "));
  EXPECT_THAT(line, HasSubstr("--supervise -- sh -c 'echo $HVD_RANK'"));
  EXPECT_THAT(line, Not(HasSubstr("abc")));
}

TEST(MpirunCommand, RemoteShell) {
  LaunchSpec spec = remote_spec();
  spec.remote_shell = {"ssh", "-p", "2222"};
  EXPECT_TRUE(has_run(build_mpirun_command(spec).argv, {"--mca", "plm_rsh_agent", "ssh -p 2222"}));
  spec.mpi_args = {"--mca", "plm_rsh_agent", "rsh"};
  EXPECT_FALSE(has_run(build_mpirun_command(spec).argv, {"--mca", "plm_rsh_agent", "ssh -p 2222"}));
}

}  // namespace
}  // namespace hvd::launcher
