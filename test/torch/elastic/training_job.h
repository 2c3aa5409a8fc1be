#pragma once

/// Jobs of training programs under hvdrun, and what their ranks print
/// (elastic_training_program.cpp).

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

using Words = std::vector<std::string>;

constexpr double kTimeout = 100;
inline const Words kFour = {"-np", "4", "--min-np", "4"};

/// @param program the path of the program and its arguments
inline Result run_job(Words options, const Words& program) {
  Start start;
  options.insert(options.end(), {"--bind", "none"});
  options.insert(options.end(), program.begin(), program.end());
  start.arguments = options;
  start.environment = {{"HVD_PEER_TIMEOUT", "6"}, {"OMP_NUM_THREADS", "1"}};
  return HvdrunProcess(start).wait(kTimeout);
}

inline Words with(Words words, const Words& more) {
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

inline Printed read(const std::string& out) {
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
inline Words kills_of(unsigned seed, int count, int commits) {
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

inline void expect_same_commits(const Result& disturbed, const Result& undisturbed, int kills) {
  EXPECT_EQ(count(disturbed.err, " was lost in generation "), kills) << disturbed.err;
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  ASSERT_EQ(disturbed.code, 0) << disturbed.err << disturbed.out;
  const Printed a = read(disturbed.out), b = read(undisturbed.out);
  ASSERT_GE(b.losses.size(), 9U) << undisturbed.out;
  for (const auto& [commit, values] : b.losses) EXPECT_THAT(values, ::testing::SizeIs(1)) << commit;
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_THAT(a.ends, ::testing::SizeIs(1));
  EXPECT_EQ(a.ends, b.ends);
}

/// Expects each sample of an epoch in one committed step. @param step samples of a full step
inline void expect_each_sample_once(const Printed& printed, int step, int epochs,
                                    int samples = 90) {
  const int steps = (samples + step - 1) / step;
  ASSERT_THAT(printed.samples, ::testing::SizeIs(static_cast<std::size_t>(steps * epochs)));
  for (int epoch = 0; epoch < epochs; ++epoch) {
    std::map<int, int> uses;
    for (int i = 1; i <= steps; ++i)
      for (const int one : printed.samples.at(epoch * steps + i)) ++uses[one];
    EXPECT_THAT(uses, ::testing::SizeIs(static_cast<std::size_t>(samples))) << "epoch " << epoch;
    for (const auto& [sample, count] : uses) EXPECT_EQ(count, 1) << sample << " epoch " << epoch;
  }
}

inline void expect_close_losses(const Printed& a, const Printed& b) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (const auto& [commit, values] : b.losses) {
    const double expected = std::strtod(values.begin()->c_str(), nullptr);
    for (const std::string& value : a.losses.at(commit))
      EXPECT_NEAR(std::strtod(value.c_str(), nullptr), expected, 2e-4) << commit;
  }
}

}  // namespace hvd::launcher::test
