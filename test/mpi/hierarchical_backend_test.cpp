#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/flat/flat_backend.h"
#include "backend/hierarchical/hierarchical_backend.h"
#include "hvd/error.h"
#include "mpi/support/hosts.h"
#include "mpi/support/mpi_test.h"
#include "support/reference.h"
#include "transport/mpi/mpi_world.h"

// Tests properties that the conformance suite does not check: ranks that are scattered over the
// hosts, results whose bits must not depend on the tensor's size, sets with only some of a host's
// ranks, several channels at a time, ranks that sleep, failures.

namespace hvd::hierarchical {
namespace {

using namespace std::chrono_literals;
using testing::Bytes;
using testing::make_input;
using testing::mpi_rank;
using testing::mpi_size;

constexpr HierarchicalTuning kSmallBuffers = {
    .buffer_bytes = 4096, .small_bytes = 1024, .smallest_slice = 256};

/// "ab", "aba" or "abab": consecutive ranks are never on the same host.
std::string scattered() {
  return std::string("abab").substr(0, static_cast<std::size_t>(mpi_size()));
}
/// "ab", "aab" or "aabb": the first half of the ranks is on one host.
std::string halves() {
  const auto first = static_cast<std::size_t>((mpi_size() + 1) / 2);
  return std::string(first, 'a') + std::string(static_cast<std::size_t>(mpi_size()) - first, 'b');
}

class Job {
 public:
  explicit Job(const std::string& hosts, const HierarchicalTuning& tuning = kSmallBuffers)
      : hosts_(hosts),
        world_(mpi::MpiWorld::join({.start_timeout = 30s})),
        plane_(testing::mpi_control_plane(world_)),
        backend_(mpi::make_mpi_carrier(world_), world_->node(), tuning),
        flat_(mpi::make_mpi_carrier(world_)) {}
  ~Job() {
    testing::mpi_barrier();
    plane_->farewell();
  }

  std::unique_ptr<Channel> open(int process_set, const std::vector<int>& ranks) {
    return open_with(backend_, process_set, ranks);
  }
  std::unique_ptr<Channel> open_flat(int process_set, const std::vector<int>& ranks) {
    return open_with(flat_, process_set, ranks);
  }
  control::ControlPlane& plane() { return *plane_; }
  const HierarchicalBackend& backend() const { return backend_; }
  const Topology& topology() const { return world_->topology(); }
  const std::string& name_prefix() const { return world_->node()->name_prefix(); }

 private:
  std::unique_ptr<Channel> open_with(Backend& backend, int process_set,
                                     const std::vector<int>& ranks) {
    const auto own = std::find(ranks.begin(), ranks.end(), mpi_rank());
    if (own == ranks.end()) return nullptr;
    return backend.open({process_set, ranks, static_cast<int>(own - ranks.begin()), {}}, *plane_);
  }

  const testing::PretendHosts hosts_;
  std::shared_ptr<mpi::MpiWorld> world_;
  std::unique_ptr<control::ControlPlane> plane_;
  HierarchicalBackend backend_;
  flat::FlatBackend flat_;
};

/// @param order ranks in the order in which their inputs are added
Bytes expected_sum(const std::vector<int>& order, std::int64_t count, DataType dtype,
                   std::uint64_t seed, const ReduceScale& scale = {}) {
  std::vector<Bytes> inputs;
  for (const int rank : order)
    inputs.push_back(make_input(count, dtype, ReduceOp::kSum, rank, seed));
  return testing::reference_reduce(inputs, dtype, ReduceOp::kSum, scale);
}

Collective sum_of(std::int64_t count, DataType dtype = DataType::kFloat32) {
  return {.kind = OpKind::kAllreduce, .dtype = dtype, .count = count};
}

/// All ranks, host by host. The hosts are in the order of their first ranks.
std::vector<int> by_host(const Topology& topology) {
  std::vector<int> order = testing::all_ranks();
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return topology.host_of_rank[static_cast<std::size_t>(a)] <
           topology.host_of_rank[static_cast<std::size_t>(b)];
  });
  return order;
}

TEST(HierarchicalBackend, AddsHostByHostWhereRanksAreScattered) {
  Job job(scattered());
  const auto channel = job.open(0, testing::all_ranks());
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
    for (const std::int64_t count : {3, 100, 1000, 20'000}) {
      const ReduceScale average{.prescale = 0.3, .divisor = mpi_size()};
      Bytes buffer = make_input(count, dtype, ReduceOp::kSum, mpi_rank(), 5);
      Collective collective = sum_of(count, dtype);
      collective.scale = average;
      testing::complete(*channel->launch(collective, buffer, buffer));
      EXPECT_EQ(testing::first_difference(
                    buffer.data(), expected_sum(by_host(job.topology()), count, dtype, 5, average),
                    dtype),
                -1)
          << count << ' ' << to_string(dtype);
    }
  }
}

