// Elastic jobs: hvdrun --min-np, --max-np, --spares and --reset-limit, with workers that have no
// data plane (programs/worker_program.cpp).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Words = std::vector<std::string>;

constexpr const char* kWorker = HVD_TEST_WORKER_PROGRAM;
constexpr double kTimeout = 60;

/// A job whose deadlines are a tenth of the default ones.
Start elastic(const Words& options, const Words& program, const char* peer_timeout = "3") {
  Start start;
  start.arguments = options;
  start.arguments.insert(start.arguments.end(), program.begin(), program.end());
  start.environment = {{"HVD_PEER_TIMEOUT", peer_timeout}};
  return start;
}

Words workers(Words arguments) {
  arguments.insert(arguments.begin(), kWorker);
  return arguments;
}

Result run_elastic(const Words& options, const Words& program, const char* peer_timeout = "3") {
  return HvdrunProcess(elastic(options, program, peer_timeout)).wait(kTimeout);
}

Words on_hosts(const std::string& hosts, const Words& options) {
  Words words = {"-H", hosts, "--rsh", HVD_TEST_PRETENDED_AGENT};
  words.insert(words.end(), options.begin(), options.end());
  return words;
}

class Elastic : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!finds_ucx()) GTEST_SKIP() << "needs UCX";
  }
  /// An argument of workers that do not end before the gate is open.
  std::string until_gate() const { return "until=" + gate_.path(); }
  /// Lets the workers end when all texts have appeared in hvdrun's output.
  Result end_after(HvdrunProcess& process, const Words& texts) const {
    for (const std::string& text : texts) EXPECT_TRUE(process.wait_for(text, 1, kTimeout)) << text;
    gate_.open();
    return process.wait(kTimeout);
  }

  const Gate gate_{};
};

TEST_F(Elastic, AnUndisturbedJobEndsWithoutAWord) {
  const Result result = run_elastic({"-np", "3", "--min-np", "2"}, workers({"load"}));
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(count(result.out, " runs generation 1\n"), 3) << result.out;
  EXPECT_EQ(count(result.out, " ends at commit 20\n"), 3) << result.out;
}

TEST_F(Elastic, ALostWorkerIsReplacedAndTheOthersStay) {
  const Gate replacement{};
  HvdrunProcess process(
      elastic({"-np", "3", "--min-np", "2"},
              {"sh", "-c",
               "[ $HVD_WORKER_ID -le 3 ] || until [ -e \"$0\" ]; do sleep 0.05; done; exec \"$@\"",
               replacement.path(), kWorker, "load", until_gate(), "kill:2:5"}));
  EXPECT_TRUE(process.wait_for("of 2 generation 2 commit ", 2, kTimeout));
  replacement.open();
  const Result result = end_after(process, {"[w4] rank 2 of 3 generation 3"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "of 2 generation 2 commit "), 2) << result.out;
  EXPECT_THAT(result.out, HasSubstr("[w4] worker 4 pid "));
  EXPECT_THAT(result.out, HasSubstr("[w4] rank 2 of 3 generation 3 commit "));
  EXPECT_EQ(count(result.out, " ends at commit "), 3) << result.out;
  EXPECT_EQ(count(result.out, " pid "), 4) << "no healthy worker is started anew";
  EXPECT_THAT(lines_of(result.err), SizeIs(2)) << result.err;
  EXPECT_THAT(result.err, HasSubstr("was lost in generation 1: killed by signal 9 (SIGKILL); "
                                    "worker 4 was started in its place\n"));
}

