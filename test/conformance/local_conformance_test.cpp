#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backend/self/self_backend.h"
#include "conformance/thread_ranks.h"
#include "hvd/error.h"
#include "support/local_backend.h"

namespace hvd::conformance {
namespace {

/// The ranks of one LocalWorld.
MakeParts local_ranks(int size) {
  return [world = std::make_shared<testing::LocalWorld>(size)](int) -> RankParts {
    return {std::make_unique<testing::LocalBackend>(world)};
  };
}

/// Steps all ranks in turn on the calling thread.
void step_ranks(int size, const std::vector<Case>& cases) {
  const auto world = std::make_shared<testing::LocalWorld>(size);
  std::deque<testing::FakePeers> peers;
  std::vector<std::unique_ptr<Channel>> channels;
  for (int rank = 0; rank < size; ++rank) {
    peers.emplace_back(rank, size);
    channels.push_back(testing::LocalBackend(world).open(
        {.ranks = all_ranks(size), .set_rank = rank}, peers.back()));
  }
  std::uint64_t seed = 0;
  for (const Case& one : cases) {
    ++seed;
    std::deque<Run> runs;
    std::vector<std::unique_ptr<Work>> works;
    for (int rank = 0; rank < size; ++rank) {
      runs.emplace_back(one, rank, size, seed);
      works.push_back(runs.back().launch(*channels[static_cast<std::size_t>(rank)]));
    }
    int done = 0;
    // In the first round all ranks contribute. After the second all shares are done. In the third
    // every Work completes.
    for (int round = 0; round < 3; ++round) {
      for (std::unique_ptr<Work>& work : works) {
        if (work != nullptr && work->progress()) {
          work.reset();
          ++done;
        }
      }
    }
    ASSERT_EQ(done, size) << describe(one);
    for (const Run& run : runs) {
      run.check();
    }
  }
}

class LocalConformance : public ::testing::TestWithParam<std::tuple<OpKind, int>> {};

TEST_P(LocalConformance, RanksAsThreads) {
  const auto [kind, size] = GetParam();
  const std::vector<Case> cases = cases_of(kind, size);
  run_threads(size, local_ranks(size), [&](Harness& harness) { run_cases(harness, cases); });
}

TEST_P(LocalConformance, OneThreadStepsAllRanks) {
  const auto [kind, size] = GetParam();
  // RanksAsThreads runs all cases. A third of the large ones is enough here.
  std::vector<Case> cases;
  int index = 0;
  for (const Case& one : cases_of(kind, size)) {
    if (one.count <= 1023 || ++index % 3 == 0) {
      cases.push_back(one);
    }
  }
  step_ranks(size, cases);
}

INSTANTIATE_TEST_SUITE_P(AllKinds, LocalConformance,
                         ::testing::Combine(::testing::ValuesIn(kKinds),
                                            ::testing::Values(2, 3, 4, 8)),
                         [](const auto& test) {
                           return std::string(to_string(std::get<0>(test.param))) + "_" +
                                  std::to_string(std::get<1>(test.param));
                         });

class LocalConformanceMixed : public ::testing::TestWithParam<int> {};

TEST_P(LocalConformanceMixed, BackToBack) {
  const int size = GetParam();
  const std::vector<Case> cases = mixed_cases(size);
  for (int repeat = 0; repeat < 3; ++repeat) {
    run_threads(size, local_ranks(size),
                [&](Harness& harness) { run_back_to_back(harness, cases); });
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, LocalConformanceMixed, ::testing::Values(2, 3, 4, 8));

TEST(SelfConformance, AllKinds) {
  const MakeParts make_parts = [](int) -> RankParts { return {std::make_unique<SelfBackend>()}; };
  run_threads(1, make_parts, [](Harness& harness) {
    for (const OpKind kind : kKinds) run_cases(harness, cases_of(kind, 1));
    run_back_to_back(harness, mixed_cases(1));
  });
}

TEST(SelfBackend, ScoresSetsOfOneRankInTheHostsMemory) {
  const SelfBackend backend;
  const ChannelSpec one{.ranks = {2}};
  for (const OpKind kind : kKinds) {
    EXPECT_EQ(backend.score({}, one, {.kind = kind}), 1);
    EXPECT_EQ(backend.score({}, {.ranks = {0, 1}}, {.kind = kind}), 0);
    const ChannelSpec on_gpu{.ranks = {0}, .device = {.type = DeviceType::kCuda}};
    EXPECT_EQ(backend.score({}, on_gpu, {.kind = kind}), 0);
  }
  EXPECT_EQ(backend.score({}, one, {.op = ReduceOp::kAdasum}), 0);
  EXPECT_EQ(backend.score({}, one, {.kind = OpKind::kBarrier}), 0);
  EXPECT_EQ(backend.score({}, one, {.kind = OpKind::kJoin}), 0);
}

TEST(SelfBackend, RefusesMemoryThatIsTooSmall) {
  testing::FakePeers peers;
  const auto channel = SelfBackend().open({.ranks = {0}}, peers);
  Bytes memory(16);
  EXPECT_THROW(channel->launch({.count = 5}, memory, memory), Error);
  EXPECT_THROW(channel->launch({.kind = OpKind::kAllgather}, memory, memory), Error);
}

// The suite itself must fail for a backend that does not write its output.
class BrokenWork final : public Work {
 public:
  bool progress() override { return true; }
};
class BrokenChannel final : public Channel {
 public:
  std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte>,
                               std::span<std::byte>) override {
    return std::make_unique<BrokenWork>();
  }
  void abort() noexcept override {}
};

void check_a_channel_that_does_nothing() {
  BrokenChannel channel;
  Run run({.count = 7}, 0, 2, 1);
  EXPECT_TRUE(run.launch(channel)->progress());
  run.check();
}

TEST(ConformanceSuite, DetectsAnOutputThatWasNotWritten) {
  ::testing::TestPartResultArray results;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    check_a_channel_that_does_nothing();
  }
  EXPECT_EQ(results.size(), 1);
}

TEST(ConformanceSuite, OrderOfAFloatSumShowsInItsResult) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < 3; ++rank) {
    inputs.push_back(testing::make_input(64, DataType::kFloat32, ReduceOp::kSum, rank, 1));
  }
  const Bytes forward = testing::reference_reduce(inputs, DataType::kFloat32, ReduceOp::kSum, {});
  const Bytes backward = testing::reference_reduce({inputs.rbegin(), inputs.rend()},
                                                   DataType::kFloat32, ReduceOp::kSum, {});
  EXPECT_NE(forward, backward);
}

}  // namespace
}  // namespace hvd::conformance
