// Elastic jobs in torchrun's way: the same line on every node, and nodes join and leave while the
// job runs. All nodes are this machine, and the workers have no data plane
// (programs/worker_program.cpp).
#include <unistd.h>

#include <csignal>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "system/socket.h"
#include "worker_job.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class ElasticNodes : public WorkerJob {
 protected:
  /// A node of a job whose deadlines are a tenth of the default ones.
  std::unique_ptr<HvdrunProcess> node(const std::string& nodes, const Words& program,
                                      const Words& options = {}) const {
    Start start;
    start.arguments = {"--nnodes",       nodes,  "--nproc-per-node", "1",
                       "--rdzv-backend", "c10d", "--rdzv-endpoint",  "localhost:" + port_};
    for (const Words& words : {options, Words{kWorker, "load", "program=" + marker_}, program})
      start.arguments.insert(start.arguments.end(), words.begin(), words.end());
    start.environment = {{"HVD_PEER_TIMEOUT", "3"}};
    return std::make_unique<HvdrunProcess>(start);
  }
  /// The node that coordinates, and `others` that join.
  std::vector<std::unique_ptr<HvdrunProcess>> job(const std::string& nodes, int others,
                                                  const Words& program) const {
    std::vector<std::unique_ptr<HvdrunProcess>> all;
    all.push_back(node(nodes, program));
    EXPECT_TRUE(all.front()->wait_for(" pid ", 1, kTimeout));
    for (int i = 0; i < others; ++i) all.push_back(node(nodes, program));
    return all;
  }
  static std::string free_port() {
    asio::io_context io;
    return std::to_string(port_of(reserve_port(io)));
  }

  const std::string port_ = free_port();
};

TEST_F(ElasticNodes, NodesLeaveAndComeBackAndAreLost) {
  const auto nodes = job("1:3", 2, {until_gate()});
  HvdrunProcess& first = *nodes[0];
  ASSERT_TRUE(begins(first, 3, 3));
  nodes[1]->signal(SIGTERM);
  const Result left = nodes[1]->wait(kTimeout);
  EXPECT_EQ(left.code, 0) << left.err;
  EXPECT_THAT(left.err,
              HasSubstr("this node leaves the job as soon as the other nodes are enough"));
  ASSERT_TRUE(begins(first, 2, 2));
  EXPECT_TRUE(first.wait_for(" leaves the job: its agent was asked to end\n", 1, kTimeout));
  const auto again = node("1:3", {until_gate()});
  ASSERT_TRUE(begins(first, 3, 6)) << "in order";
  nodes[2]->signal(SIGKILL);
  ASSERT_TRUE(first.wait_for(" is lost: host ", 1, kTimeout));
  gate_.open();
  const Result result = first.wait(kTimeout), other = again->wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_EQ(other.code, 0) << other.err;
  EXPECT_EQ(other.out, "") << "the first node shows the output";
  EXPECT_EQ(count(result.err, " is lost: host "), 1) << result.err;
  EXPECT_EQ(count(result.out, " ends at commit "), 3) << "one of them has left before\n"
                                                      << result.out;
  EXPECT_THAT(wait_until_gone(marker_), IsEmpty());
}

TEST_F(ElasticNodes, TheOrderOfTheirStartDoesNotMatterAndTheJobWaitsForTheFewest) {
  const auto a = node("3:4", {}), b = node("3:4", {}), c = node("3:4", {});
  int ends = 0;
  for (const auto& running : {a.get(), b.get(), c.get()}) {
    const Result result = running->wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.err;
    ends += count(result.out, " ends at commit 20\n");
    EXPECT_THAT(result.out, Not(HasSubstr("of 2 generation")));
  }
  EXPECT_EQ(ends, 3);
}

TEST_F(ElasticNodes, ANodeBeyondTheMostWaitsAndReplacesALostOne) {
  const auto nodes = job("1:2", 1, {until_gate()});
  ASSERT_TRUE(begins(*nodes[0], 2, 2));
  const auto waits = node("1:2", {until_gate()}), leaves = node("1:2", {until_gate()});
  ASSERT_TRUE(nodes[0]->wait_for("joins the job with 1 slot\n", 3, kTimeout));
  EXPECT_EQ(count(nodes[0]->out(), " pid "), 2) << "they have no workers";
  leaves->signal(SIGTERM);
  EXPECT_EQ(leaves->wait(kTimeout).code, 0) << "at once";
  nodes[1]->signal(SIGKILL);
  ASSERT_TRUE(begins(*nodes[0], 2, 4));
  gate_.open();
  const Result result = nodes[0]->wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("[w3] worker 3 ends at commit "));
  EXPECT_EQ(waits->wait(kTimeout).code, 0);
}

TEST_F(ElasticNodes, AllNodesHaveTheExitCodeOfTheJob) {
  const auto nodes =
      job("2:3", 1,
          {"exit:1:0:5", "exit:2:0:5", "exit:3:0:5", "exit:4:0:5", "exit:5:0:5", "exit:6:0:5"});
  for (const auto& running : nodes) {
    const Result result = running->wait(kTimeout);
    EXPECT_EQ(result.code, 5) << result.err;
  }
}

