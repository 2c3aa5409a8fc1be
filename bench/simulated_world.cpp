#include "bench/simulated_world.h"

#include <time.h>

#include <algorithm>
#include <vector>

#include "bench/statistics.h"
#include "support/uniform_world.h"

namespace hvd::bench {
namespace {

/// CPU time of this thread only, so that other programs on the machine do not count.
double thread_cpu_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Sample {
  double accept = 0;
  double decide = 0;
  testing::UniformWorld::Round round = {};
};

Sample measure_round(testing::UniformWorld& world) {
  Sample sample;
  double begun = 0;
  double accepted = 0;
  testing::UniformWorld::Watch watch;
  watch.begin = [&] { begun = thread_cpu_seconds(); };
  watch.accepted = [&] { accepted = thread_cpu_seconds(); };
  watch.decided = [&] { sample.decide = thread_cpu_seconds() - accepted; };
  sample.round = world.round(watch);
  sample.accept = accepted - begun;
  return sample;
}

RoundCost summarize_rounds(const std::vector<Sample>& samples) {
  std::vector<double> accept;
  std::vector<double> decide;
  for (const Sample& sample : samples) {
    accept.push_back(sample.accept * 1e6);
    decide.push_back(sample.decide * 1e6);
  }
  const auto& last = samples.back().round;
  return {percentile(accept, 0.5), percentile(decide, 0.5), last.report_bytes, last.plan_bytes,
          static_cast<int>(samples.size())};
}

// The first negotiation costs by rank and tensor; so does the number of times that it is worth
// waiting for.
int worlds_to_measure(int ranks, int tensors) {
  return static_cast<int>(
      std::clamp<std::int64_t>(2'000'000 / (std::int64_t{ranks} * tensors), 3, 20));
}
constexpr int kCachedRounds = 20;
constexpr int kRanksPerHost = 8;
constexpr int kRadix = 32;

}  // namespace

WorldCost measure_world(int ranks, int tensors, bool tree) {
  const int worlds = worlds_to_measure(ranks, tensors);
  std::vector<Sample> first;
  std::vector<Sample> cached;
  for (int i = 0; i < worlds; ++i) {
    testing::UniformWorld world(ranks, kRanksPerHost, tree ? kRadix : 0, tensors);
    first.push_back(measure_round(world));
    if (i + 1 < worlds) continue;
    world.round();  // the first to use what the caches hold
    for (int round = 0; round < kCachedRounds; ++round) cached.push_back(measure_round(world));
  }
  const auto& round = first.back().round;
  return {ranks,
          tensors,
          round.depth,
          static_cast<int>(round.root_received) - 1,
          static_cast<int>(round.most_received),
          summarize_rounds(first),
          summarize_rounds(cached)};
}

}  // namespace hvd::bench
