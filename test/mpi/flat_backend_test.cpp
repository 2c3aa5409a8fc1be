#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "backend/flat/flat_backend.h"
#include "hvd/error.h"
#include "mpi/support/mpi_test.h"
#include "support/reference.h"
#include "transport/mpi/mpi_world.h"

// What the conformance suite does not reach: cutting into chunks and windows, several sets at once,
// sequences of different collectives, failures.

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
    .chunk_bytes = 64, .windows = 3, .direct_bytes = 0, .outstanding_chunks = 2};
constexpr FlatTuning kOneAtATime = {
    .chunk_bytes = 4096, .windows = 1, .direct_bytes = 0, .outstanding_chunks = 1};
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

  static Bytes reduced(std::int64_t count, DataType dtype, ReduceOp op, const ReduceScale& scale,
                       std::uint64_t seed, const std::vector<int>& ranks) {
    std::vector<Bytes> inputs;
    for (const int rank : ranks) inputs.push_back(make_input(count, dtype, op, rank, seed));
    return testing::reference_reduce(inputs, dtype, op, scale);
  }

  void allreduce(Channel& channel, const std::vector<int>& ranks, std::int64_t count,
                 DataType dtype, ReduceOp op, bool in_place, const ReduceScale& scale = {}) {
    const std::uint64_t seed = ++seed_;
    Bytes in = make_input(count, dtype, op, mpi_rank(), seed);
    Bytes out(in.size());
    const Collective collective{
        .kind = OpKind::kAllreduce, .op = op, .dtype = dtype, .count = count, .scale = scale};
    Bytes& result = in_place ? in : out;
    testing::complete(*channel.launch(collective, in, result));
    EXPECT_EQ(testing::first_difference(result.data(),
                                        reduced(count, dtype, op, scale, seed, ranks), dtype),
              -1)
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

TEST_P(FlatBackendTest, AllreducesEveryType) {
  for (int dtype = 0; dtype < kDataTypeCount; ++dtype) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (const bool in_place : {false, true})
        allreduce(*channel_, testing::all_ranks(), 1001, static_cast<DataType>(dtype), op,
                  in_place);
    }
  }
}

TEST_P(FlatBackendTest, ScalesInTheSamePass) {
  const ReduceScale average{.prescale = 0.5, .postscale = 3.0, .divisor = mpi_size()};
  allreduce(*channel_, testing::all_ranks(), 3001, DataType::kFloat32, ReduceOp::kSum, true,
            average);
  allreduce(*channel_, testing::all_ranks(), 3001, DataType::kBFloat16, ReduceOp::kSum, false,
            average);
}

TEST_P(FlatBackendTest, ReducescattersRaggedBlocks) {
  for (const std::int64_t base : {0, 1, 40, 3000}) {
    const std::uint64_t seed = ++seed_;
    std::vector<std::int64_t> counts;
    for (int rank = 0; rank < mpi_size(); ++rank)
      counts.push_back(rank == 1 ? 0 : base + 17 * rank);
    const std::int64_t all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    const Bytes in = make_input(all, DataType::kFloat64, ReduceOp::kSum, mpi_rank(), seed);
    Bytes out(static_cast<std::size_t>(counts[static_cast<std::size_t>(mpi_rank())]) * 8);
    testing::complete(*channel_->launch({.kind = OpKind::kReducescatter,
                                         .dtype = DataType::kFloat64,
                                         .scale = {.divisor = mpi_size()},
                                         .counts = counts},
                                        in, out));
    const Bytes whole = reduced(all, DataType::kFloat64, ReduceOp::kSum, {.divisor = mpi_size()},
                                seed, testing::all_ranks());
    const auto first =
        std::accumulate(counts.begin(), counts.begin() + mpi_rank(), std::int64_t{0}) * 8;
    EXPECT_TRUE(std::equal(out.begin(), out.end(), whole.begin() + first)) << "base " << base;
  }
}