TEST_F(Elastic, EveryKindOfEndIsALoss) {
  const std::vector<std::pair<Words, std::string>> ends = {
      {{"exit:2:5:3"}, "exit code 3"},
      {{"exit:2:5:0"}, "exit code 0 before the end of the job"},
      {{"segv:2:5"}, "killed by signal 11 (SIGSEGV)"},
      {{"garbage:2:5"}, "it has sent an invalid message: "},
      {{"stop:2:5", "accuse:1:20:2"}, "worker 1 reports: a test accuses it"},
      {{"hang:2:5", "accuse:1:20:2"}, "worker 1 reports: a test accuses it"}};
  for (const auto& [faults, cause] : ends) {
    const Gate gate{};
    Words program = workers({"load", "until=" + gate.path()});
    program.insert(program.end(), faults.begin(), faults.end());
    HvdrunProcess process(elastic({"-np", "2", "--min-np", "1"}, program));
    EXPECT_TRUE(process.wait_for("[w3] worker 3 pid ", 1, kTimeout)) << cause;
    gate.open();
    const Result result = process.wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("was lost in generation 1: " + cause));
    EXPECT_THAT(result.out, HasSubstr("[w1] worker 1 ends at commit "));
  }
}

TEST_F(Elastic, AWorkerThatDoesNotJoinIsReplaced) {
  const Result result = run_elastic({"-np", "2", "--min-np", "2", "--start-timeout", "1"},
                                    workers({"load", "hang:2"}), "0.9");
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("was lost before it was a rank: it has not joined within"));
  EXPECT_THAT(result.out, HasSubstr("[w3] worker 3 ends at commit 20\n"));
}

TEST_F(Elastic, ASpareTakesThePlaceOfALostRankAtOnce) {
  HvdrunProcess process(
      elastic({"-np", "2", "--min-np", "2", "--spares", "1"}, workers({"load", until_gate()})));
  ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
  ASSERT_TRUE(process.wait_for(" pid ", 3, kTimeout));
  // It waits until the other spare has answered pings, as no output shows that it has joined.
  ::usleep(500'000);
  const std::string before = process.out();
  const int spare = before.find("[w3] rank") != std::string::npos
                        ? (before.find("[w1] rank") != std::string::npos ? 2 : 1)
                        : 3;
  const int victim = spare == 1 ? 2 : 1;
  ::kill(pid_of_worker(victim, before), SIGKILL);
  const Result result = end_after(process, {"[w4] worker 4 pid "});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[w" + std::to_string(spare) + "] runs generation 2\n"));
  EXPECT_EQ(count(result.out, "of 2 generation 2 "), 2) << "at full size at once";
  EXPECT_THAT(result.err, HasSubstr("; worker 4 was started in its place"));
}

TEST_F(Elastic, AJobGrowsToItsLargestSize) {
  HvdrunProcess process(elastic({"-np", "1", "--max-np", "3"}, workers({"load", until_gate()})));
  EXPECT_TRUE(process.wait_for("of 3 generation ", 3, kTimeout));
  const Result result = end_after(process, {});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "of 1 generation 1 commit 0\n"), 1) << result.out;
  EXPECT_EQ(count(result.out, "of 3 generation "), 3) << result.out;
  EXPECT_EQ(result.err, "");
}

TEST_F(Elastic, LimitsEndTheJobWith76) {
  const Result resets = run_elastic({"-np", "2", "--min-np", "1", "--reset-limit", "0"},
                                    workers({"load", "steps=500", "kill:2:5"}));
  EXPECT_EQ(resets.code, 76) << resets.err;
  EXPECT_THAT(resets.err, HasSubstr("its ranks have changed 0 times (--reset-limit)"));
  const Result restarts = run_elastic({"-np", "2", "--min-np", "2", "--max-restarts", "1"},
                                      workers({"load", "steps=500", "kill:2:5", "kill:3:20"}));
  EXPECT_EQ(restarts.code, 76) << restarts.err;
  EXPECT_THAT(restarts.err, HasSubstr("1 workers were replaced (--max-restarts), and fewer than 2 "
                                      "are left (--min-np)"));
  EXPECT_THAT(restarts.err, HasSubstr("worker 3 on"));
}

TEST_F(Elastic, AWorkerThatFailsBeforeTheFirstGenerationIsNotTheJobsFailure) {
  const Result result =
      run_elastic({"-np", "2", "--min-np", "2"}, workers({"load", "exit:1:0:5", "kill:2"}));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("was lost before it was a rank: exit code 5"));
}

