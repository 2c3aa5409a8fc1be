// Runs torchrun's command lines with torchrun and with hvdrun, and compares what the ranks find.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "mpirun/job_folder.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

using Words = std::vector<std::string>;
namespace fs = std::filesystem;

constexpr double kTimeout = 100;

std::string torchrun() { return HVD_TEST_TORCHRUN; }

/// The variables whose values torchrun and hvdrun must agree on.
const Words kVariables = {"RANK",
                          "LOCAL_RANK",
                          "WORLD_SIZE",
                          "LOCAL_WORLD_SIZE",
                          "GROUP_RANK",
                          "GROUP_WORLD_SIZE",
                          "ROLE_RANK",
                          "ROLE_WORLD_SIZE",
                          "ROLE_NAME",
                          "MASTER_ADDR",
                          "MASTER_PORT",
                          "TORCHELASTIC_RUN_ID",
                          "TORCHELASTIC_RESTART_COUNT",
                          "TORCHELASTIC_MAX_RESTARTS",
                          "TORCH_NCCL_ASYNC_ERROR_HANDLING"};

std::string content(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

/// The files below a folder, with their contents. The random part of the folder of a run is
/// replaced.
std::vector<std::pair<std::string, std::string>> files_below(const fs::path& folder) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const std::string name = fs::relative(entry.path(), folder);
    files.emplace_back(std::regex_replace(name, std::regex("^([a-z0-9]+)_[^/]*/"), "$1_X/"),
                       content(entry.path()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string free_port() {
  asio::io_context io;
  return std::to_string(port_of(reserve_port(io)));
}

/// A launcher that runs a line; an empty name is hvdrun's.
std::unique_ptr<HvdrunProcess> start(const std::string& launcher, const Words& line) {
  Start start;
  start.arguments = line;
  start.program = launcher;
  start.environment = {{"OMP_NUM_THREADS", "1"}, {"HVD_JOB_NAME", std::nullopt}};
  return std::make_unique<HvdrunProcess>(start);
}

Words environment_program() {
  Words words = {rank_program(), "environment"};
  words.insert(words.end(), kVariables.begin(), kVariables.end());
  return words;
}

Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

/// Runs a line on each node, all at the same time, and returns the logs of all nodes.
std::vector<std::pair<std::string, std::string>> logs_of(const std::string& launcher,
                                                         const std::vector<Words>& nodes) {
  const TemporaryFolder folder;
  std::vector<std::unique_ptr<HvdrunProcess>> launchers;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Words logs = {"--redirects", "3", "--log-dir",
                        folder.path() / ("node" + std::to_string(i))};
    launchers.push_back(start(launcher, logs + nodes[i]));
  }
  for (const auto& running : launchers) {
    const Result result = running->wait(kTimeout);
    EXPECT_EQ(result.code, 0) << launcher << result.err;
    EXPECT_THAT(result.out, IsEmpty());
  }
  std::vector<std::pair<std::string, std::string>> all;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto files = files_below(folder.path() / ("node" + std::to_string(i)));
    all.insert(all.end(), files.begin(), files.end());
  }
  return all;
}

class BesideTorchrun : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(torchrun())) GTEST_SKIP() << "there is no torchrun in .venv";
    if (!finds_ucx()) GTEST_SKIP() << "there is no UCX";
  }
};

TEST_F(BesideTorchrun, OneNode) {
  const Words line =
      Words{"--no-python", "--nproc-per-node", "2",      "--master-port", free_port(), "--rdzv-id",
            "job7",        "--role",           "trainer"} +
      environment_program();
  const auto expected = logs_of(torchrun(), {line});
  EXPECT_EQ(logs_of("", {line}), expected);
  ASSERT_EQ(expected.size(), 4U) << "two ranks, two streams";
  EXPECT_THAT(expected.back().first, HasSubstr("job7_X/attempt_0/1/stdout.log"));
  EXPECT_THAT(expected.back().second, HasSubstr("ROLE_NAME=trainer"));
}

TEST_F(BesideTorchrun, TwoNodes) {
  const std::string port = free_port();
  std::vector<Words> lines;
  for (const char* const node : {"0", "1"}) {
    lines.push_back(Words{"--no-python", "--nnodes=2", "--nproc_per_node=2",
                          std::string("--node_rank=") + node, "--master_addr=127.0.0.1",
                          "--master_port=" + port} +
                    environment_program());
  }
  const auto expected = logs_of(torchrun(), lines);
  EXPECT_EQ(logs_of("", lines), expected);
  EXPECT_THAT(expected.back().second, HasSubstr("RANK=3"));
}

