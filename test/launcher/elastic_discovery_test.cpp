// Elastic jobs whose hosts a script names: hvdrun --host-discovery-script. The hosts are pretended,
// and the workers have no data plane (programs/worker_program.cpp).
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "worker_job.h"

namespace hvd::launcher::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class ElasticDiscovery : public WorkerJob {
 protected:
  /// The lines that the script prints from now on.
  void list(const std::string& hosts) const {
    const std::string next = folder_.path() / "next";
    std::ofstream(next) << hosts;
    std::filesystem::rename(next, folder_.path() / "hosts");
  }
  /// A job whose deadlines are a tenth of the default ones.
  Start job(Words options, const Words& program) const {
    Start start;
    start.arguments = {"--host-discovery-script", "cat " + (folder_.path() / "hosts").string(),
                       "--rsh", HVD_TEST_PRETENDED_AGENT};
    for (const Words& words : {options, Words{kWorker, "load"}, program})
      start.arguments.insert(start.arguments.end(), words.begin(), words.end());
    start.environment = {{"HVD_PEER_TIMEOUT", "3"}};
    return start;
  }
  /// Expects that the job ends when it may, that no worker was lost, and that all ends.
  Result expect_end(HvdrunProcess& hvdrun) const {
    gate_.open();
    const Result result = hvdrun.wait(kTimeout);
    EXPECT_EQ(result.code, 0) << result.out << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("lost"))) << result.out;
    EXPECT_THAT(wait_until_gone(marker_), IsEmpty());
    return result;
  }

  const TemporaryFolder folder_;
};

TEST_F(ElasticDiscovery, HostsThatAppearAreUsedAndHostsThatVanishLeaveInOrder) {
  list("a:1\n");
  HvdrunProcess hvdrun(job({"-np", "1", "--max-np", "3"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 1, 1));
  list("a:1\nb:1\n");
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  list("a:1\nb:1\nc:4\n");
  ASSERT_TRUE(begins(hvdrun, 3, 3));
  EXPECT_TRUE(hvdrun.wait_for("host c joins the job with 4 slots\n", 1, kTimeout));
  list("c:4\n");
  EXPECT_TRUE(hvdrun.wait_for("host a leaves the job: the script has removed it\n", 1, kTimeout));
  // Slots of c take the places of those that leave, so at the end there are three ranks again.
  for (const char* const line :
       {"[w4] runs", "[w5] runs", "[w1] worker 1 ends", "[w2] worker 2 ends"})
    EXPECT_TRUE(hvdrun.wait_for(line, 1, kTimeout)) << line;
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.err, HasSubstr("host b leaves the job"));
  EXPECT_EQ(count(result.out, " ends at commit "), 5) << result.out;
  EXPECT_EQ(count(result.out, " pid "), 5) << result.out;
}

