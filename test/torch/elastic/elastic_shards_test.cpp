// ShardedOptimizer and LocalSgd in elastic jobs under hvdrun (elastic_shards_program.cpp): ranks
// are killed, and the committed steps are compared with those of a run without kills.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "hvdrun_process.h"

namespace hvd::launcher::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using Words = std::vector<std::string>;

constexpr double kTimeout = 100;
const Words kFour = {"-np", "4", "--min-np", "4"};

/// @param hosts of the ranks, as HVD_TEST_HOSTS takes them; empty: this one
Result run_job(Words options, const Words& program, const Words& more = {},
               const std::string& hosts = "") {
  Start start;
  options.insert(options.end(), {"--bind", "none", HVD_TEST_SHARDS_PROGRAM});
  options.insert(options.end(), program.begin(), program.end());
  options.insert(options.end(), more.begin(), more.end());
  start.arguments = options;
  start.environment = {{"HVD_PEER_TIMEOUT", "6"}, {"OMP_NUM_THREADS", "1"}};
  if (!hosts.empty()) start.environment.emplace_back("HVD_TEST_HOSTS", hosts);
  return HvdrunProcess(start).wait(kTimeout);
}

/// The lines that the ranks have printed.
struct Printed {
  std::map<int, std::set<std::string>> steps;  ///< loss and checksum of each
  std::set<std::string> ends;
  std::vector<int> sizes;  ///< at each entry of each rank
  std::vector<int> loads;
};

Printed read(const std::string& out) {
  Printed printed;
  for (std::string line : lines_of(out)) {
    if (line.starts_with('[')) line = line.substr(line.find(']') + 1);
    std::istringstream words(line);
    std::string kind, value, checksum;
    int step = 0;
    words >> kind >> step >> value >> checksum;
    if (kind == "step") printed.steps[step].insert(value + ' ' + checksum);
    if (kind == "end") printed.ends.insert(std::to_string(step) + ' ' + value);
    if (kind == "ranks") printed.sizes.push_back(std::stoi(value));
    if (kind == "load") printed.loads.push_back(step);
  }
  return printed;
}

bool is_long() { return std::getenv("HVD_TEST_LONG") != nullptr; }

/// @param who the number of a worker, or "rankN" for a rank of the first generation
std::string kill_of(const std::string& who, int step, unsigned microseconds) {
  return "kill=" + who + "," + std::to_string(step) + "," + std::to_string(microseconds);
}

/// Kills of one worker after the other, each replaced by the next one, at seeded moments.
Words kills_of(unsigned seed, int count, int every, int steps_between) {
  std::mt19937 random(seed);
  std::vector<int> workers = {1, 2, 3, 4};
  Words kills;
  for (int i = 0; i < count; ++i) {
    const std::size_t victim = random() % workers.size();
    kills.push_back(kill_of(std::to_string(workers[victim]), every * steps_between * (i + 1),
                            1 + random() % 8000));
    workers[victim] = 5 + i;
  }
  return kills;
}

void expect_equal(const Result& disturbed, const Result& undisturbed) {
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  ASSERT_EQ(disturbed.code, 0) << disturbed.err << disturbed.out;
  const Printed a = read(disturbed.out), b = read(undisturbed.out);
  ASSERT_GT(b.steps.size(), 5U) << undisturbed.out;
  for (const auto& [step, values] : b.steps) EXPECT_THAT(values, SizeIs(1)) << step;
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_THAT(a.ends, SizeIs(1));
  EXPECT_EQ(a.ends, b.ends);
}

/// Runs the program with kills and without. @param every steps between commits
void expect_kills_change_nothing(Words program, int every, unsigned seed) {
  const int kills = is_long() ? 20 : 4;
  program.insert(program.end(), {"sleep=2", "steps=" + std::to_string(every * 8 * (kills + 2))});
  const Words chosen = kills_of(seed, kills, every, 8);
  SCOPED_TRACE(::testing::PrintToString(chosen));
  const Result disturbed = run_job(kFour, program, chosen);
  EXPECT_EQ(count(disturbed.err, " was lost in generation "), kills) << disturbed.err;
  EXPECT_EQ(count(disturbed.err, "is lost: no rank has"), 0) << disturbed.err;
  expect_equal(disturbed, run_job(kFour, program));
}