TEST_F(BesideTorchrun, StreamsGoToTheSameFiles) {
  const auto files = [&](const std::string& launcher) {
    const TemporaryFolder folder;
    const Words line = {"--no-python",
                        "--nproc-per-node",
                        "2",
                        "--master-port",
                        free_port(),
                        "--log-dir",
                        folder.path(),
                        "-r",
                        "0:1,1:2",
                        "--tee=1:1",
                        "sh",
                        "-c",
                        "echo out $RANK; echo err $RANK >&2"};
    const Result result = start(launcher, line)->wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.err;
    for (const char* const hidden : {"out 0", "err 1"}) {
      EXPECT_THAT(result.out, Not(HasSubstr(hidden))) << launcher;
      EXPECT_THAT(result.err, Not(HasSubstr(hidden))) << launcher;
    }
    EXPECT_THAT(result.out, HasSubstr("out 1"));
    EXPECT_THAT(result.err, HasSubstr("err 0"));
    return files_below(folder.path());
  };
  const auto expected = files(torchrun());
  EXPECT_EQ(files(""), expected);
  EXPECT_EQ(expected.size(), 3U);
}

TEST_F(BesideTorchrun, OnlySomeRanksAreShown) {
  for (const std::string& launcher : {torchrun(), std::string()}) {
    const Result result =
        start(launcher, {"--no-python", "--standalone", "--nproc-per-node", "3",
                         "--local-ranks-filter", "0,2", "sh", "-c", "echo rank=$RANK"})
            ->wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("rank=0"));
    EXPECT_THAT(result.out, Not(HasSubstr("rank=1")));
    EXPECT_THAT(result.out, HasSubstr("rank=2"));
  }
}

TEST_F(BesideTorchrun, PythonScriptsAndModules) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "train.py")
      << "import os, sys\n"
         "os.write(1, f\"{sys.argv[1:]} {os.environ['RANK']} {__name__}\\n\".encode())\n";
  for (const std::string& launcher : {torchrun(), std::string()}) {
    for (const Words& program : {Words{(folder.path() / "train.py").string(), "--nnodes", "7"},
                                 Words{"-m", "train", "a"}}) {
      Start start;
      start.program = launcher;
      start.arguments = Words{"--standalone", "--nproc-per-node", "2"} + program;
      start.environment = {{"PYTHONPATH", folder.path().string()}, {"OMP_NUM_THREADS", "1"}};
      const Result result = HvdrunProcess(start).wait(kTimeout);
      EXPECT_EQ(result.code, 0) << result.err;
      const std::string arguments = program.front() == "-m" ? "['a']" : "['--nnodes', '7']";
      for (const char* const rank : {" 0 ", " 1 "})
        EXPECT_THAT(result.out, HasSubstr(arguments + rank + "__main__")) << launcher;
    }
  }
}

TEST(OneNode, ADryRunNamesItsRanks) {
  const Result result = run_hvdrun({"--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "1",
                                    "--master-addr", "n0", "--dry-run", rank_program(), "wait"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, StartsWith("ranks 2 and 3, each: "));
}

TEST(OneNode, OverMpirunTheRanksOfANodeStayOnItsHost) {
  Start start{.arguments = {"--controller", "mpi", "--nproc-per-node", "3", "--dry-run",
                            rank_program(), "wait"},
              .environment = {{"SLURM_JOB_ID", "1"}}};
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("mpirun -np 3 -H localhost:3 "));
}

class Nodes : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(HVD_TEST_START_PROGRAM).empty() || !finds_ucx())
      GTEST_SKIP() << "there is no UCX";
  }
  /// Starts one node of two.
  std::unique_ptr<HvdrunProcess> node(int rank, const Words& program, const Words& options = {}) {
    const Words line = Words{
        "--nnodes",      "2",         "--nproc-per-node", "2",  "--node-rank", std::to_string(rank),
        "--master-addr", "127.0.0.1", "--master-port",    port_};
    return start("", line + options + program);
  }
  const std::string port_ = free_port();
};