TEST_F(ElasticDiscovery, AHostThatIsTheOnlyOneStaysUntilAnotherOneReplacesIt) {
  list("a:2\n");
  HvdrunProcess hvdrun(job({"-np", "2"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  list("");
  ASSERT_TRUE(hvdrun.wait_for("host a leaves", 1, kTimeout));
  ::usleep(500'000);
  EXPECT_EQ(count(hvdrun.out(), " runs generation "), 2) << hvdrun.out();
  list("b:2\n");
  for (const char* const line :
       {"[w3] runs", "[w4] runs", "[w1] worker 1 ends", "[w2] worker 2 ends"})
    EXPECT_TRUE(hvdrun.wait_for(line, 1, kTimeout)) << line;
  EXPECT_EQ(count(hvdrun.out(), " ends at commit "), 2) << hvdrun.out();
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.out, HasSubstr("[w3] worker 3 ends at commit "));
  EXPECT_THAT(result.out, HasSubstr("[w4] worker 4 ends at commit "));
}

TEST_F(ElasticDiscovery, AHostThatReturnsIsUsedAgain) {
  list("a:1\nb:1\n");
  HvdrunProcess hvdrun(job({"-np", "2", "--min-np", "1"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  list("a:1\n");
  ASSERT_TRUE(begins(hvdrun, 1, 1));
  list("a:1\nb:1\n");
  ASSERT_TRUE(begins(hvdrun, 2, 4));
  list("b:1\n");
  ASSERT_TRUE(begins(hvdrun, 1, 2));
  EXPECT_EQ(count(hvdrun.out(), "[w3] worker 3 ends"), 0) << hvdrun.out();
  EXPECT_THAT(expect_end(hvdrun).out, HasSubstr("[w3] worker 3 ends at commit "));
}

TEST_F(ElasticDiscovery, AHostThatReturnsBeforeItsAgentHasEndedIsUsedAfterIt) {
  list("a:1\nb:1\n");
  HvdrunProcess hvdrun(
      job({"--min-np", "2", "--max-np", "3"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  const pid_t agent = agent_of_host(0, hvdrun);
  ASSERT_GT(agent, 0);
  ::kill(agent, SIGTERM);  // it waits for another worker, because two are the fewest
  ASSERT_TRUE(hvdrun.wait_for("host a leaves the job: its agent was asked to end\n", 1, kTimeout));
  list("b:1\n");
  ASSERT_TRUE(hvdrun.wait_for("the script has removed it\n", 1, kTimeout));
  list("a:2\nb:1\n");
  ASSERT_TRUE(hvdrun.wait_for("host a joins the job with 2 slots\n", 1, kTimeout));
  ::usleep(300'000);
  list("a:2\nb:1\nc:1\n");
  ASSERT_TRUE(begins(hvdrun, 3, 3));
  for (const char* const line : {"[w4] runs", "[w1] worker 1 ends"})
    EXPECT_TRUE(hvdrun.wait_for(line, 1, kTimeout)) << line;
  const Result result = expect_end(hvdrun);
  EXPECT_EQ(count(result.out, " pid "), 4) << result.out;
  EXPECT_EQ(count(result.out, " ends at commit "), 4) << result.out;
}

TEST_F(ElasticDiscovery, TheNumberOfSlotsOfAHostMayChange) {
  list("localhost:1\n");
  HvdrunProcess hvdrun(
      job({"--min-np", "1", "--max-np", "3"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 1, 1));
  list("localhost:3\n");
  ASSERT_TRUE(begins(hvdrun, 3, 3));
  list("localhost:2\n");
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(lines_of(result.err), SizeIs(2)) << result.err;
  EXPECT_THAT(result.err, HasSubstr("has now 3 slots\n"));
  EXPECT_EQ(count(result.out, " ends at commit "), 3) << result.out;
}

TEST_F(ElasticDiscovery, SlotsForWhichAHostHasNoDescriptorsAreRefused) {
  list("few:1\n");
  HvdrunProcess hvdrun(
      job({"--min-np", "1", "--max-np", "9"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 1, 1));
  list("few:9\n");
  ASSERT_TRUE(
      hvdrun.wait_for("for its 9 slots, got a limit of 64; raise it (ulimit -Hn); the "
                      "host keeps its 1\n",
                      1, kTimeout));
  list("few:1\nb:1\n");
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  const Result result = expect_end(hvdrun);
  EXPECT_EQ(count(result.out, " pid "), 2) << result.out;
  EXPECT_EQ(count(result.out, " ends at commit "), 2) << result.out;
}

TEST_F(ElasticDiscovery, TheJobBeginsWhenThereAreEnoughSlots) {
  list("");
  HvdrunProcess hvdrun(job({"-np", "2", "--slots", "2"}, {"program=" + marker_}));
  EXPECT_FALSE(hvdrun.wait_for("generation", 1, 1.5));
  list("a\n");
  EXPECT_EQ(count(expect_end(hvdrun).out, " ends at commit 20\n"), 2);
}

TEST_F(ElasticDiscovery, AFailureIsPrintedOnceAndTheLastAnswerStands) {
  list("a:1\nb:1\n");
  HvdrunProcess hvdrun(job({"-np", "2", "--min-np", "1"}, {until_gate(), "program=" + marker_}));
  ASSERT_TRUE(begins(hvdrun, 2, 2));
  std::filesystem::remove(folder_.path() / "hosts");
  ASSERT_TRUE(
      hvdrun.wait_for("; hvdrun keeps the hosts of the script's last valid output\n", 1, kTimeout));
  ::usleep(2'300'000);
  list("a:1\nb:none\n");
  ASSERT_TRUE(hvdrun.wait_for("line 2 of its output: expected HOST", 1, kTimeout));
  const Result result = expect_end(hvdrun);
  EXPECT_EQ(count(result.out, " runs generation "), 2) << result.out;
  EXPECT_THAT(lines_of(result.err), SizeIs(2)) << result.err;
  EXPECT_THAT(result.err, HasSubstr("--host-discovery-script: it has ended with code 1: cat: "));
}

TEST_F(ElasticDiscovery, AHostThatIsOutOfReachDoesNotKeepTheOthersFromTheJob) {
  list("dead1:1\na:2\n");
  HvdrunProcess hvdrun(job({"-np", "2", "--min-np", "2"}, {"program=" + marker_}));
  const Result result = expect_end(hvdrun);
  EXPECT_THAT(result.err, HasSubstr("to dead1 has ended with code 255"));
}

TEST_F(ElasticDiscovery, BadInputIsRefusedWithOneLine) {
  expect_refused(
      {{{"-np", "2", "--host-discovery-script", "./none.sh"},
        "--host-discovery-script ./none.sh: expected lines HOST or HOST:SLOTS, but it cannot be "
        "run: No such file or directory"},
       {{"-np", "2", "--host-discovery-script", "sh -c 'echo no access >&2; exit 3'"},
        "but it has ended with code 3: no access"},
       {{"-np", "2", "--host-discovery-script", "echo 'a:2 b:2'"},
        "but line 1 of its output: expected HOST or HOST:SLOTS"},
       {{"-np", "2", "--host-discovery-script", "echo a:2", "-H", "a:2"},
        "--host (command line) and --host-discovery-script both name the hosts"},
       {{"-np", "2", "--host-discovery-script", "echo a:2", "--hostfile", "/dev/null"},
        "expected at least one line"},
       {{"-np", "2", "--host-discovery-script", "echo a:2", "--slots", "0"},
        "--slots: expected a number, at least 1, got '0'"},
       {{"-np", "2", "--slots", "2"}, "--slots is for elastic jobs"},
       {{"-np", "2", "--min-np", "1", "--slots", "2"}, "--slots is for --host-discovery-script"},
       {{"-np", "2", "--blacklist-cooldown-range", "1", "2"},
        "--blacklist-cooldown-range is for elastic jobs"},
       {{"-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "5", "2"},
        "the first not above the second, as in 10 3600; got '5 2'"}});
}

TEST_F(ElasticDiscovery, AHostThatFailsIsLeftOutForTheCooldown) {
  list("a:1\nb:1\n");
  HvdrunProcess hvdrun(job({"-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2"},
                           {until_gate(), "kill:2:1", "kill:3:0", "kill:4:0"}));
  EXPECT_TRUE(hvdrun.wait_for("host b is left out for 1.0 s, because its workers", 1, kTimeout));
  gate_.open();
  const Result result = hvdrun.wait(kTimeout);
  EXPECT_EQ(result.code, 0) << result.err;
}

}  // namespace
}  // namespace hvd::launcher::test
