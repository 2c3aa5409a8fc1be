#include <gtest/gtest.h>

#include <algorithm>

#include "backend/flat/flat_backend.h"
#include "hvd/error.h"
#include "mpi/support/mpi_test.h"
#include "support/reference.h"
#include "transport/mpi/mpi_world.h"

// Tests properties that the conformance suite does not check: sizes around the boundaries of chunks
// and windows, several sets at once, wrong arguments, failures.

namespace hvd::flat {
namespace {

using namespace std::chrono_literals;
using mpi::make_mpi_carrier;
using mpi::MpiWorld;
using testing::Bytes;
using testing::make_input;
using testing::mpi_rank;
using testing::mpi_size;

constexpr FlatTuning kTiny = {
    .chunk_bytes = 64, .slice_bytes = 64, .windows = 3, .direct_bytes = 0, .outstanding_chunks = 2};
constexpr FlatTuning kOneAtATime = {.chunk_bytes = 4096,
                                    .slice_bytes = 4096,
                                    .windows = 1,
                                    .direct_bytes = 0,
                                    .outstanding_chunks = 1};
constexpr FlatTuning kAllDirect = {
    .chunk_bytes = 4096, .windows = 4, .direct_bytes = 1 << 20, .outstanding_chunks = 3};
constexpr FlatTuning kDirectPair = {.chunk_bytes = 4096,
                                    .windows = 4,
                                    .direct_bytes = 64,
                                    .direct_pair_bytes = 1 << 20,
                                    .outstanding_chunks = 3};

class FlatBackendTest : public ::testing::TestWithParam<FlatTuning> {
 protected:
  FlatBackendTest()
      : world_(MpiWorld::join({.start_timeout = 30s})),
        plane_(testing::mpi_control_plane(world_)),
        backend_(make_mpi_carrier(world_), GetParam()) {
    channel_ = open(0, testing::all_ranks());
  }
  ~FlatBackendTest() override {
    testing::mpi_barrier();
    plane_->farewell();
  }

  std::unique_ptr<Channel> open(int process_set, const std::vector<int>& ranks) {
    const auto own = std::find(ranks.begin(), ranks.end(), mpi_rank());
    if (own == ranks.end()) return nullptr;
    return backend_.open({process_set, ranks, static_cast<int>(own - ranks.begin()), {}}, *plane_);
  }

  static Bytes reduced(std::int64_t count, DataType dtype, ReduceOp op, std::uint64_t seed,
                       const std::vector<int>& ranks) {
    std::vector<Bytes> inputs;
    for (const int rank : ranks) inputs.push_back(make_input(count, dtype, op, rank, seed));
    return testing::reference_reduce(inputs, dtype, op, {});
  }

  void allreduce(Channel& channel, const std::vector<int>& ranks, std::int64_t count,
                 DataType dtype, ReduceOp op, bool in_place) {
    const std::uint64_t seed = ++seed_;
    Bytes in = make_input(count, dtype, op, mpi_rank(), seed);
    Bytes out(in.size());
    const Collective collective{
        .kind = OpKind::kAllreduce, .op = op, .dtype = dtype, .count = count};
    Bytes& result = in_place ? in : out;
    testing::complete(*channel.launch(collective, in, result));
    EXPECT_EQ(
        testing::first_difference(result.data(), reduced(count, dtype, op, seed, ranks), dtype), -1)
        << "allreduce of " << count << ' ' << to_string(dtype) << (in_place ? " in place" : "");
  }