TEST_P(FlatBackendTest, AllgathersRaggedBlocks) {
  for (const std::int64_t base : {0, 1, 5000}) {
    const std::uint64_t seed = ++seed_;
    std::vector<std::int64_t> counts;
    Bytes expected;
    for (int rank = 0; rank < mpi_size(); ++rank) {
      counts.push_back(rank == 0 && mpi_size() > 1 ? 0 : base * rank + 3);
      const Bytes part = make_input(counts.back(), DataType::kInt32, ReduceOp::kSum, rank, seed);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const Bytes in = make_input(counts[static_cast<std::size_t>(mpi_rank())], DataType::kInt32,
                                ReduceOp::kSum, mpi_rank(), seed);
    Bytes out(expected.size());
    testing::complete(*channel_->launch(
        {.kind = OpKind::kAllgather, .dtype = DataType::kInt32, .counts = counts}, in, out));
    EXPECT_TRUE(out == expected) << "base " << base;
  }
}

TEST_P(FlatBackendTest, BroadcastsFromEveryRoot) {
  for (int root = 0; root < mpi_size(); ++root) {
    for (const std::int64_t count : {1, 63, 64, 65, 30'001}) {
      const Bytes expected = make_input(count, DataType::kUInt8, ReduceOp::kSum, root, ++seed_);
      const bool is_root = root == mpi_rank();
      const bool in_place = count % 2 == 1;
      Bytes out = is_root && in_place ? expected : Bytes(expected.size());
      const Bytes apart = is_root ? expected : Bytes{};
      const std::span<const std::byte> in =
          is_root && in_place ? std::span<const std::byte>(out) : std::span<const std::byte>(apart);
      testing::complete(*channel_->launch(
          {.kind = OpKind::kBroadcast, .dtype = DataType::kUInt8, .count = count, .root = root}, in,
          out));
      EXPECT_TRUE(out == expected) << "root " << root << ", count " << count;
    }
  }
}

TEST_P(FlatBackendTest, ExchangesAlltoall) {
  const int size = mpi_size();
  // Rank s sends this many elements to rank d.
  const auto amount = [](int s, int d) {
    return static_cast<std::int64_t>((s * 7 + d * 3) % 4) * 500;
  };
  std::vector<std::int64_t> sent;
  std::vector<std::int64_t> received;
  Bytes in;
  Bytes expected;
  for (int peer = 0; peer < size; ++peer) {
    sent.push_back(amount(mpi_rank(), peer));
    received.push_back(amount(peer, mpi_rank()));
    const Bytes to =
        make_input(sent.back(), DataType::kInt16, ReduceOp::kSum, mpi_rank() * size + peer, 5);
    const Bytes from =
        make_input(received.back(), DataType::kInt16, ReduceOp::kSum, peer * size + mpi_rank(), 5);
    in.insert(in.end(), to.begin(), to.end());
    expected.insert(expected.end(), from.begin(), from.end());
  }
  Bytes out(expected.size());
  testing::complete(*channel_->launch({.kind = OpKind::kAlltoall,
                                       .dtype = DataType::kInt16,
                                       .counts = received,
                                       .send_counts = sent},
                                      in, out));
  EXPECT_TRUE(out == expected);
}

TEST_P(FlatBackendTest, RunsDifferentCollectivesOneAfterAnotherWithoutBarriers) {
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(mpi_size()), 257);
  for (int round = 0; round < 30; ++round) {
    allreduce(*channel_, testing::all_ranks(), 1 + round * 37, DataType::kFloat16, ReduceOp::kSum,
              round % 2 == 0);
    const int root = round % mpi_size();
    const Bytes expected =
        make_input(777, DataType::kInt64, ReduceOp::kMax, root, static_cast<std::uint64_t>(round));
    Bytes buffer = root == mpi_rank() ? expected : Bytes(expected.size());
    testing::complete(*channel_->launch(
        {.kind = OpKind::kBroadcast, .dtype = DataType::kInt64, .count = 777, .root = root}, buffer,
        buffer));
    EXPECT_TRUE(buffer == expected);
    const Bytes part(257, std::byte(mpi_rank() + round));
    Bytes gathered(static_cast<std::size_t>(257 * mpi_size()));
    testing::complete(*channel_->launch(
        {.kind = OpKind::kAllgather, .dtype = DataType::kUInt8, .counts = counts}, part, gathered));
    for (int rank = 0; rank < mpi_size(); ++rank)
      EXPECT_EQ(gathered[static_cast<std::size_t>(257 * rank + 256)], std::byte(rank + round));
  }
}

TEST_P(FlatBackendTest, KeepsProcessSetsApart) {
  if (mpi_size() < 3) GTEST_SKIP() << "needs three ranks";
  // Set 1 leaves out rank 0, set 2 leaves out the last; both work at the same time as the set of
  // all.
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
        reduced(kCount, DataType::kFloat32, ReduceOp::kSum, {}, 100 + index, runs[index].ranks);
    EXPECT_EQ(testing::first_difference(runs[index].buffer.data(), expected, DataType::kFloat32),
              -1)
        << "set " << index;
  }
}

TEST_P(FlatBackendTest, WakesAPeerThatSleeps) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  // Every rank sleeps on its doorbell whenever progress() has nothing to do; a missed ring would
  // cost ten seconds.
  const SteadyClock clock;
  const TimePoint start = clock.now();
  constexpr std::int64_t kCount = 500;
  for (int round = 0; round < 20; ++round) {
    Bytes buffer = make_input(kCount, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 9);
    if (round % mpi_size() == mpi_rank()) std::this_thread::sleep_for(3ms);
    const auto work =
        channel_->launch({.kind = OpKind::kAllreduce, .count = kCount}, buffer, buffer);
    for (;;) {
      const std::uint32_t ticket = plane_->doorbell().ticket();
      if (work->progress()) break;
      if (work->moved()) continue;
      plane_->doorbell().sleep(ticket, Doorbell::Sleeper::kStandby, 10s);
    }
    EXPECT_EQ(testing::first_difference(
                  buffer.data(),
                  reduced(kCount, DataType::kFloat32, ReduceOp::kSum, {}, 9, testing::all_ranks()),
                  DataType::kFloat32),
              -1);
  }
  EXPECT_LT(clock.now() - start, 9s);
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
  // Static, because MPI may write to it until the process ends.
  static Bytes buffer = make_input(100'000, DataType::kFloat32, ReduceOp::kSum, mpi_rank(), 3);
  const Collective collective{.kind = OpKind::kAllreduce, .count = 100'000};
  if (mpi_rank() != 0) {  // rank 0 never takes part
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

TEST(FlatBackend, ScoresWhatItCanDo) {
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
  world->farewell();
}

}  // namespace
}  // namespace hvd::flat
