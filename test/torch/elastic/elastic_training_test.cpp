// Training in elastic jobs under hvdrun (elastic_training_program.cpp): ranks are killed, and the
// committed steps are compared with those of a run without kills.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
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
constexpr int kSamples = 90;

Result run_job(Words options, const Words& program) {
  Start start;
  options.insert(options.end(), {"--bind", "none", HVD_TEST_TRAINING_PROGRAM});
  options.insert(options.end(), program.begin(), program.end());
  start.arguments = options;
  start.environment = {{"HVD_PEER_TIMEOUT", "6"}, {"OMP_NUM_THREADS", "1"}};
  return HvdrunProcess(start).wait(kTimeout);
}

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The lines that the ranks have printed.
struct Printed {
  std::map<int, std::set<std::string>> losses;  ///< of each commit
  std::map<int, std::vector<int>> samples;      ///< of each commit, those of all ranks
  std::set<std::string> ends;
  std::vector<int> sizes;  ///< at each entry of each rank
};

Printed read(const std::string& out) {
  Printed printed;
  for (std::string line : lines_of(out)) {
    if (line.starts_with('[')) line = line.substr(line.find(']') + 1);
    std::istringstream words(line);
    std::string kind, value;
    int commit = 0;
    words >> kind >> commit;
    if (kind == "loss" && words >> value) printed.losses[commit].insert(value);
    if (kind == "end" && words >> value) printed.ends.insert(std::to_string(commit) + ' ' + value);
    if (kind == "ranks" && words >> value) printed.sizes.push_back(std::stoi(value));
    if (kind != "used") continue;
    for (int sample = 0; words >> sample;) printed.samples[commit].push_back(sample);
  }
  return printed;
}

/// Kills of one worker after the other, each replaced by the next one, at seeded moments.
Words kills_of(unsigned seed, int count, int commits) {
  std::mt19937 random(seed);
  std::vector<int> workers = {1, 2, 3, 4};
  const std::vector<std::string> moments = {"forward", "backward", "step", "commit"};
  Words kills;
  for (int i = 0; i < count; ++i) {
    const std::size_t victim = random() % workers.size();
    const int commit = (commits - 2) * (i + 1) / count;
    kills.push_back("kill=" + std::to_string(workers[victim]) + "," + std::to_string(commit) + "," +
                    moments[random() % moments.size()]);
    workers[victim] = 5 + i;
  }
  return kills;
}

void expect_same_commits(const Result& disturbed, const Result& undisturbed, int kills) {
  EXPECT_EQ(count(disturbed.err, " was lost in generation "), kills) << disturbed.err;
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  ASSERT_EQ(disturbed.code, 0) << disturbed.err << disturbed.out;
  const Printed a = read(disturbed.out), b = read(undisturbed.out);
  ASSERT_GT(b.losses.size(), 10U) << undisturbed.out;
  for (const auto& [commit, values] : b.losses) EXPECT_THAT(values, SizeIs(1)) << commit;
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_THAT(a.ends, SizeIs(1));
  EXPECT_EQ(a.ends, b.ends);
}

/// Expects each sample of an epoch in one committed step. @param step samples of a full step
void expect_each_sample_once(const Printed& printed, int step, int epochs) {
  const int steps = (kSamples + step - 1) / step;
  ASSERT_THAT(printed.samples, SizeIs(static_cast<std::size_t>(steps * epochs)));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    std::map<int, int> uses;
    for (int i = 1; i <= steps; ++i)
      for (const int sample : printed.samples.at(epoch * steps + i)) ++uses[sample];
    EXPECT_THAT(uses, SizeIs(kSamples)) << "epoch " << epoch;
    for (const auto& [sample, count] : uses) EXPECT_EQ(count, 1) << sample << " epoch " << epoch;
  }
}

void expect_close_losses(const Printed& a, const Printed& b) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (const auto& [commit, values] : b.losses) {
    const double expected = std::strtod(values.begin()->c_str(), nullptr);
    for (const std::string& value : a.losses.at(commit))
      EXPECT_NEAR(std::strtod(value.c_str(), nullptr), expected, 2e-4) << commit;
  }
}

const Words kFour = {"-np", "4", "--min-np", "4"};

/// Runs the program with kills and without, and compares the commits. With --long there are 20
/// kills.
void expect_kills_change_nothing(Words program, unsigned seed) {
  const bool is_long = std::getenv("HVD_TEST_LONG") != nullptr;
  const int kills = is_long ? 20 : 4;
  const int epochs = is_long ? 15 : 3;
  program.push_back("batch=4");
  program.push_back("epochs=" + std::to_string(epochs));
  const Words chosen = kills_of(seed, kills, 6 * epochs);
  SCOPED_TRACE(::testing::PrintToString(chosen));
  expect_same_commits(run_job(kFour, with(program, chosen)), run_job(kFour, program), kills);
}

TEST(ElasticTraining, KillsChangeNoBitOfACommittedStepWithCopies) {
  expect_kills_change_nothing({"copy", "barrier"}, 1);
}

TEST(ElasticTraining, KillsChangeNoBitOfACommittedStepWithoutCopies) {
  expect_kills_change_nothing({"adam", "loader"}, 2);
}

TEST(ElasticTraining, WithoutCopiesAStepThatAllRanksHaveWrittenStays) {
  const Result result = run_job(kFour, {"barrier", "batch=4", "epochs=2", "kill=3,4,step"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("the samples of one step are used twice"));
  const Printed printed = read(result.out);
  EXPECT_THAT(printed.losses, SizeIs(12));
  for (const auto& [commit, values] : printed.losses) EXPECT_THAT(values, SizeIs(1)) << commit;
  EXPECT_THAT(printed.ends, SizeIs(1));
}

class GlobalBatch : public ::testing::TestWithParam<const char*> {};

TEST_P(GlobalBatch, EachSampleIsUsedOnceThroughFewerAndMoreRanks) {
  Words program = {"plain", "global=10", "epochs=8"};
  if (GetParam() != std::string("sampler")) program.emplace_back(GetParam());
  const Result disturbed =
      run_job({"-np", "4", "--min-np", "3"}, with(program, {"sleep=60", "kill=2,5,backward"}));
  ASSERT_EQ(disturbed.code, 0) << disturbed.err;
  const Printed printed = read(disturbed.out);
  EXPECT_THAT(printed.sizes, Contains(3)) << disturbed.out;
  EXPECT_EQ(printed.sizes.back(), 4) << disturbed.out;
  expect_each_sample_once(printed, 10, 8);
  EXPECT_THAT(printed.ends, SizeIs(1));
  const Result alone = run_job({"-np", "1", "--min-np", "1"}, program);
  ASSERT_EQ(alone.code, 0) << alone.err;
  expect_close_losses(printed, read(alone.out));
}

INSTANTIATE_TEST_SUITE_P(Sources, GlobalBatch, ::testing::Values("sampler", "loader"));

}  // namespace
}  // namespace hvd::launcher::test