TEST_F(Elastic, AProgramThatThrowsAgainAtTheSameCommitEndsWith76) {
  const Words limit = {"-np", "2", "--min-np", "1", "--failure-limit", "3"};
  const Result again = run_elastic(limit, workers({"load", "steps=500", "throw:0:5"}));
  EXPECT_EQ(again.code, 76) << again.err;
  EXPECT_THAT(again.err,
              HasSubstr("its program has thrown an exception 3 times in a row at the same "
                        "or an earlier commit (--failure-limit), the last time on rank "));
  EXPECT_THAT(again.err, HasSubstr("at commit 4: a test throws\n"));
  const Result once = run_elastic(
      {"-np", "2", "--min-np", "2", "--failure-limit", "3"},
      workers({"load", "steps=80", "throw:1:5", "throw:2:25", "throw:3:45", "throw:4:65"}));
  EXPECT_EQ(once.code, 0) << once.err;
  EXPECT_EQ(count(once.err, " was lost in generation "), 4) << once.err;
}

TEST_F(Elastic, AJobWithTooFewRanksEndsWith75) {
  const Result few = run_elastic(
      {"-np", "2", "--min-np", "2", "--start-timeout", "1", "--elastic-timeout", "1"},
      {"sh", "-c", "[ $HVD_WORKER_ID -gt 2 ] && echo no luck >&2 && exit 3; exec \"$@\"", "sh",
       kWorker, "load", "steps=500", "kill:2:5"},
      "0.9");
  EXPECT_EQ(few.code, 75) << few.err;
  EXPECT_THAT(few.err, HasSubstr("it had fewer than 2 ranks (--min-np) for "));
  EXPECT_THAT(few.err, HasSubstr("'s stderr:\n  no luck\n"));
  const Result stateless = run_elastic({"-np", "1", "--min-np", "1"}, workers({"kill:1:5"}));
  EXPECT_EQ(stateless.code, 75) << stateless.err;
  EXPECT_THAT(stateless.err, HasSubstr("no rank that had the state is left"));
}

TEST_F(Elastic, AJobThatNeverBeginsEndsWithTheProgramsCode) {
  const Result failing =
      run_elastic({"-np", "2", "--min-np", "1"}, {"sh", "-c", "echo broken >&2; exit 5"});
  EXPECT_EQ(failing.code, 5) << failing.err;
  EXPECT_THAT(failing.err, HasSubstr("the job has not begun: 3 workers have failed"));
  EXPECT_THAT(failing.err, HasSubstr("\n  broken\n"));
  EXPECT_EQ(run_elastic({"-np", "1", "--min-np", "1"}, {"./no-such-program"}).code, 127);
}

TEST_F(Elastic, AFailureAfterTheEndIsTheProgramsOwn) {
  const Result failed =
      run_elastic({"-np", "2", "--min-np", "1"}, workers({"load", "exit:2:end:6"}));
  EXPECT_EQ(failed.code, 6) << failed.err;
  EXPECT_THAT(failed.err, HasSubstr("failed after the end of the elastic part: exit code 6"));
  const Result killed = run_elastic({"-np", "2", "--min-np", "1"}, workers({"load", "kill:2:end"}));
  EXPECT_EQ(killed.code, 0) << killed.err;
}

TEST_F(Elastic, AnotherProgramIsRefusedAndNotTriedAgainOnItsHost) {
  HvdrunProcess process(
      elastic(on_hosts("localhost:1,b:1", {"-np", "1", "--max-np", "2"}),
              {"sh", "-c", "[ $GROUP_RANK = 1 ] && set -- \"$@\" program=other; exec \"$@\"", "sh",
               kWorker, "load", until_gate()}));
  ASSERT_TRUE(process.wait_for("the job's program is 'p', this one is 'other'", 1, kTimeout));
  ::usleep(500'000);  // another attempt would follow at once
  const Result result = end_after(process, {});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, " pid "), 2) << result.out;
}