TEST(ElasticShards, KillsChangeNoBitOfACommittedStep) {
  expect_kills_change_nothing({}, 1, 1);
  if (is_long()) expect_kills_change_nothing({}, 1, 2);
}

TEST(ElasticShards, TwoOptimizersSurviveTogether) { expect_kills_change_nothing({"two"}, 1, 6); }

/// Expects the losses of a run with other numbers of ranks, up to roundings.
void expect_near(const Printed& disturbed, const Result& undisturbed) {
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  const Printed expected = read(undisturbed.out);
  ASSERT_EQ(disturbed.steps.size(), expected.steps.size());
  for (const auto& [step, values] : expected.steps) {
    const double loss = std::strtod(values.begin()->c_str(), nullptr);
    for (const std::string& value : disturbed.steps.at(step))
      EXPECT_NEAR(std::strtod(value.c_str(), nullptr), loss, 1e-3) << step;
  }
  EXPECT_THAT(disturbed.ends, SizeIs(1));
}

/// Ranks 0 and 2 are no neighbours, so each part or its copy survives, whether the second one dies
/// with the first or while the survivors divide the state anew, which takes them some 30 ms.
TEST(ElasticShards, ADeathDuringTheRepairIsRepaired) {
  const Words program = {"steps=60", "sleep=5"};
  const Result undisturbed = run_job(kFour, program);
  std::mt19937 random(3);
  for (int round = 0; round < (is_long() ? 60 : 3); ++round) {
    const Words kills = {kill_of("rank0", 20, 1), kill_of("rank2", 20, 1 + random() % 60000)};
    SCOPED_TRACE(::testing::PrintToString(kills));
    const Result disturbed = run_job({"-np", "4", "--min-np", "2"}, program, kills);
    ASSERT_EQ(disturbed.code, 0) << disturbed.err << disturbed.out;
    EXPECT_EQ(count(disturbed.err, "is lost: no rank has"), 0) << disturbed.err;
    expect_near(read(disturbed.out), undisturbed);
  }
}

TEST(ElasticShards, FewerAndMoreRanksGoOn) {
  const Result disturbed = run_job({"-np", "4", "--min-np", "3"},
                                   {"steps=150", "sleep=300", "await=4", kill_of("2", 10, 3000)});
  ASSERT_EQ(disturbed.code, 0) << disturbed.err;
  const Printed printed = read(disturbed.out);
  EXPECT_THAT(printed.sizes, Contains(3)) << disturbed.out;
  EXPECT_EQ(printed.sizes.back(), 4) << disturbed.out;
  expect_near(printed, run_job({"-np", "1", "--min-np", "1"}, {"steps=150"}));
}

/// Ranks 0 and 1 are one of two hosts, so ranks of the other host have their copies.
TEST(ElasticShards, TheLossOfAHostChangesNoBitOfACommittedStep) {
  const Words program = {"steps=40", "sleep=2"};
  const std::string hosts = "a,a,b,b";
  const Words kills = {kill_of("rank0", 16, 0), kill_of("rank1", 16, 0)};
  const Result disturbed = run_job(kFour, program, kills, hosts);
  EXPECT_EQ(count(disturbed.err, " was lost in generation "), 2) << disturbed.err;
  EXPECT_EQ(count(disturbed.err, "is lost: no rank has"), 0) << disturbed.err;
  expect_equal(disturbed, run_job(kFour, program, {}, hosts));
}