  std::shared_ptr<MpiWorld> world_;
  std::unique_ptr<control::ControlPlane> plane_;
  FlatBackend backend_;
  std::unique_ptr<Channel> channel_;
  std::uint64_t seed_ = 0;
};

TEST_P(FlatBackendTest, AllreducesEverySizeAroundTheBoundaries) {
  for (const std::int64_t count : {0,  1,  2,   3,   7,   15,  16,  17,   31,   33,   63,  64,
                                   65, 97, 127, 128, 129, 191, 193, 1023, 1024, 1025, 5000}) {
    allreduce(*channel_, testing::all_ranks(), count, DataType::kFloat32, ReduceOp::kSum,
              count % 2 == 0);
  }
}

TEST_P(FlatBackendTest, KeepsProcessSetsApart) {
  if (mpi_size() < 3) GTEST_SKIP() << "needs three ranks";
  // Set 11 lacks rank 0, and set 12 lacks the last rank. Both run at the same time as set 10, which
  // has all ranks.
  std::vector<int> tail = testing::all_ranks();
  tail.erase(tail.begin());
  std::vector<int> head = testing::all_ranks();
  head.pop_back();
  struct Run {
    std::vector<int> ranks;
    std::unique_ptr<Channel> channel;
    Bytes buffer = {};
    std::unique_ptr<Work> work = {};
  };
  std::vector<Run> runs;
  runs.push_back({testing::all_ranks(), open(10, testing::all_ranks())});
  runs.push_back({tail, open(11, tail)});
  runs.push_back({head, open(12, head)});
  constexpr std::int64_t kCount = 4001;
  for (std::size_t index = 0; index < runs.size(); ++index) {
    Run& run = runs[index];
    if (run.channel == nullptr) continue;
    run.buffer = make_input(kCount, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 100 + index);
    run.work =
        run.channel->launch({.kind = OpKind::kAllreduce, .count = kCount}, run.buffer, run.buffer);
  }
  std::vector<Work*> works;
  for (const Run& run : runs) works.push_back(run.work.get());
  EXPECT_TRUE(testing::complete_all(std::move(works)));
  for (std::size_t index = 0; index < runs.size(); ++index) {
    if (runs[index].channel == nullptr) continue;
    const Bytes expected =
        reduced(kCount, DataType::kFloat32, ReduceOp::kSum, 100 + index, runs[index].ranks);
    EXPECT_EQ(testing::first_difference(runs[index].buffer.data(), expected, DataType::kFloat32),
              -1)
        << "set " << index;
  }
}

TEST_P(FlatBackendTest, RefusesWrongSizes) {
  Bytes four(4);
  Bytes eight(8);
  EXPECT_THROW(channel_->launch({.kind = OpKind::kAllreduce, .count = 1}, four, eight), Error);
  EXPECT_THROW(channel_->launch({.kind = OpKind::kAllreduce, .count = 2}, four, eight), Error);
  EXPECT_THROW(channel_->launch({.kind = OpKind::kAllgather}, four, four), Error);
  EXPECT_THROW(
      channel_->launch({.kind = OpKind::kBroadcast, .count = 1, .root = mpi_size()}, four, four),
      Error);
  EXPECT_THROW(channel_->launch({.kind = OpKind::kBarrier}, {}, {}), Error);
  EXPECT_THROW(backend_.open({1 << 30, testing::all_ranks(), mpi_rank(), {}}, *plane_), Error);
}

TEST_P(FlatBackendTest, EmptyCollectivesEndAtOnce) {
  EXPECT_TRUE(channel_->launch({.kind = OpKind::kAllreduce}, {}, {})->progress());
  EXPECT_TRUE(channel_->launch({.kind = OpKind::kBroadcast}, {}, {})->progress());
  const std::vector<std::int64_t> none(static_cast<std::size_t>(mpi_size()), 0);
  EXPECT_TRUE(channel_->launch({.kind = OpKind::kAllgather, .counts = none}, {}, {})->progress());
  EXPECT_TRUE(
      channel_->launch({.kind = OpKind::kReducescatter, .counts = none}, {}, {})->progress());
  EXPECT_TRUE(
      channel_->launch({.kind = OpKind::kAlltoall, .counts = none, .send_counts = none}, {}, {})
          ->progress());
}

TEST_P(FlatBackendTest, ADroppedWorkEndsItsChannelOnly) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto doomed = open(20, testing::all_ranks());
  // Static, because MPI may write to the buffer until the process ends.
  static Bytes buffer = make_input(100'000, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 3);
  const Collective collective{.kind = OpKind::kAllreduce, .count = 100'000};
  if (mpi_rank() != 0) {  // rank 0 does not launch it
    auto work = doomed->launch(collective, buffer, buffer);
    for (int call = 0; call < 100; ++call) EXPECT_FALSE(work->progress());
    doomed->abort();
    work.reset();
    EXPECT_THROW(doomed->launch(collective, buffer, buffer), Error);
  }
  allreduce(*channel_, testing::all_ranks(), 1000, DataType::kFloat32, ReduceOp::kSum, true);
}

std::string tuning_name(const ::testing::TestParamInfo<FlatTuning>& parameter) {
  constexpr const char* kNames[] = {"Default", "Tiny", "OneAtATime", "AllDirect", "DirectPair"};
  return kNames[parameter.index];
}
INSTANTIATE_TEST_SUITE_P(Tuning, FlatBackendTest,
                         ::testing::Values(FlatTuning{}, kTiny, kOneAtATime, kAllDirect,
                                           kDirectPair),
                         tuning_name);

TEST(FlatBackend, ScoresSupportedCollectives) {
  const auto world = MpiWorld::join({.start_timeout = 30s});
  const FlatBackend backend(make_mpi_carrier(world));
  const ChannelSpec pair{.ranks = {0, 1}};
  const Topology& topology = world->topology();
  EXPECT_EQ(backend.name(), "mpi");
  EXPECT_EQ(backend.score(topology, pair, {.kind = OpKind::kAllreduce}), 10);
  EXPECT_EQ(backend.score(topology, pair, {.kind = OpKind::kAlltoall}), 10);
  EXPECT_EQ(backend.score(topology, pair, {.kind = OpKind::kBarrier}), 0);
  EXPECT_EQ(backend.score(topology, pair, {.kind = OpKind::kJoin}), 0);
  EXPECT_EQ(backend.score(topology, pair, {.kind = OpKind::kAllreduce, .op = ReduceOp::kAdasum}),
            0);
  EXPECT_EQ(backend.score(topology, {.ranks = {0}}, {.kind = OpKind::kAllreduce}), 0);
  EXPECT_EQ(backend.score(topology, {.ranks = {0, 1}, .device = {DeviceType::kCuda, 0}},
                          {.kind = OpKind::kAllreduce}),
            0);
  EXPECT_THROW(FlatBackend(make_mpi_carrier(world), {.chunk_bytes = 100}), UsageError);
  EXPECT_THROW(FlatBackend(make_mpi_carrier(world), {.slice_bytes = 100}), UsageError);
  world->farewell();
}

}  // namespace
}  // namespace hvd::flat
