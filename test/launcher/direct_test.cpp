// Tests behaviour that only the start without mpirun has. Behaviour that both starts share is
// tested by failure_test, signals_test and output_test, with LAUNCHER_TEST_CONTROLLER=ucx.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "processes/core_share.h"
#include "processes/job_folder.h"
#include "system/process.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

using Words = std::vector<std::string>;

/// A job without mpirun; if hosts are given, they are simulated on this machine.
Start direct(const Words& arguments, const std::string& hosts = "") {
  Start start;
  start.arguments = {"--controller", "ucx"};
  if (!hosts.empty())
    start.arguments.insert(start.arguments.end(), {"-H", hosts, "--rsh", HVD_TEST_PRETENDED_AGENT});
  start.arguments.insert(start.arguments.end(), arguments.begin(), arguments.end());
  start.environment = {{"HVD_MPIRUN", "no-such-mpirun"}};  // the job does not need mpirun
  return start;
}

Result run_direct(const Words& arguments, const std::string& hosts = "") {
  return HvdrunProcess(direct(arguments, hosts)).wait();
}

/// The value of `name` at a rank, in the output of rank_program's mode "environment".
std::string value_of(const std::string& name, int rank, const Result& result) {
  const std::string line = "[" + std::to_string(rank) + "] " + name + "=";
  const std::size_t at = result.out.find(line);
  if (at == std::string::npos) return "<not printed>";
  const std::size_t begin = at + line.size();
  return result.out.substr(begin, result.out.find('\n', begin) - begin);
}

/// Like unique_marker(), but of digits only, for markers and names of simulated hosts.
std::string unique_number() { return std::to_string(realtime_ns()); }

TEST(Direct, RanksGetTheirIdentityAndInitMethod) {
  const Words names = {"HVD_RANK",     "HVD_SIZE",           "HVD_LOCAL_RANK",
                       "RANK",         "WORLD_SIZE",         "LOCAL_RANK",
                       "HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HVD_INIT_METHOD",
                       "HVD_JOB_NAME", "HVD_JOB_TOKEN",      "MASTER_ADDR",
                       "MASTER_PORT",  "HVD_LAUNCHER_TOKEN"};
  Words arguments = {"-np", "3", rank_program(), "environment"};
  arguments.insert(arguments.end(), names.begin(), names.end());
  const Result result = run_direct(arguments);
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (int rank = 0; rank < 3; ++rank) {
    for (const char* name : {"HVD_RANK", "HVD_LOCAL_RANK", "RANK", "LOCAL_RANK", "HOROVOD_RANK"})
      EXPECT_EQ(value_of(name, rank, result), std::to_string(rank)) << name;
    for (const char* name : {"HVD_SIZE", "WORLD_SIZE", "HOROVOD_LOCAL_SIZE"})
      EXPECT_EQ(value_of(name, rank, result), "3") << name;
    for (const char* name : {"HVD_JOB_NAME", "HVD_JOB_TOKEN", "MASTER_PORT"})
      EXPECT_EQ(value_of(name, rank, result), value_of(name, 0, result));
    EXPECT_THAT(value_of("HVD_INIT_METHOD", rank, result), StartsWith("hvdrun://"));
    EXPECT_EQ(value_of("HVD_LAUNCHER_TOKEN", rank, result), "<unset>");
  }
  EXPECT_NE(value_of("HVD_INIT_METHOD", 0, result), value_of("HVD_INIT_METHOD", 1, result));
  EXPECT_EQ(value_of("MASTER_ADDR", 1, result), "127.0.0.1");
  EXPECT_EQ(value_of("HVD_JOB_TOKEN", 0, result).size(), 64U);
  EXPECT_NE(value_of("HVD_JOB_TOKEN", 0, run_direct(arguments)),
            value_of("HVD_JOB_TOKEN", 0, result));
}

TEST(Direct, ASecretIsOnNoCommandLine) {
  const std::string marker = unique_marker();
  HvdrunProcess process(direct({"-np", "2", "sh", "-c", "echo token=$HVD_JOB_TOKEN=; exec \"$@\"",
                                "sh", rank_program(), "wait", marker},
                               "a:1,b:1"));
  ASSERT_TRUE(process.wait_for("ready", 2, 20));
  const std::size_t begin = process.out().find("token=") + 6;
  const std::string token = process.out().substr(begin, process.out().find('=', begin) - begin);
  EXPECT_EQ(token.size(), 64U);
  EXPECT_THAT(processes_with(token), IsEmpty());
  for (const pid_t pid : processes_with("hvdrun")) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
    std::ostringstream line;
    line << file.rdbuf();
    EXPECT_THAT(line.str(), Not(HasSubstr("HVD_LAUNCHER_")));
  }
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait().code, 143);
}

