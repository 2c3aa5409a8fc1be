// Tests behaviour that only the start without mpirun has. Behaviour that both starts share is
// tested by failure_test, signals_test and output_test, with LAUNCHER_TEST_CONTROLLER=ucx.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "agent/core_share.h"
#include "command/controller.h"
#include "hvdrun_process.h"
#include "mpirun/job_folder.h"
#include "system/process.h"
#include "system/unique_fd.h"

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
  ASSERT_TRUE(process.wait_for("ready", 2));
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

TEST(Direct, AKilledAgentTakesItsRanksAlong) {
  const std::string marker = unique_marker();
  HvdrunProcess process(direct({"-np", "2", rank_program(), "stubborn", marker}));
  ASSERT_TRUE(process.wait_for("ready", 2));
  EXPECT_EQ(processes_with(marker).size(), 3U) << "hvdrun and a program for each rank";
  const std::vector<pid_t> agents = agents_of(process.pid());
  ASSERT_EQ(agents.size(), 1U);
  ::kill(agents[0], SIGKILL);
  const Result result = process.wait();
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("failed first: lost: its agent's connection broke"));
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST(Direct, AnAgentThatIsKilledDuringTheStartEndsTheJob) {
  for (const int delay_us : {0, 1'000, 2'000, 4'000, 8'000, 16'000, 32'000}) {
    const std::string marker = unique_marker();
    HvdrunProcess process(direct({"-np", "3", rank_program(), "wait", marker}));
    std::vector<pid_t> agents;
    for (int i = 0; i < 20'000 && agents.empty(); ++i) {
      agents = agents_of(process.pid());
      if (agents.empty()) ::usleep(500);
    }
    ASSERT_EQ(agents.size(), 1U);
    ::usleep(static_cast<useconds_t>(delay_us));
    ::kill(agents[0], SIGKILL);
    const Result result = process.wait();
    // 70: it had not connected.
    EXPECT_TRUE(result.code == 69 || result.code == 70) << result.code << result.err;
    const bool before = result.code == 70;
    EXPECT_THAT(result.err, HasSubstr(before ? "hvdrun: the agent of this host ended with code 137"
                                             : "failed first: lost"))
        << "after " << delay_us << " us";
    EXPECT_THAT(wait_until_gone(marker), IsEmpty()) << "after " << delay_us << " us";
  }
}

TEST(Direct, AnAgentWithTooFewDescriptorsSaysSo) {
  Start start = direct({"-np", "16", rank_program(), "now"});
  start.prefix = {"sh", "-c", "ulimit -n 100; exec \"$@\"", "sh"};
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: too few file descriptors on "));
  EXPECT_THAT(result.err,
              HasSubstr("expected at least 152 for its 16 ranks, got a limit of 100; raise it"));
  EXPECT_THAT(result.err, HasSubstr("hvdrun: the agent of this host ended with code 69"));
}

/// The CPU time that a process has used.
double cpu_seconds_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream fields(line.substr(line.rfind(')') + 2));
  std::string field;
  double user = 0, kernel = 0;
  for (int i = 3; i <= 13; ++i) fields >> field;
  fields >> user >> kernel;
  return (user + kernel) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

/// The port on which a process listens for hvdrun's agents; 0 if there is none.
int listening_port_of(pid_t pid) {
  std::vector<std::string> sockets;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code error;
    sockets.push_back(std::filesystem::read_symlink(entry.path(), error).string());
  }
  for (const char* name : {"/net/tcp", "/net/tcp6"}) {
    std::ifstream table("/proc/" + std::to_string(pid) + name);
    for (std::string line; std::getline(table, line);) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, skipped, inode;
      fields >> slot >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) fields >> skipped;
      fields >> inode;
      const bool listens =
          state == "0A" && std::count(sockets.begin(), sockets.end(), "socket:[" + inode + "]") > 0;
      if (listens)
        return static_cast<int>(std::stoul(local.substr(local.find(':') + 1), nullptr, 16));
    }
  }
  return 0;
}

/// A job whose processes have few descriptors, and that the test can end.
struct TightJob {
  explicit TightJob(const std::string& limit)
      : process([&] {
          Start start = direct({"-np", "2", "sh", "-c",
                                "echo method=$HVD_INIT_METHOD=; echo ready; until [ -e $0 ]; do "
                                "sleep 0.05; done; echo done",
                                go});
          start.prefix = {"sh", "-c", "ulimit -n " + limit + "; exec \"$@\"", "sh"};
          return start;
        }()) {
    ready = process.wait_for("ready", 2);
  }
  void expect_good_end() {
    std::ofstream(go).close();
    const Result result = process.wait();
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(count(result.out, "done\n"), 2) << result.out;
  }

  const TemporaryFolder folder;
  const std::string go = folder.path() / "go";
  HvdrunProcess process;
  bool ready = false;
};