/// Jobs whose pretended hosts a script names. Their ranks keep each other's parts as on one host.
class ElasticShardsHosts : public ::testing::Test {
 protected:
  void list(const std::string& hosts) const {
    const std::string next = folder_.path() / "next";
    std::ofstream(next) << hosts;
    std::filesystem::rename(next, folder_.path() / "hosts");
  }
  Start job(Words options, const Words& program) const {
    Start start;
    start.arguments = {"--host-discovery-script", "cat " + (folder_.path() / "hosts").string(),
                       "--rsh", HVD_TEST_PRETENDED_AGENT};
    options.insert(options.end(), {"--bind", "none", HVD_TEST_SHARDS_PROGRAM});
    for (const Words& words : {options, program})
      start.arguments.insert(start.arguments.end(), words.begin(), words.end());
    start.environment = {{"HVD_PEER_TIMEOUT", "6"}, {"OMP_NUM_THREADS", "1"}};
    return start;
  }
  /// Expects the losses of an undisturbed run, and that no rank was lost.
  static void expect_in_order(HvdrunProcess& hvdrun, const Words& program) {
    const Result result = hvdrun.wait(kTimeout);
    ASSERT_EQ(result.code, 0) << result.err << result.out;
    EXPECT_EQ(count(result.err, "lost"), 0) << result.err;
    expect_near(read(result.out), run_job({"-np", "1", "--min-np", "1"}, program));
  }

  const TemporaryFolder folder_;
};

/// Both ranks that have a part leave in one change.
TEST_F(ElasticShardsHosts, AHostThatLeavesHandsItsPartsOn) {
  for (const int replicas : {1, 0}) {
    if (replicas == 0 && !is_long()) continue;
    list("a:2\nb:2\n");
    const Words program = {"steps=150", "sleep=200", "await=2",
                           "replicas=" + std::to_string(replicas)};
    HvdrunProcess hvdrun(job({"-np", "4", "--min-np", "2"}, program));
    ASSERT_TRUE(hvdrun.wait_for("step 5 ", 1, kTimeout));
    list("b:2\n");
    ASSERT_TRUE(hvdrun.wait_for("host a leaves", 1, kTimeout));
    ASSERT_TRUE(hvdrun.wait_for(" 2\n", 2, kTimeout)) << "two ranks go on";
    expect_in_order(hvdrun, {"steps=150"});
  }
}

TEST_F(ElasticShardsHosts, AllRanksLeaveAfterTheyHaveGivenTheirPartsToOthers) {
  const std::string changed = folder_.path() / "changed";
  list("a:2\n");
  HvdrunProcess hvdrun(
      job({"-np", "2", "--min-np", "2"}, {"steps=200", "sleep=200", "until=" + changed}));
  ASSERT_TRUE(hvdrun.wait_for("step 5 ", 1, kTimeout));
  list("b:2\n");
  ASSERT_TRUE(hvdrun.wait_for("[w4] ranks ", 2, kTimeout)) << "with the first two, and without";
  std::ofstream(changed) << '\n';
  expect_in_order(hvdrun, {"steps=200"});
}

/// A rank is killed at a random moment about the change in which a host leaves.
TEST_F(ElasticShardsHosts, ADeathWhileAHostLeavesIsRepaired) {
  const Result undisturbed = run_job({"-np", "1", "--min-np", "1"}, {"steps=150"});
  std::mt19937 random(9);
  int deaths = 0;
  for (int round = 0; round < (is_long() ? 40 : 3); ++round) {
    list("a:2\nb:3\n");
    // The script runs every second, a step takes some 22 ms. A worker that leaves first lives on.
    const unsigned who = 1 + random() % 5;
    const unsigned step = 20 + random() % 60;
    const unsigned microseconds = 1 + random() % 12000;
    const Words program = {"steps=150", "sleep=20", "first=5",
                           kill_of(std::to_string(who), static_cast<int>(step), microseconds)};
    SCOPED_TRACE(program.back());
    HvdrunProcess hvdrun(job({"-np", "5", "--min-np", "2", "--max-np", "5"}, program));
    ASSERT_TRUE(hvdrun.wait_for("step 15 ", 1, kTimeout));
    list("b:3\n");
    const Result result = hvdrun.wait(kTimeout);
    ASSERT_EQ(result.code, 0) << result.err << result.out;
    EXPECT_THAT(result.err, HasSubstr("host a leaves"));
    EXPECT_EQ(count(result.err, "is lost: no rank has"), 0) << result.err;
    deaths += count(result.err, " was lost in generation ");
    expect_near(read(result.out), undisturbed);
  }
  EXPECT_GT(deaths, 0);
}