TEST_F(Nodes, RanksOfAllNodesJoinOneJob) {
  const Words program = {HVD_TEST_START_PROGRAM, "work"};
  const auto first = node(0, program), second = node(1, program);
  int rank = 0;
  for (const auto& running : {first.get(), second.get()}) {
    const Result result = running->wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    for (int i = 0; i < 2; ++i, ++rank)
      EXPECT_THAT(result.out, HasSubstr("OK " + std::to_string(rank) + " 4 "));
  }
}

TEST_F(Nodes, DistributeTheirRanks) {
  const auto c10d = [this](const Words& options) {
    return start("", Words{"--nnodes", "3", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", "127.0.0.1:" + port_} +
                         options + Words{HVD_TEST_START_PROGRAM, "work"});
  };
  std::vector<std::unique_ptr<HvdrunProcess>> nodes;
  for (int i = 0; i < 3; ++i) nodes.push_back(c10d({}));
  std::string out;
  for (const auto& running : nodes) {
    const Result result = running->wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    out += result.out;
  }
  for (int rank = 0; rank < 6; ++rank)
    EXPECT_EQ(count(out, "] OK " + std::to_string(rank) + " 6 "), 2) << out;

  const Result alone = c10d({"--start-timeout", "1"})->wait();
  EXPECT_EQ(alone.code, 69);
  EXPECT_THAT(alone.err, HasSubstr("expected 3 nodes at tcp://127.0.0.1:" + port_ +
                                   ", but 1 joined within 1 s"));
}

/// Whether a process listens at the port.
bool is_served(const std::string& port) {
  asio::io_context io;
  asio::ip::tcp::socket socket(io);
  asio::error_code error;
  socket.connect({asio::ip::address_v4::loopback(), static_cast<std::uint16_t>(std::stoi(port))},
                 error);
  return !error;
}

TEST_F(Nodes, ANodeThatLeavesReturnsItsRank) {
  // The program that hvdrun runs to get its node's rank.
  const auto node_rank = [this](const std::string& serves) {
    Start start;
    start.program = fs::path(hvdrun()).parent_path() / "hvd-node-rank";
    start.arguments = {"127.0.0.1", port_, "job", "3", "60", "7", serves};
    return std::make_unique<HvdrunProcess>(start);
  };
  const auto first = node_rank("1");
  for (int i = 0; i < 1000 && !is_served(port_); ++i) ::usleep(10'000);
  const auto leaver = node_rank("0");
  ::usleep(1'000'000);
  leaver->signal(SIGTERM);
  EXPECT_THAT(leaver->wait().out, HasSubstr("a signal has ended the wait"));
  const auto second = node_rank("0"), third = node_rank("0");
  EXPECT_EQ(first->wait().out, "0 7\n");
  Words ranks = {second->wait().out, third->wait().out};
  std::sort(ranks.begin(), ranks.end());
  EXPECT_EQ(ranks, (Words{"1 7\n", "2 7\n"}));
}

TEST_F(Nodes, EachNodeReportsItsOwnRanks) {
  const Words program = {HVD_TEST_START_PROGRAM, "kill"};  // kills the last rank
  const auto first = node(0, program), second = node(1, program);
  const Result survivors = first->wait(kTimeout), result = second->wait(kTimeout);
  EXPECT_EQ(survivors.code, 3) << survivors.err;
  EXPECT_THAT(survivors.out, HasSubstr("PeerLostError 3 "));
  EXPECT_EQ(result.code, 137);
  EXPECT_THAT(result.err, HasSubstr("rank 3 failed first: killed by SIGKILL"));
  EXPECT_THAT(result.err, HasSubstr("local rank 1"));
}

TEST_F(Nodes, AMissingNodeIsNamedByItsRanks) {
  const Result result =
      node(0, {HVD_TEST_START_PROGRAM, "work"}, {"-x", "HVD_START_TIMEOUT=2"})->wait();
  EXPECT_NE(result.code, 0);
  EXPECT_THAT(result.err, HasSubstr("ranks 2 and 3"));
}

TEST_F(Nodes, OutputHasTheNumbersOfTheWholeJob) {
  const Result result =
      node(1, {"sh", "-c", "echo $HVD_INIT_METHOD $HVD_JOB_NAME"}, {"--rdzv-id", "j"})->wait();
  EXPECT_EQ(result.code, 0);
  for (const char* const rank : {"[2] ", "[3] "})
    EXPECT_THAT(result.out, HasSubstr(rank + ("tcp://127.0.0.1:" + port_ + " j\n")));
}

}  // namespace
}  // namespace hvd::launcher::test