// Fusion puts a tensor into buffers of different sizes from step to step. Small buffers are sent
// whole, and large ones use the chain.
TEST(HierarchicalBackend, AnElementsBitsDependOnTheInputsOnly) {
  Job job(scattered());
  const auto channel = job.open(0, testing::all_ranks());
  constexpr std::int64_t kCount = 3000;
  const Bytes input = make_input(kCount, DataType::kFloat16, ReduceOp::kSum, mpi_rank(), 11);
  Bytes whole = input;
  testing::complete(*channel->launch(sum_of(kCount, DataType::kFloat16), whole, whole));
  for (const std::int64_t piece : {1, 37, 100, 999}) {
    Bytes result(input.size());
    for (std::int64_t begin = 0; begin < kCount; begin += piece) {
      const std::int64_t count = std::min(piece, kCount - begin);
      const auto at = static_cast<std::size_t>(begin) * 2;
      const auto bytes = static_cast<std::size_t>(count) * 2;
      if (piece == 1 && begin > 200) {
        std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(at), bytes,
                    result.begin() + static_cast<std::ptrdiff_t>(at));
        continue;  // 200 single elements are enough
      }
      testing::complete(*channel->launch(sum_of(count, DataType::kFloat16),
                                         std::span(input).subspan(at, bytes),
                                         std::span(result).subspan(at, bytes)));
    }
    EXPECT_TRUE(result == whole) << "in pieces of " << piece;
  }
}

TEST(HierarchicalBackend, RepeatsItsBitsAndGivesEveryRankTheSame) {
  Job job(halves(), HierarchicalTuning{});
  const auto channel = job.open(0, testing::all_ranks());
  constexpr std::int64_t kCount = 300'000;  // several rounds with the default buffers
  const Bytes input = make_input(kCount, DataType::kBFloat16, ReduceOp::kSum, mpi_rank(), 21);
  const Bytes expected = expected_sum(testing::all_ranks(), kCount, DataType::kBFloat16, 21);
  for (int run = 0; run < 5; ++run) {
    Bytes result(input.size());
    testing::complete(*channel->launch(sum_of(kCount, DataType::kBFloat16), input, result));
    EXPECT_EQ(testing::first_difference(result.data(), expected, DataType::kBFloat16), -1)
        << "run " << run;
  }
}

// The slices of a last, shorter round have other offsets than those of the rounds before. If the
// receiver of a result is slow, another driver must not overwrite the result before it is sent.
TEST(HierarchicalBackend, ASlowRankGetsTheSameBits) {
  Job job(halves(), HierarchicalTuning{});
  const auto channel = job.open(0, testing::all_ranks());
  constexpr std::int64_t kCount =
      65'536 * 4 + 9000;  // five rounds with the default buffers; the last one is short
  for (int slow = 0; slow < mpi_size(); ++slow) {
    for (int run = 0; run < 5; ++run) {
      const auto seed = static_cast<std::uint64_t>(slow * 10 + run);
      const Bytes input = make_input(kCount, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), seed);
      Bytes result(input.size());
      const auto work = channel->launch(sum_of(kCount), input, result);
      while (!work->progress()) {
        if (slow == mpi_rank()) std::this_thread::sleep_for(1ms);
        sched_yield();
      }
      const Bytes expected = expected_sum(testing::all_ranks(), kCount, DataType::kFloat32, seed);
      EXPECT_EQ(testing::first_difference(result.data(), expected, DataType::kFloat32), -1)
          << "slow rank " << slow << ", run " << run;
    }
  }
}

TEST(HierarchicalBackend, RunsSetsWithAPartOfAHostsRanksSideBySide) {
  if (mpi_size() < 4) GTEST_SKIP() << "needs four ranks";
  Job job("aabb");
  struct Run {
    std::vector<int> ranks;
    std::unique_ptr<Channel> channel = {};
    Bytes buffer = {};
    std::unique_ptr<Work> work = {};
  };
  std::vector<Run> runs;
  for (const std::vector<int>& ranks :
       std::vector<std::vector<int>>{{0, 1, 2, 3}, {0, 1, 2}, {1, 2, 3}, {0, 2, 3}})
    runs.push_back({ranks});
  // The set of all ranks also has a channel of the flat backend, which runs the other kinds of
  // operation.
  runs.push_back({testing::all_ranks()});
  constexpr std::int64_t kCount = 30'001;
  for (std::size_t index = 0; index < runs.size(); ++index) {
    Run& run = runs[index];
    const bool flat = index + 1 == runs.size();
    run.channel = flat ? job.open_flat(0, run.ranks) : job.open(static_cast<int>(index), run.ranks);
    if (!run.channel) continue;
    run.buffer = make_input(kCount, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 100 + index);
    run.work = run.channel->launch(sum_of(kCount), run.buffer, run.buffer);
  }
  std::vector<Work*> works;
  for (const Run& run : runs) works.push_back(run.work.get());
  EXPECT_TRUE(testing::complete_all(std::move(works)));
  for (std::size_t index = 0; index < runs.size(); ++index) {
    if (!runs[index].work) continue;
    const Bytes expected = expected_sum(runs[index].ranks, kCount, DataType::kFloat32, 100 + index);
    EXPECT_EQ(testing::first_difference(runs[index].buffer.data(), expected, DataType::kFloat32),
              -1)
        << "run " << index;
  }
}