TEST_F(Elastic, SignalsEndTheJobAsEver) {
  const std::vector<std::pair<int, int>> signals = {{SIGTERM, 143}, {SIGINT, 130}};
  for (const auto& [signal, code] : signals) {
    const std::string marker = unique_marker();
    HvdrunProcess process(elastic({"-np", "2", "--min-np", "1"},
                                  workers({"load", "steps=100000", "program=" + marker})));
    ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
    process.signal(signal);
    const Result result = process.wait(kTimeout);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_EQ(count(result.out, " pid "), 2) << "nothing is restarted";
    EXPECT_THAT(wait_until_gone(marker), IsEmpty());
  }
  const Result late = run_elastic({"-np", "1", "--min-np", "1", "--timeout", "1"},
                                  workers({"load", "steps=100000"}));
  EXPECT_EQ(late.code, 124) << late.err;
}

TEST_F(Elastic, NothingOutlivesHvdrun) {
  const std::string marker = unique_marker();
  HvdrunProcess process(elastic(on_hosts("localhost:1,b:1", {"-np", "2", "--min-np", "1"}),
                                workers({"load", "steps=100000", "program=" + marker})));
  ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
  process.signal(SIGKILL);
  process.wait(kTimeout);
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

TEST_F(Elastic, AKilledAgentIsStartedAgain) {
  HvdrunProcess process(elastic({"-np", "2", "--min-np", "1"}, workers({"load", "steps=100"})));
  ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
  const std::vector<pid_t> agents = agents_of(process.pid());
  ASSERT_THAT(agents, SizeIs(1));
  ::kill(agents.front(), SIGKILL);
  const Result result = process.wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, " ends at commit 100\n"), 2) << result.out;
  EXPECT_THAT(result.err, HasSubstr("is lost\n"));
}

TEST_F(Elastic, TheOtherHostsGoOnWithoutALostOne) {
  HvdrunProcess process(elastic(on_hosts("localhost:1,b:1", {"-np", "2", "--min-np", "1"}),
                                workers({"load", until_gate()})));
  ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
  const pid_t agent = agent_of_host(1, process);
  ASSERT_GT(agent, 0);
  ::kill(agent, SIGKILL);
  const Result result = end_after(process, {"of 1 generation 2 commit ", "[w3] runs generation "});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(count(result.out, "of 1 generation 2 commit "), 1) << result.out;
  EXPECT_EQ(count(result.out, " ends at commit "), 2) << result.out;
  EXPECT_EQ(count(result.out, " pid "), 3) << result.out;
}

TEST_F(Elastic, AStoppedAgentIsALostHost) {
  const std::string marker = unique_marker();
  HvdrunProcess process(elastic(on_hosts("localhost:1,b:1", {"-np", "2", "--min-np", "1"}),
                                workers({"load", until_gate(), "program=" + marker})));
  ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
  const pid_t agent = agent_of_host(1, process);
  ASSERT_GT(agent, 0);
  ::kill(agent, SIGSTOP);
  EXPECT_TRUE(process.wait_for("of 1 generation 2", 1, kTimeout));
  ::kill(agent, SIGCONT);
  const Result result = end_after(process, {});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("has not responded for 1.0 s"));
  EXPECT_THAT(wait_until_gone(marker), IsEmpty()) << "the agent's lease has expired";
}

TEST_F(Elastic, AHostWhoseAgentIsAskedToEndLeavesInOrder) {
  HvdrunProcess process(elastic(on_hosts("localhost:1,b:1", {"-np", "2", "--min-np", "1"}),
                                workers({"load", until_gate()})));
  ASSERT_TRUE(process.wait_for("runs generation 1", 2, kTimeout));
  const pid_t agent = agent_of_host(1, process);
  ASSERT_GT(agent, 0);
  ::kill(agent, SIGTERM);
  const Result result = end_after(process, {"of 1 generation 2 commit "});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_EQ(result.err, "hvdrun: host b leaves the job: its agent was asked to end\n");
  EXPECT_EQ(count(result.out, "of 1 generation 2 commit "), 1) << result.out;
  EXPECT_EQ(count(result.out, " pid "), 2) << result.out;
}

