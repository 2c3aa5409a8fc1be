#include "bench/simulated_world.h"

#include <time.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/statistics.h"
#include "control/coordinator.h"
#include "control/negotiator.h"
#include "sim/tree_world.h"

namespace hvd::bench {
namespace {

/// Of this thread only: other programs on the machine do not count.
double thread_cpu_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Sample {
  double accept = 0;
  double decide = 0;
  std::size_t report_bytes = 0;
  std::size_t plan_bytes = 0;
};

class World {
 public:
  World(int ranks, int tensors)
      : ranks_(ranks),
        tensors_(tensors),
        coordinator_(options(ranks), control::ProcessSetTable(ranks)),
        negotiator_(0, control::ProcessSetTable(ranks), options(1).cache_capacity) {}

  /// Every rank submits every tensor and hears the plan.
  Sample round() {
    for (int i = 0; i < tensors_; ++i) negotiator_.submit(request(i));
    const auto report = negotiator_.take_report();
    if (!report) throw std::runtime_error("simulated world: a rank had nothing to say");
    const wire::Bytes bytes = wire::encode(*report);
    Sample sample{.report_bytes = bytes.size()};
    const double begin = thread_cpu_seconds();
    for (int rank = 0; rank < ranks_; ++rank)
      coordinator_.accept(rank, std::get<wire::Report>(wire::decode(bytes)), now_);
    const double accepted = thread_cpu_seconds();
    const auto plan = coordinator_.decide(now_, 0);
    const wire::Bytes told = plan ? wire::encode(*plan) : wire::Bytes{};
    const double decided = thread_cpu_seconds();
    sample.accept = accepted - begin;
    sample.decide = decided - accepted;
    sample.plan_bytes = told.size();
    if (!plan)
      throw std::runtime_error("simulated world: all ranks have reported and there is no plan");
    check(negotiator_.apply(std::get<wire::Plan>(wire::decode(told))));
    return sample;
  }

 private:
  static control::CoordinatorOptions options(int ranks) {
    control::CoordinatorOptions options;
    options.host_of_rank.assign(static_cast<std::size_t>(ranks), "host");
    return options;
  }

  static wire::Request request(int number) {
    wire::Request request;
    request.name = "layer.weight." + std::to_string(number);
    request.shape = {64, 64};
    return request;
  }

  void check(const control::Applied& applied) const {
    std::size_t agreed = 0;
    for (const auto& batch : applied.batches) agreed += batch.operations.size();
    if (agreed != static_cast<std::size_t>(tensors_) || !applied.errors.empty()) {
      throw std::runtime_error("simulated world: a plan for " + std::to_string(agreed) + " of " +
                               std::to_string(tensors_) + " tensors");
    }
  }

  const int ranks_;
  const int tensors_;
  const TimePoint now_{};
  control::Coordinator coordinator_;
  control::Negotiator negotiator_;
};

RoundCost summarize_rounds(const std::vector<Sample>& samples) {
  std::vector<double> accept;
  std::vector<double> decide;
  for (const Sample& sample : samples) {
    accept.push_back(sample.accept * 1e6);
    decide.push_back(sample.decide * 1e6);
  }
  return {percentile(accept, 0.5), percentile(decide, 0.5), samples.back().report_bytes,
          samples.back().plan_bytes, static_cast<int>(samples.size())};
}

// The first negotiation costs by rank and tensor; so does the number of times that it is worth
// waiting for.
int worlds_to_measure(int ranks, int tensors) {
  return static_cast<int>(
      std::clamp<std::int64_t>(2'000'000 / (std::int64_t{ranks} * tensors), 3, 20));
}
constexpr int kCachedRounds = 20;

class MeasuredTree {
 public:
  MeasuredTree(int ranks, int tensors) : world_(ranks, kRanksPerHost, kRadix, tensors) {}

  Sample round() {
    Sample sample;
    double begun = 0;
    double accepted = 0;
    sim::TreeWorld::Watch watch;
    watch.begin = [&] { begun = thread_cpu_seconds(); };
    watch.accepted = [&] { accepted = thread_cpu_seconds(); };
    watch.decided = [&] { sample.decide = thread_cpu_seconds() - accepted; };
    round_ = world_.round(watch);
    sample.accept = accepted - begun;
    sample.report_bytes = round_.merged_bytes;
    sample.plan_bytes = round_.plan_bytes;
    return sample;
  }
  const sim::TreeWorld::Round& last() const noexcept { return round_; }

 private:
  static constexpr int kRanksPerHost = 8;
  static constexpr int kRadix = 32;
  sim::TreeWorld world_;
  sim::TreeWorld::Round round_;
};

}  // namespace

WorldCost measure_world(int ranks, int tensors) {
  const int worlds = worlds_to_measure(ranks, tensors);
  std::vector<Sample> first;
  std::vector<Sample> cached;
  for (int i = 0; i < worlds; ++i) {
    World world(ranks, tensors);
    first.push_back(world.round());
    if (i + 1 < worlds) continue;
    world.round();  // the first to use what the caches hold
    for (int round = 0; round < kCachedRounds; ++round) cached.push_back(world.round());
  }
  return {ranks, tensors, 0, ranks - 1, ranks, summarize_rounds(first), summarize_rounds(cached)};
}

WorldCost measure_tree_world(int ranks, int tensors) {
  const int worlds = worlds_to_measure(ranks, tensors);
  std::vector<Sample> first;
  std::vector<Sample> cached;
  WorldCost cost{.ranks = ranks, .tensors = tensors};
  for (int i = 0; i < worlds; ++i) {
    MeasuredTree tree(ranks, tensors);
    first.push_back(tree.round());
    cost.depth = tree.last().depth;
    cost.messages_received = static_cast<int>(tree.last().root_received) - 1;
    cost.most_received = static_cast<int>(tree.last().most_received);
    if (i + 1 < worlds) continue;
    tree.round();
    for (int round = 0; round < kCachedRounds; ++round) cached.push_back(tree.round());
  }
  cost.first = summarize_rounds(first);
  cost.cached = summarize_rounds(cached);
  return cost;
}

}  // namespace hvd::bench