/// Idle connections to a process's port.
std::vector<UniqueFd> strangers_at(pid_t pid, int number) {
  int port = 0;
  for (int i = 0; i < 2000 && port == 0; ++i) {
    port = listening_port_of(pid);
    if (port == 0) ::usleep(5000);
  }
  EXPECT_GT(port, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < number; ++i) {
    strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    ::connect(strangers.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  }
  return strangers;
}

TEST(Direct, StrangersThatTakeAllDescriptorsOfHvdrunDoNotKeepAnAgentOut) {
  const TemporaryFolder folder;
  Start start = direct({"-np", "2", rank_program(), "now"}, "localhost:1,late:1");
  start.prefix = {"sh", "-c", "ulimit -n 64; exec \"$@\"", "sh"};
  start.environment.emplace_back("TMPDIR", folder.path().string());
  HvdrunProcess process(start);
  const std::vector<UniqueFd> strangers = strangers_at(process.pid(), 100);
  ::usleep(300'000);
  std::ofstream(folder.path() / "go").close();
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_LT(result.seconds, 8) << "the agent waited until the strangers' time was over";
}

TEST(Direct, StrangersThatTakeAllDescriptorsOfHvdrunDoNotDisturbIt) {
  TightJob job("64");
  ASSERT_TRUE(job.ready);
  const std::vector<UniqueFd> strangers = strangers_at(job.process.pid(), 100);
  ::usleep(200'000);
  const double before = cpu_seconds_of(job.process.pid());
  ::usleep(1'000'000);
  EXPECT_LT(cpu_seconds_of(job.process.pid()) - before, 0.3) << "hvdrun spins";
  job.expect_good_end();
}

TEST(Direct, ProcessesThatTakeAllDescriptorsOfAnAgentDoNotDisturbIt) {
  TightJob job("64");
  ASSERT_TRUE(job.ready);
  const std::string out = job.process.out();
  const std::size_t begin = out.find("method=hvdrun://") + 16;
  const std::string name = out.substr(begin, out.find('=', begin) - begin);
  const std::vector<pid_t> agents = agents_of(job.process.pid());
  ASSERT_EQ(agents.size(), 1U);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  std::vector<UniqueFd> visitors;
  for (int i = 0; i < 100; ++i) {
    visitors.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    EXPECT_EQ(::connect(visitors.back().get(), reinterpret_cast<const sockaddr*>(&address), length),
              0);
  }
  ::usleep(200'000);
  const double before = cpu_seconds_of(agents[0]);
  ::usleep(1'000'000);
  EXPECT_LT(cpu_seconds_of(agents[0]) - before, 0.3) << "the agent spins";
  job.expect_good_end();
}

// A program that a rank executes, also while it is in hvd::init(), inherits its descriptors.
TEST(Direct, ProgramsInheritNoDescriptorOfHvdrun) {
  const Result result =
      run_direct({"-np", "2", "sh", "-c", "for fd in /proc/$$/fd/*; do readlink $fd; done; :"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("pipe:"));
  EXPECT_THAT(result.out, Not(HasSubstr("socket:")));
  EXPECT_THAT(result.out, Not(HasSubstr("anon_inode:")));
}

TEST(Direct, DryRunNamesTheRanksOfEachHost) {
  const Result result =
      run_direct({"-np", "4", "--dry-run", rank_program(), "wait"}, "localhost:2,b:2");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("ranks 0 and 1, each: "));
  EXPECT_THAT(result.out, HasSubstr("ranks 2 and 3: " + std::string(HVD_TEST_PRETENDED_AGENT) +
                                    " b " + hvdrun() + " --agent\n"));
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

TEST(RemoteShell, RanksOnTwoHosts) {
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

TEST(RemoteShell, InputGoesToRankZeroWhereverItIs) {
  for (const std::string hosts : {"a:1,localhost:1", "localhost:1,b:1"}) {
    Start start = direct({"-np", "2", rank_program(), "stdin"}, hosts);
    start.input = "first\nsecond\n";
    const Result result = HvdrunProcess(start).wait();
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("[0] stdin: first;second;\n"));
    EXPECT_THAT(result.out, HasSubstr("[1] stdin: \n"));
  }
}

TEST(RemoteShell, AFailureNamesTheRankAndTheCause) {
  const Result result =
      run_direct({"-np", "4", rank_program(), "signal", "3", std::to_string(SIGKILL)}, "a:2,b:2");
  EXPECT_EQ(result.code, 137) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun: rank 3 failed first: killed by SIGKILL (9)  host "));
  EXPECT_THAT(result.err, HasSubstr("local rank 1  pid "));
}

TEST(RemoteShell, AProgramThatIsNotThere) {
  const Result result = run_direct({"-np", "2", "/no/such/program"}, "a:1,b:1");
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("its program could not be started: No such file"));
}

TEST(RemoteShell, AHostOutOfReachIsNamed) {
  const std::string marker = unique_marker();
  const Result result =
      run_direct({"-np", "3", rank_program(), "wait", marker}, "localhost:1,dead.example:2");
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("No route to host\n"));
  EXPECT_THAT(
      result.err,
      HasSubstr("hvdrun: host dead.example (ranks 1 and 2) could not be reached or was lost "
                "(pretended_agent.sh's message is above); exit code 69\n"));
  EXPECT_EQ(result.out, "") << "no program starts before all agents are there";
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST(RemoteShell, AHostWithoutHvdrunIsNamed) {
  const Result result = run_direct({"-np", "2", rank_program(), "wait"}, "localhost:1,bare:1");
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("did not find hvdrun on every host"));
}

TEST(RemoteShell, ASilentHostEndsTheStart) {
  const std::string marker = unique_number();
  const Result result =
      run_direct({"--start-timeout", "1", "-np", "2", rank_program(), "wait", marker},
                 "localhost:1,mute" + marker + ":1");
  EXPECT_EQ(result.code, 69) << result.err;
  // On a busy machine rank 0's agent may not have started by then either.
  EXPECT_THAT(result.err, HasSubstr("1) did not start within 1.00 s"));
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

// The agent that the remote shell has started has its own connection to hvdrun.
TEST(RemoteShell, OneThatIsKilledInMidRunLeavesItsRanksAlone) {
  const TemporaryFolder folder;
  const std::string go = folder.path() / "go";
  const std::string host = "frail" + unique_number();
  const std::string script =
      "echo ready; until [ -e $0.$HVD_RANK ]; do sleep 0.05; done; echo saved";
  HvdrunProcess process(direct({"-np", "2", "sh", "-c", script, go}, "localhost:1," + host + ":1"));
  ASSERT_TRUE(process.wait_for("ready", 2));
  std::vector<pid_t> agents = processes_with(host);
  std::erase(agents, process.pid());
  ASSERT_EQ(agents.size(), 1U);
  ::kill(agents[0], SIGKILL);
  std::ofstream(go + ".0").close();
  ASSERT_TRUE(process.wait_for("[0] saved", 1));
  EXPECT_FALSE(process.wait_for("hvdrun: ", 1, 1)) << "nothing that hvdrun has started is left";
  std::ofstream(go + ".1").close();
  const Result result = process.wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("[1] saved\n"));
}

TEST(RemoteShell, OneThatIsKilledInMidRunLeavesFailuresToBeSeen) {
  const TemporaryFolder folder;
  const std::string go = folder.path() / "go";
  const std::string host = "frail" + unique_number();
  const std::string script =
      "echo ready; [ $HVD_RANK = 0 ] || until [ -e $0 ]; do sleep 0.05; done; exit $((HVD_RANK * "
      "7))";
  HvdrunProcess process(direct({"-np", "2", "sh", "-c", script, go}, "localhost:1," + host + ":1"));
  ASSERT_TRUE(process.wait_for("ready", 2));
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

TEST(RemoteShell, OneThatIsNotThere) {
  Start start =
      direct({"-np", "1", "-H", "a:1", "--rsh", "no-such-agent -q", rank_program(), "wait"});
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 127) << result.err;
  EXPECT_THAT(result.err, HasSubstr("cannot run 'no-such-agent'"));
  EXPECT_THAT(result.err, HasSubstr("--rsh"));
}

TEST(RemoteShell, InterruptAndKillLeaveNothing) {
  for (const int signal : {SIGINT, SIGKILL}) {
    const std::string marker = unique_marker();
    HvdrunProcess process(direct({"-np", "4", rank_program(), "wait", marker}, "localhost:2,b:2"));
    ASSERT_TRUE(process.wait_for("ready", 4));
    process.signal(signal);
    EXPECT_EQ(process.wait().code, 128 + signal);
    EXPECT_THAT(wait_until_gone(marker), IsEmpty()) << signal;
  }
}

TEST(RemoteShell, AnHvdrunThatIsKilledDuringTheStartLeavesNoProcess) {
  for (const int delay_us : {0, 2'000, 5'000, 10'000, 20'000, 40'000}) {
    const std::string marker = unique_number();
    HvdrunProcess process(direct({"-np", "3", rank_program(), "wait", marker},
                                 "localhost:1,b:1,mute" + marker + ":1"));
    ::usleep(static_cast<useconds_t>(delay_us));
    process.signal(SIGKILL);
    process.wait();
    EXPECT_THAT(wait_until_gone(marker), IsEmpty()) << "after " << delay_us << " us";
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

TEST(AgentCommand, IsNotForPeople) {
  const Result result = HvdrunProcess({.arguments = {"--agent"}, .input = "hello\n"}).wait();
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, HasSubstr("--agent is for hvdrun's own use"));
}

}  // namespace
}  // namespace hvd::launcher::test