TEST(HierarchicalBackend, RingsMembersOfItsHostThatCanGoOn) {
  if (mpi_size() < 3) GTEST_SKIP() << "needs a host of two ranks and another";
  // Rank 1 has no messages. It sleeps until its neighbours ring, and a missing ring would cost ten
  // seconds.
  Job job(std::string("aaab").substr(static_cast<std::size_t>(4 - mpi_size())));
  const auto channel = job.open(0, testing::all_ranks());
  const SteadyClock clock;
  const TimePoint start = clock.now();
  for (const std::int64_t count : {10, 1000, 10, 50'000, 7, 50'000}) {
    Bytes buffer = make_input(count, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 9);
    const auto work = channel->launch(sum_of(count), buffer, buffer);
    const bool sleeps = mpi_rank() == 1;
    for (;;) {
      const std::uint32_t ticket = job.plane().doorbell().ticket();
      if (work->progress()) break;
      if (work->moved()) continue;
      job.plane().doorbell().sleep(ticket, Doorbell::Sleeper::kStandby,
                                   sleeps ? Duration(10s) : Duration(50us));
    }
    EXPECT_EQ(testing::first_difference(
                  buffer.data(), expected_sum(testing::all_ranks(), count, DataType::kFloat32, 9),
                  DataType::kFloat32),
              -1);
  }
  EXPECT_LT(clock.now() - start, 9s);
}

TEST(HierarchicalBackend, ADroppedWorkEndsItsChannelOnly) {
  Job job(halves());
  const auto channel = job.open(0, testing::all_ranks());
  const auto doomed = job.open(1, testing::all_ranks());
  // The last rank does not take part, so the others stop while messages are in flight.
  if (mpi_rank() != mpi_size() - 1) {
    Bytes buffer = make_input(100'000, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 3);
    auto work = doomed->launch(sum_of(100'000), buffer, buffer);
    for (int call = 0; call < 100; ++call) EXPECT_FALSE(work->progress());
    doomed->abort();
    work.reset();
    EXPECT_THROW(doomed->launch(sum_of(1), std::span(buffer).first(4), std::span(buffer).first(4)),
                 Error);
  }
  Bytes buffer = make_input(1000, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 4);
  testing::complete(*channel->launch(sum_of(1000), buffer, buffer));
  EXPECT_TRUE(buffer == expected_sum(testing::all_ranks(), 1000, DataType::kFloat32, 4));
}

TEST(HierarchicalBackend, LeavesNoNameInSharedMemory) {
  Job job(halves());
  const auto channel = job.open(0, testing::all_ranks());
  testing::complete(*channel->launch(sum_of(0), {}, {}));
  testing::mpi_barrier();
  EXPECT_TRUE(testing::shared_memory_left_behind(job.name_prefix()).empty());
  testing::mpi_barrier();
}

TEST(HierarchicalBackend, ScoresSupportedCollectives) {
  Job job(halves());
  const HierarchicalBackend& backend = job.backend();
  const Topology mixed = make_topology(0, {"a", "a", "b", "b", "c"});
  const Collective allreduce{.kind = OpKind::kAllreduce};
  EXPECT_EQ(backend.name(), "hierarchical");
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2}}, allreduce), 15);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 2, 3}}, {.kind = OpKind::kBroadcast}), 15);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2, 3, 4}}, {.kind = OpKind::kAllgather}), 15);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1}}, allreduce), 0) << "one host";
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 2, 4}}, allreduce), 0)
      << "no two members share a host";
  EXPECT_EQ(backend.score(mixed, {.ranks = {0}}, allreduce), 0);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2}}, {.kind = OpKind::kAlltoall}), 0);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2}}, {.kind = OpKind::kReducescatter}), 0);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2}}, {.kind = OpKind::kBarrier}), 0);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2}},
                          {.kind = OpKind::kAllreduce, .op = ReduceOp::kAdasum}),
            0);
  EXPECT_EQ(backend.score(mixed, {.ranks = {0, 1, 2}, .device = {DeviceType::kCuda, 0}}, allreduce),
            0);
}

TEST(HierarchicalBackend, RefusesKindsThatItDoesNotServeAndInvalidTunings) {
  Job job(halves());
  const auto channel = job.open(0, testing::all_ranks());
  EXPECT_THROW(channel->launch({.kind = OpKind::kAlltoall}, {}, {}), Error);
  EXPECT_THROW(HierarchicalBackend(nullptr, nullptr, {.buffer_bytes = 100}), UsageError);
  EXPECT_THROW(HierarchicalBackend(nullptr, nullptr, {.buffer_bytes = 1024, .small_bytes = 1024}),
               UsageError);
}

}  // namespace
}  // namespace hvd::hierarchical