TEST_F(ElasticNodes, WithoutTheNodeThatCoordinatesTheJobEnds) {
  const auto nodes = job("1:2", 1, {"steps=100000"});
  ASSERT_TRUE(begins(*nodes[0], 2, 2));
  nodes[0]->signal(SIGKILL);
  const Result result = nodes[1]->wait(kTimeout);
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the connection to the node of --rdzv-endpoint localhost:" +
                                    port_ + " is lost; this node's ranks have ended"));
  EXPECT_THAT(wait_until_gone(marker_), IsEmpty());
}

TEST_F(ElasticNodes, AnotherJobIsNotJoined) {
  const auto nodes = job("1:2", 0, {until_gate()});
  const Result other = node("1:2", {}, {"--rdzv-id", "other", "--start-timeout", "1"})->wait();
  EXPECT_EQ(other.code, 69);
  EXPECT_THAT(other.err,
              HasSubstr("this node has not joined the job within 1 s (--start-timeout)"));
  gate_.open();
  const Result result = nodes[0]->wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, " pid "), 1);
}

TEST_F(ElasticNodes, MaxRestartsCountsWorkersThatFailAndNoNodesThatLeave) {
  const auto limited = [this](const Words& program) {
    return node("1:2", program, {"--max-restarts", "1"});
  };
  const auto first = limited({until_gate(), "kill:1:20"});
  ASSERT_TRUE(first->wait_for(" pid ", 1, kTimeout));
  for (int i = 0; i < 3; ++i) {
    const auto second = limited({until_gate()});
    ASSERT_TRUE(first->wait_for("joins the job with 1 slot\n", i + 1, kTimeout));
    ::usleep(300'000);
    second->signal(SIGKILL);
  }
  gate_.open();
  const Result result = first->wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.out << result.err;
}

TEST_F(ElasticNodes, WorkersHaveTheVariablesOfTorchelastic) {
  Start start;
  start.arguments = {"--nnodes",
                     "1:2",
                     "--rdzv-backend",
                     "c10d",
                     "--rdzv-endpoint",
                     "localhost:" + port_,
                     "--rdzv-id",
                     "train7",
                     "--max-restarts",
                     "3",
                     "sh",
                     "-c",
                     "echo $TORCHELASTIC_RUN_ID $TORCHELASTIC_MAX_RESTARTS "
                     "$ROLE_NAME none=$RANK$WORLD_SIZE$MASTER_PORT=; exec \"$@\"",
                     "sh",
                     kWorker,
                     "load"};
  const Result result = HvdrunProcess(start).wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[w1] train7 3 default none==\n"));
}

TEST_F(ElasticNodes, EachStartOfALineIsAJobWithAnIdOfItsOwn) {
  const auto ids = [this] {
    const auto start = [this] {
      Start start;
      start.arguments = {"--nnodes",
                         "2:3",
                         "--rdzv-backend",
                         "c10d",
                         "--rdzv-endpoint",
                         "localhost:" + port_,
                         "-x",
                         "HVD_JOB_NAME=mine",
                         "sh",
                         "-c",
                         "echo $HVD_JOB_NAME id=${HVD_JOB_ID}=; exec \"$@\"",
                         "sh",
                         kWorker,
                         "load"};
      return std::make_unique<HvdrunProcess>(start);
    };
    const auto a = start(), b = start();
    const Result first = a->wait(kTimeout), second = b->wait(kTimeout);
    EXPECT_EQ(first.code, 0) << first.err;
    EXPECT_EQ(second.code, 0) << second.err;
    std::set<std::string> ids;
    for (const std::string& line : lines_of(first.out + second.out)) {
      const std::size_t id = line.find(" mine id=");
      if (id != line.npos) ids.insert(line.substr(id));
    }
    return ids;
  };
  const std::set<std::string> one = ids(), other = ids();
  EXPECT_THAT(one, SizeIs(1)) << "all workers have the same";
  EXPECT_THAT(other, SizeIs(1));
  EXPECT_NE(one, other);
  EXPECT_EQ(one.count(" mine id=="), 0U);
}

TEST_F(ElasticNodes, BadInputIsRefusedWithOneLine) {
  const Words c10d = {"--nnodes", "1:2", "--rdzv-backend", "c10d"};
  const auto with = [&c10d](Words more) {
    more.insert(more.begin(), c10d.begin(), c10d.end());
    return more;
  };
  expect_refused(
      {{{"--nnodes", "1:2"}, "--nnodes 1:2 is an elastic job: expected --rdzv-backend c10d and "},
       {{"--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1"},
        "--rdzv-backend: expected static or c10d, got 'etcd'; with c10d the node of "
        "--rdzv-endpoint HOST:PORT serves, and no other server is needed"},
       {{"--nnodes", "3:2", "--rdzv-backend", "c10d"},
        "--nnodes: expected a whole number from 3 to"},
       {{"--nnodes", "1:x", "--rdzv-backend", "c10d"},
        "--nnodes: expected a whole number from 1 to"},
       {c10d, "--rdzv-backend c10d: expected --rdzv-endpoint HOST:PORT"},
       {with({"--rdzv-endpoint", "h:1", "--node-rank", "1"}), "remove --node-rank"},
       {with({"--rdzv-endpoint", "h:1", "--standalone"}), "remove --standalone"},
       {with({"--rdzv-endpoint", "h:1", "--min-np", "1"}), "remove --min-np"},
       {with({"--rdzv-endpoint", "h:1", "--log-dir", "x"}), "use --output-filename"}});
}

}  // namespace
}  // namespace hvd::launcher::test