TEST_F(Elastic, AHostThatIsOutOfReachAtFirstEndsTheJob) {
  const Result result = run_elastic(on_hosts("localhost:1,dead1:1", {"-np", "2", "--min-np", "1"}),
                                    workers({"load"}));
  EXPECT_EQ(result.code, 69) << result.err;
  EXPECT_THAT(result.err, HasSubstr("without host dead1 there are fewer slots than -np 2"));
  const Result enough = run_elastic(on_hosts("localhost:2,dead1:1", {"-np", "2", "--min-np", "1"}),
                                    workers({"load"}));
  EXPECT_EQ(enough.code, 0) << enough.err;
}

TEST_F(Elastic, AWorkerHasNoRankAndTheVariablesOfTorchelastic) {
  const Result result = run_elastic(
      {"-np", "1", "--min-np", "1"},
      {"sh", "-c",
       "echo id=$HVD_WORKER_ID slot=$LOCAL_RANK run=$TORCHELASTIC_RUN_ID "
       "of=$TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS "
       "none=$RANK$WORLD_SIZE$HVD_RANK$HVD_SIZE$HVD_INIT_METHOD$HVD_LAUNCHER_TOKEN$MASTER_PORT= "
       "token=${#HVD_JOB_TOKEN}; exec \"$@\"",
       "sh", kWorker, "load"});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[w1] id=1 slot=0 run=none of=0/2147483647 none== token=64\n"));
}

TEST_F(Elastic, VerbosePrintsTheDeadlines) {
  const Result result = run_elastic({"-np", "1", "--min-np", "1", "-v"}, workers({"load"}));
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("hvdrun:   heartbeat: 1.0 s (silence after which hvdrun and an "
                                    "agent count each other as lost)\n"));
  const Result raised =
      run_elastic({"-np", "1", "--min-np", "1", "--elastic-timeout", "0.5"}, workers({"load"}));
  EXPECT_THAT(raised.err, HasSubstr("the deadline 'elastic' was changed from 0.5 s to "));
}

TEST_F(Elastic, BadInputIsRefusedWithOneLine) {
  const std::vector<std::pair<Words, std::string>> inputs = {
      {{"-np", "4", "--min-np", "5", "--max-np", "4"}, "--min-np 5 is above --max-np 4"},
      {{"-np", "2", "--min-np", "3"}, "-np 2, the ranks to start with, is below --min-np 3"},
      {{"-np", "5", "--max-np", "4"}, "-np 5, the ranks to start with, is above --max-np 4"},
      {{"-np", "2", "--min-np", "0"}, "--min-np: expected a number, at least 1, got '0'"},
      {{"-np", "2", "--spares", "x"}, "--spares: expected a number, at least 0, got 'x'"},
      {{"-np", "2", "--min-np", "1", "--mpi-args", "-x"}, "remove --mpi-args"},
      {{"-np", "2", "--min-np", "1", "--controller", "mpi"}, "remove --controller mpi"},
      {{"--nproc-per-node", "2", "--min-np", "1"}, "start an elastic job with -np N"},
      {{"-np", "2", "--heartbeat", "3"}, "--heartbeat is for elastic jobs; add --min-np N"},
      {{"-np", "2", "--elastic-timeout", "3"}, "--elastic-timeout is for elastic jobs"},
      {{"-np", "2", "--min-np", "1", "--heartbeat", "0"}, "expected a number of seconds above 0"},
      {{"-np", "2", "--min-np", "1", "--log-dir", "x"}, "use --output-filename"}};
  for (const auto& [options, message] : inputs) {
    const Result result = run_elastic(options, {"true"});
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_THAT(result.err, HasSubstr(message));
    EXPECT_EQ(count(result.err, "\n"), 1) << result.err;
  }
  const Result slots = run_elastic(on_hosts("a:2", {"-np", "2", "--spares", "1"}), {"true"});
  EXPECT_EQ(slots.code, 69);
  EXPECT_THAT(slots.err, HasSubstr("-np 2 and --spares 1 need 3, got 2 (a:2)"));
}

}  // namespace
}  // namespace hvd::launcher::test