TEST(Direct, BindsAsMpirunDoes) {
  const std::vector<Core> cores = usable_cores(allowed_cpus());
  if (cores.size() < 2) GTEST_SKIP() << "needs two cores";
  const std::string script = "echo $HVD_RANK: $(grep Cpus_allowed_list /proc/self/status)";
  const Result result = run_direct({"-np", "2", "--bind", "core", "sh", "-c", script});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto list_of = [&](int rank) {
    const std::size_t at = result.out.find(std::to_string(rank) + ": Cpus_allowed_list:");
    return result.out.substr(at, result.out.find('\n', at) - at).substr(3);
  };
  EXPECT_NE(list_of(0), list_of(1));
  EXPECT_THAT(list_of(0), HasSubstr(std::to_string(cores[0].cpus[0])));
}

TEST(Direct, AKilledSupervisorIsALostRank) {
  const std::string marker = unique_marker();
  HvdrunProcess process(direct({"-np", "2", rank_program(), "wait", marker}));
  ASSERT_TRUE(process.wait_for("ready", 2, 20));
  // hvdrun, and a supervisor and a program for each rank. Keep the supervisors.
  std::vector<pid_t> pids = processes_with(marker);
  ASSERT_EQ(pids.size(), 5U);
  std::erase_if(pids, [&](pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
    std::ostringstream line;
    line << file.rdbuf();
    return line.str().find("--supervise") == std::string::npos;
  });
  ASSERT_EQ(pids.size(), 2U);
  ::kill(pids[0], SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: lost: its supervisor's connection broke"));
  EXPECT_THAT(wait_until_gone(marker, 3), IsEmpty());
}

TEST(Direct, DryRunNamesTheRanksOfEachHost) {
  const Result result =
      run_direct({"-np", "4", "--dry-run", rank_program(), "wait"}, "localhost:2,b:2");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("ranks 0 and 1, each: "));
  EXPECT_THAT(result.out, HasSubstr("ranks 2 and 3: " + std::string(HVD_TEST_PRETENDED_AGENT) +
                                    " b " + hvdrun() + " --supervise-host\n"));
}

TEST(Direct, AnAllocationsHostsHaveToBeNamed) {
  Start start = direct({"-np", "2", rank_program(), "wait"});
  start.environment.emplace_back("SLURM_JOB_ID", "1");
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("SLURM_JOB_ID is set"));
}

/// The output of `hvdrun --dry-run ARGUMENTS`, which shows whether hvdrun would use mpirun.
std::string dry_run(const Words& arguments,
                    std::vector<std::pair<std::string, std::optional<std::string>>> environment) {
  Start start{.arguments = {"-np", "2", "--dry-run"}, .environment = std::move(environment)};
  start.arguments.insert(start.arguments.end(), arguments.begin(), arguments.end());
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  return result.out;
}

TEST(Auto, IsUcxUnlessSomethingIsMeantForMpi) {
  if (!finds_ucx()) GTEST_SKIP() << "libucp.so.0 cannot be loaded";
  const auto under_mpirun = HasSubstr("mpirun -np 2 ");
  EXPECT_THAT(dry_run({rank_program(), "now"}, {}), HasSubstr("ranks 0 and 1, each: "));
  EXPECT_THAT(dry_run({mpi_program(), "sum"}, {}), under_mpirun);
  EXPECT_THAT(dry_run({"sh", "-c", "exec $0", mpi_program()}, {}), under_mpirun);
  EXPECT_THAT(dry_run({"--mpi-args", "--mca x y", rank_program()}, {}), under_mpirun);
  EXPECT_THAT(dry_run({rank_program()}, {{"SLURM_JOB_ID", "1"}}), under_mpirun);
  EXPECT_THAT(dry_run({rank_program()}, {{"HVD_MPIRUN", "/opt/mpirun"}}),
              HasSubstr("/opt/mpirun -np 2 "));
}

// If UCX were chosen, MPI would treat each rank as a job of its own.
TEST(Auto, AProgramThatCallsMpiFindsAllRanks) {
  const Result result =
      HvdrunProcess({.arguments = {"-np", "2", "--verbose", mpi_program(), "sum"}}).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, " of 2 on "), 2) << result.out;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: controller mpi: " + mpi_program() + " needs libmpi"));
}

TEST(Auto, WithoutAnMpirunUcxIsTakenIfItIsThere) {
  const TemporaryFolder empty;
  const Result result = HvdrunProcess({.arguments = {"-np", "1", "-v", rank_program(), "now"},
                                       .environment = {{"PATH", empty.path().string()}}})
                            .wait();
  if (finds_ucx()) {
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("hvdrun: controller ucx: UCX is found\n"));
  } else {
    EXPECT_EQ(result.code, 127);
    EXPECT_THAT(result.err, HasSubstr("install it, name it with HVD_MPIRUN, or start"));
  }
}