class Checkpoint : public ::testing::Test {
 protected:
  Checkpoint() { std::filesystem::create_directories(folder_); }
  ~Checkpoint() override { std::filesystem::remove_all(folder_); }
  std::string file(const std::string& name) const { return "load=" + (folder_ / name).string(); }

 private:
  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("hvd_shards_" + std::to_string(::getpid()));
};

TEST_F(Checkpoint, AfterTheLossOfTwoNeighboursTheJobLoads) {
  const Words program = {"steps=30", "sleep=2"};
  const Result disturbed =
      run_job(kFour, program, {file("two"), kill_of("rank1", 16, 0), kill_of("rank2", 16, 0)});
  EXPECT_THAT(disturbed.err, HasSubstr("is lost: no rank has the part that belonged to"));
  EXPECT_THAT(read(disturbed.out).loads, Contains(10)) << disturbed.out;
  expect_equal(disturbed, run_job(kFour, program, {file("none")}));
}

/// The program has two optimizers, and loads neither before its first checkpoint.
TEST_F(Checkpoint, AStateThatIsLostIsLostAsAWhole) {
  const Words program = {"steps=9", "sleep=2", "two"};
  const Result disturbed =
      run_job(kFour, program, {file("two"), kill_of("rank1", 6, 0), kill_of("rank2", 6, 0)});
  ASSERT_EQ(disturbed.code, 0) << disturbed.err << disturbed.out;
  EXPECT_EQ(count(disturbed.err, "is lost: no rank has the part"), 4) << disturbed.err;
  EXPECT_THAT(read(disturbed.out).ends, SizeIs(1));
}

TEST_F(Checkpoint, WithoutReplicasOneDeathIsEnough) {
  const Words program = {"steps=30", "sleep=2", "replicas=0"};
  const Result disturbed = run_job(kFour, program, {file("one"), kill_of("rank1", 16, 0)});
  EXPECT_THAT(disturbed.err, HasSubstr("is lost: no rank has the part that belonged to"));
  EXPECT_THAT(read(disturbed.out).loads, Contains(10)) << disturbed.out;
  expect_equal(disturbed, run_job(kFour, program, {file("none")}));
}

TEST(ElasticShards, WithoutLoadTheLossOfTwoNeighboursEndsTheJob) {
  const Result result =
      run_job({"-np", "4", "--min-np", "2"},
              {"steps=60", "sleep=2", kill_of("rank1", 16, 0), kill_of("rank2", 16, 0)});
  EXPECT_EQ(result.code, 75) << result.err;
  EXPECT_THAT(result.err, HasSubstr("is lost: no rank has the part that belonged to"));
  EXPECT_THAT(result.err, HasSubstr("no rank that had the state is left"));
}

TEST(ElasticLocalSgd, KillsChangeNoBitOfACommittedStep) {
  expect_kills_change_nothing({"local=4"}, 4, 5);
}

TEST(ElasticLocalSgd, FewerAndMoreRanksGoOn) {
  const Result result = run_job({"-np", "4", "--min-np", "3"}, {"local=5", "steps=150", "sleep=300",
                                                                "await=4", kill_of("3", 12, 3000)});
  ASSERT_EQ(result.code, 0) << result.err;
  const Printed printed = read(result.out);
  EXPECT_THAT(printed.sizes, Contains(3)) << result.out;
  EXPECT_EQ(printed.sizes.back(), 4) << result.out;
  EXPECT_THAT(printed.steps, SizeIs(30));
  for (const auto& [step, values] : printed.steps) EXPECT_THAT(values, SizeIs(1)) << step;
  EXPECT_THAT(printed.ends, SizeIs(1));
}

}  // namespace
}  // namespace hvd::launcher::test