TEST(Agent, RanksOnTwoHosts) {
  Start start = direct({"-np", "4", "-x", "LAUNCHER_GIVEN=a'b\nc", "sh", "-c",
                        "echo \"$HVD_RANK: $HVD_LOCAL_RANK of $HVD_LOCAL_SIZE; cross "
                        "$HOROVOD_CROSS_RANK of $HOROVOD_CROSS_SIZE; $NCCL_TEST; $LAUNCHER_HIDDEN; "
                        "$(pwd); ${#LAUNCHER_GIVEN}; $1\"",
                        "sh", "it's"},
                       "a:2,b:2");
  start.environment.emplace_back("NCCL_TEST", "too");
  start.environment.emplace_back("LAUNCHER_HIDDEN", "no");
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  for (int rank = 0; rank < 4; ++rank) {
    const std::string number = std::to_string(rank);
    EXPECT_THAT(result.out,
                HasSubstr("[" + number + "] " + number + ": " + std::to_string(rank % 2) +
                          " of 2; cross " + std::to_string(rank / 2) + " of 2; too; ; " +
                          std::filesystem::current_path().string() + "; 5; it's\n"));
  }
}

TEST(Agent, InputGoesToRankZeroWhereverItIs) {
  for (const std::string hosts : {"a:1,localhost:1", "localhost:1,b:1"}) {
    Start start = direct({"-np", "2", rank_program(), "stdin"}, hosts);
    start.input = "first\nsecond\n";
    const Result result = HvdrunProcess(start).wait();
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("[0] stdin: first;second;\n"));
    EXPECT_THAT(result.out, HasSubstr("[1] stdin: \n"));
  }
}

TEST(Agent, AFailureNamesTheRankAndTheCause) {
  const Result result =
      run_direct({"-np", "4", rank_program(), "signal", "3", std::to_string(SIGKILL)}, "a:2,b:2");
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 3 failed first: killed by SIGKILL (9)  host "));
  EXPECT_THAT(result.err, HasSubstr("local rank 1  pid "));
}

TEST(Agent, AProgramThatIsNotThere) {
  const Result result = run_direct({"-np", "2", "/no/such/program"}, "a:1,b:1");
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("its program could not be started: No such file"));
}

TEST(Agent, AHostOutOfReachIsNamed) {
  const std::string marker = unique_marker();
  const Result result =
      run_direct({"-np", "3", rank_program(), "wait", marker}, "localhost:1,dead.example:2");
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("No route to host\n"));
  EXPECT_THAT(
      result.err,
      HasSubstr("hvdrun: host dead.example (ranks 1 and 2) could not be reached or was lost "
                "(pretended_agent.sh's message is above); exit code 69\n"));
  EXPECT_EQ(result.out, "") << "no program starts before all supervisors are there";
  EXPECT_THAT(wait_until_gone(marker, 3), IsEmpty());
}

TEST(Agent, AHostWithoutHvdrunIsNamed) {
  const Result result = run_direct({"-np", "2", rank_program(), "wait"}, "localhost:1,bare:1");
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("did not find hvdrun on every host"));
}

TEST(Agent, ASilentHostEndsTheStart) {
  const std::string marker = unique_number();
  const Result result =
      run_direct({"--start-timeout", "1", "-np", "2", rank_program(), "wait", marker},
                 "localhost:1,mute" + marker + ":1");
  EXPECT_EQ(result.code, 69) << result.err;
  // On a busy machine rank 0's supervisor may not have started by then either.
  EXPECT_THAT(result.err, HasSubstr("1) did not start within 1.00 s"));
  EXPECT_THAT(wait_until_gone(marker, 3), IsEmpty());
}

// The ranks that the agent has started have their own connections to hvdrun.
TEST(Agent, OneThatIsKilledInMidRunLeavesItsRanksAlone) {
  const TemporaryFolder folder;
  const std::string go = folder.path() / "go";
  const std::string host = "frail" + unique_number();
  const std::string script =
      "echo ready; until [ -e $0.$HVD_RANK ]; do sleep 0.05; done; echo saved";
  HvdrunProcess process(direct({"-np", "2", "sh", "-c", script, go}, "localhost:1," + host + ":1"));
  ASSERT_TRUE(process.wait_for("ready", 2, 20));
  std::vector<pid_t> agents = processes_with(host);
  std::erase(agents, process.pid());
  ASSERT_EQ(agents.size(), 1U);
  ::kill(agents[0], SIGKILL);
  std::ofstream(go + ".0").close();
  ASSERT_TRUE(process.wait_for("[0] saved", 1, 20));
  EXPECT_FALSE(process.wait_for("hvdrun: ", 1, 1)) << "nothing that hvdrun has started is left";
  std::ofstream(go + ".1").close();
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("[1] saved\n"));
}

TEST(Agent, OneThatIsKilledInMidRunLeavesFailuresToBeSeen) {
  const TemporaryFolder folder;
  const std::string go = folder.path() / "go";
  const std::string host = "frail" + unique_number();
  const std::string script =
      "echo ready; [ $HVD_RANK = 0 ] || until [ -e $0 ]; do sleep 0.05; done; exit $((HVD_RANK * "
      "7))";
  HvdrunProcess process(direct({"-np", "2", "sh", "-c", script, go}, "localhost:1," + host + ":1"));
  ASSERT_TRUE(process.wait_for("ready", 2, 20));
  std::vector<pid_t> agents = processes_with(host);
  std::erase(agents, process.pid());
  ASSERT_EQ(agents.size(), 1U);
  ::kill(agents[0], SIGKILL);
  EXPECT_FALSE(process.wait_for("hvdrun: ", 1, 1));
  std::ofstream(go).close();
  const Result result = process.wait();
  EXPECT_EQ(result.code, 7) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 1 failed first: exited with code 7"));
}

TEST(Agent, OneThatIsNotThere) {
  Start start =
      direct({"-np", "1", "-H", "a:1", "--rsh", "no-such-agent -q", rank_program(), "wait"});
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("cannot run 'no-such-agent'"));
  EXPECT_THAT(result.err, HasSubstr("--rsh"));
}

TEST(Agent, InterruptAndKillLeaveNothing) {
  for (const int signal : {SIGINT, SIGKILL}) {
    const std::string marker = unique_marker();
    HvdrunProcess process(direct({"-np", "4", rank_program(), "wait", marker}, "localhost:2,b:2"));
    ASSERT_TRUE(process.wait_for("ready", 4, 20));
    process.signal(signal);
    EXPECT_EQ(process.wait().code, 128 + signal);
    EXPECT_THAT(wait_until_gone(marker, 5), IsEmpty()) << signal;
  }
}

TEST(Agent, AnHvdrunThatIsKilledDuringTheStartLeavesNoProcess) {
  for (const int delay_us : {0, 2'000, 5'000, 10'000, 20'000, 40'000}) {
    const std::string marker = unique_number();
    HvdrunProcess process(direct({"-np", "3", rank_program(), "wait", marker},
                                 "localhost:1,b:1,mute" + marker + ":1"));
    ::usleep(static_cast<useconds_t>(delay_us));
    process.signal(SIGKILL);
    process.wait();
    EXPECT_THAT(wait_until_gone(marker, 5), IsEmpty()) << "after " << delay_us << " us";
  }
}

/// Jobs of a program that uses hvd. The ranks join, work and leave, several times.
class HvdJob : public ::testing::Test {
 protected:
  void SetUp() override {
    if (program_.empty()) GTEST_SKIP() << "hvd was built without UCX or Asio";
    if (!finds_ucx()) GTEST_SKIP() << "libucp.so.0 cannot be loaded";
  }
  const std::string program_ = HVD_TEST_START_PROGRAM;
};

TEST_F(HvdJob, MeetsAndWorks) {
  for (const std::string hosts : {"", "a:2,b:1", "localhost:1,b:2"}) {
    const Result result = run_direct({"-np", "3", program_, "work"}, hosts);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_EQ(result.err, "");
    for (int rank = 0; rank < 3; ++rank) {
      const std::string number = std::to_string(rank);
      EXPECT_EQ(
          count(result.out, "[" + number + "] OK " + number + " 3 " + number + " 3 ucx hvdrun://"),
          2)
          << result.out;
    }
  }
}

TEST_F(HvdJob, OfOneRank) {
  const Result result = run_direct({"-np", "1", program_, "work"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("OK 0 1 0 1 local "));
}

TEST_F(HvdJob, AKilledRankIsToBlame) {
  const Result result = run_direct({"-np", "3", program_, "kill"});
  EXPECT_EQ(result.code, 137) << result.out << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 2 failed first: killed by SIGKILL (9)"));
  EXPECT_EQ(count(result.out, "PeerLostError 2 "), 2) << result.out;
}

TEST_F(HvdJob, OfManyAtOnce) {
  std::vector<std::unique_ptr<HvdrunProcess>> jobs;
  for (int i = 0; i < 4; ++i)
    jobs.push_back(std::make_unique<HvdrunProcess>(direct({"-np", "2", program_, "init"})));
  for (const auto& job : jobs) {
    const Result result = job->wait();
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_EQ(count(result.out, " 2 ucx hvdrun://"), 2) << result.out;
  }
}

TEST(SuperviseHost, IsNotForPeople) {
  const Result result =
      HvdrunProcess({.arguments = {"--supervise-host"}, .input = "hello\n"}).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--supervise-host is for hvdrun's own use"));
}

}  // namespace
}  // namespace hvd::launcher::test
