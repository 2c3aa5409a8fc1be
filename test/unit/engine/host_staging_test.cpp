// Tests how a batch is packed for a collective in the host's memory and unpacked again.
#include "engine/host_staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "hvd/error.h"
#include "support/batches.h"

namespace hvd::testing {
namespace {

using runtime::Batch;
using runtime::FusionBufferPool;
using runtime::FusionLease;
using runtime::HostStaging;
using runtime::Staged;
using ::testing::Each;
using ::testing::ElementsAre;

using Floats = std::vector<float>;

Floats floats_in(std::span<const std::byte> bytes) {
  Floats values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}
void add_hundred(std::span<std::byte> bytes) {
  Floats values = floats_in(bytes);
  for (float& value : values) value += 100;
  std::memcpy(bytes.data(), values.data(), bytes.size());
}

class HostStagingTest : public ::testing::Test {
 protected:
  HostStagingTest() : staging_(pool_) {}
  /// The batch of rank 0 of two, with tensors a = {1, 2} and b = {3}.
  Batch fused(OpKind kind = OpKind::kAllreduce, int root = 0) {
    std::vector<wire::Request> requests = {float_request("a", 2, kind),
                                           float_request("b", 1, kind)};
    for (wire::Request& one : requests) one.root = root;
    return Batch(agreed_batch(requests, 2),
                 {float_state(requests[0], a_), float_state(requests[1], b_)}, 0);
  }
  static Batch absent(const wire::Request& asked) {
    control::AgreedBatch agreed = agreed_batch({asked}, 2);
    agreed.absent = {0};
    agreed.absent_here = true;
    return Batch(std::move(agreed), {}, 0);
  }

  const Staged& stage(const Batch& batch) {
    const Staged& staged = staging_.stage(batch);
    while (!staging_.pack_part(batch)) {
    }
    return staged;
  }
  EventPtr unstage(const Batch& batch) {
    while (!staging_.unpack_part(batch)) {
    }
    return staging_.unstage(batch, nullptr);
  }

  FusionBufferPool pool_;
  HostStaging staging_;
  Floats a_ = {1, 2};
  Floats b_ = {3};
};

TEST_F(HostStagingTest, SeveralTensorsPassThroughOneBuffer) {
  const Batch batch = fused();
  for (int use = 0; use < 2; ++use) {
    a_ = {1, 2};
    b_ = {3};
    const Staged& staged = stage(batch);
    EXPECT_THAT(floats_in(staged.in), ElementsAre(1, 2, 3));
    EXPECT_EQ(staged.in.data(), staged.out.data());
    EXPECT_EQ(staged.collective.count, 3);
    EXPECT_EQ(pool_.free_buffers(), 0U);
    add_hundred(staged.out);
    EXPECT_THAT(a_, ElementsAre(1, 2)) << "not before it is unstaged";
    EXPECT_EQ(unstage(batch), nullptr);
    EXPECT_THAT(a_, ElementsAre(101, 102));
    EXPECT_THAT(b_, ElementsAre(103));
    EXPECT_EQ(pool_.free_buffers(), 1U) << "given back";
  }
}

TEST_F(HostStagingTest, OneCallMovesAboutAMiB) {
  constexpr std::size_t kCount = 1 << 20;  // 4 MiB, and some more
  const std::vector<wire::Request> requests = {float_request("a", kCount), float_request("b", 1)};
  a_.assign(kCount, 1.0F);
  const Batch batch(agreed_batch(requests, 2),
                    {float_state(requests[0], a_), float_state(requests[1], b_)}, 0);
  const Staged& staged = staging_.stage(batch);
  std::memset(staged.out.data(), 0, staged.out.size());
  std::size_t before = 0;
  for (bool packed = false; !packed;) {
    packed = staging_.pack_part(batch);
    const Floats values = floats_in(staged.in);
    const std::size_t now = kCount + 1 - std::count(values.begin(), values.end(), 0.0F);
    EXPECT_LE((now - before) * sizeof(float), std::size_t{1} << 20);
    before = now;
  }
  EXPECT_EQ(before, kCount + 1);
  add_hundred(staged.out);
  int calls = 1;
  while (!staging_.unpack_part(batch)) ++calls;
  EXPECT_GE(calls, 4);
  EXPECT_LE(calls, 6);
  staging_.unstage(batch, nullptr);
  EXPECT_THAT(a_, Each(101.0F));
  EXPECT_THAT(b_, ElementsAre(103.0F));
  int fills = 1;
  const Batch neutral = absent(requests[0]);
  const Staged& filled = staging_.stage(neutral);
  while (!staging_.pack_part(neutral)) ++fills;
  EXPECT_EQ(fills, 4);
  EXPECT_THAT(floats_in(filled.in), Each(0.0F));
  unstage(neutral);
}

TEST_F(HostStagingTest, ATensorByItselfIsUsedWhereItLies) {
  const wire::Request asked = float_request("a", 2);
  const runtime::OperationPtr operation = float_state(asked, a_);
  Floats result(2);
  operation->submission.output.data = reinterpret_cast<std::byte*>(result.data());
  const Batch batch(agreed_batch({asked}, 2), {operation}, 0);
  const Staged& staged = stage(batch);
  EXPECT_EQ(static_cast<const void*>(staged.in.data()), a_.data());
  EXPECT_EQ(static_cast<const void*>(staged.out.data()), result.data());
  EXPECT_EQ(staged.out.size(), 2 * sizeof(float));
  unstage(batch);
  EXPECT_THAT(result, Each(0.0F)) << "nothing was copied";
  EXPECT_EQ(pool_.free_buffers(), 0U) << "nothing was leased";
}

TEST_F(HostStagingTest, AReceiverOfABroadcastDoesNotPack) {
  {  // the contents of the buffer when it is leased next
    const runtime::FusionLease lease = pool_.lease(3 * sizeof(float));
    std::memset(lease.bytes().data(), 0, lease.bytes().size());
  }
  const Batch batch = fused(OpKind::kBroadcast, 1);
  EXPECT_THAT(floats_in(stage(batch).out), Each(0.0F));
  unstage(batch);
  EXPECT_THAT(a_, ElementsAre(0, 0));
  const Batch at_root = fused(OpKind::kBroadcast, 0);
  b_ = {7};
  EXPECT_THAT(floats_in(stage(at_root).in), ElementsAre(0, 0, 7));
  unstage(at_root);
}

TEST_F(HostStagingTest, AnAbandonedBufferIsNotReused) {
  {
    const Batch batch = fused();
    std::span<std::byte> out = stage(batch).out;
    staging_.abandon();
    EXPECT_EQ(pool_.free_buffers(), 0U);
    add_hundred(out);  // a peer writes, which AddressSanitizer checks
    EXPECT_NE(stage(batch).out.data(), out.data());
    unstage(batch);
  }
  EXPECT_EQ(pool_.free_buffers(), 1U);
}

TEST_F(HostStagingTest, NeitherDoesTheInputsBufferWhereTheOutputHasOneOfItsOwn) {
  const std::vector<wire::Request> requests = {float_request("a", 2, OpKind::kReducescatter),
                                               float_request("c", 2, OpKind::kReducescatter)};
  Floats c = {3, 4};
  const Batch batch(agreed_batch(requests, 2),
                    {float_state(requests[0], a_), float_state(requests[1], c)}, 0);
  {
    HostStaging staging(pool_);
    const Staged& staged = staging.stage(batch);
    EXPECT_TRUE(staging.pack_part(batch));
    EXPECT_THAT(floats_in(staged.in), ElementsAre(1, 3, 2, 4)) << "rank by rank";
    EXPECT_EQ(staged.out.size(), 2 * sizeof(float));
    staging.abandon();
  }
  EXPECT_EQ(pool_.free_buffers(), 0U);
}

TEST_F(HostStagingTest, AnAbsentRankContributesNeutralValues) {
  wire::Request asked = float_request("a", 2);
  for (const auto& [op, neutral] : std::vector<std::pair<ReduceOp, float>>{
           {ReduceOp::kSum, 0.0F}, {ReduceOp::kAverage, 0.0F}, {ReduceOp::kProduct, 1.0F}}) {
    asked.op = op;
    const Batch batch = absent(asked);
    const Staged& staged = stage(batch);
    EXPECT_THAT(floats_in(staged.in), Each(neutral));
    EXPECT_EQ(staged.collective.scale.divisor, 1) << "of those that are there";
    unstage(batch);
  }
  asked.op = ReduceOp::kAverageOfSet;
  const Batch batch = absent(asked);
  EXPECT_EQ(stage(batch).collective.scale.divisor, 2);
  unstage(batch);
  EXPECT_EQ(pool_.free_buffers(), 1U);
}

TEST_F(HostStagingTest, FactorsOfCastElementsAreAppliedWhereTheyDoNotOverflow) {
  wire::Request asked = float_request("a", 2);
  asked.compression = Compression::kFloat16;
  asked.prescale = 0.5;
  asked.postscale = 4.0;
  const Batch batch(agreed_batch({asked}, 2), {float_state(asked, a_)}, 0);
  const Staged& staged = stage(batch);
  EXPECT_EQ(staged.in.size(), 4U);
  EXPECT_EQ(staged.collective.dtype, DataType::kFloat16);
  EXPECT_EQ(staged.collective.scale.prescale, 1.0);
  EXPECT_EQ(staged.collective.scale.postscale, 1.0);
  unstage(batch);
  EXPECT_THAT(a_, ElementsAre(2, 4)) << "halved on its way in, four times that on its way out";
}

TEST_F(HostStagingTest, GatheredRowsLieRankByRankAndAnOutputOfTheWrongSizeIsAnError) {
  std::vector<wire::Request> requests = {float_request("a", 2, OpKind::kAllgather),
                                         float_request("b", 1, OpKind::kAllgather)};
  control::AgreedBatch agreed = agreed_batch(requests, 2);
  agreed.operations[0].first_dims = {2, 1};
  agreed.operations[1].first_dims = {1, 2};
  Floats out_a(3);
  Floats out_b(3);
  const runtime::OperationPtr a = float_state(requests[0], a_);
  const runtime::OperationPtr b = float_state(requests[1], b_);
  const auto giving = [](Floats& memory) {
    return [&memory](const OutputSizes&) {
      return TensorView{reinterpret_cast<std::byte*>(memory.data()),
                        static_cast<std::int64_t>(memory.size()),
                        DataType::kFloat32,
                        {},
                        {}};
    };
  };
  a->submission.allocate_output = giving(out_a);
  b->submission.allocate_output = giving(out_b);
  const Batch batch(std::move(agreed), {a, b}, 0);
  const Staged& staged = stage(batch);
  EXPECT_THAT(staged.collective.counts, ElementsAre(3, 3));
  EXPECT_THAT(floats_in(staged.in), ElementsAre(1, 2, 3));
  const Floats received = {1, 2, 3, 11, 12, 13};
  std::memcpy(staged.out.data(), received.data(), staged.out.size());
  unstage(batch);
  EXPECT_THAT(out_a, ElementsAre(1, 2, 11));
  EXPECT_THAT(out_b, ElementsAre(3, 12, 13));
  out_b.resize(2);
  EXPECT_THROW(stage(batch), Error);
}

TEST(FusionBufferPool, GivesAlignedMemoryOfTheSize) {
  FusionBufferPool pool;
  for (const std::size_t size : {0UL, 1UL, 63UL, 64UL, 1000UL, 1UL << 20}) {
    const FusionLease lease = pool.lease(size);
    EXPECT_EQ(lease.bytes().size(), size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lease.bytes().data()) % 64, 0U);
  }
}

TEST(FusionBufferPool, ReusesMemoryAndKeepsTheTwoLargest) {
  FusionBufferPool pool;
  const std::byte* large = nullptr;
  {
    const FusionLease a = pool.lease(100), b = pool.lease(5000), c = pool.lease(300);
    large = b.bytes().data();
  }
  EXPECT_EQ(pool.free_buffers(), 2U);
  EXPECT_EQ(pool.lease(4000).bytes().data(), large);
}

TEST(FusionBufferPool, TrimsLargeBuffers) {
  FusionBufferPool pool;
  { const FusionLease small = pool.lease(100), large = pool.lease(5000); }
  pool.trim(4000);
  EXPECT_EQ(pool.free_buffers(), 1U);
  pool.trim(100);
  EXPECT_EQ(pool.free_buffers(), 1U);
}

TEST(FusionBufferPool, TwoLeasesNeverShare) {
  FusionBufferPool pool;
  { const FusionLease first = pool.lease(64); }
  const FusionLease a = pool.lease(64), b = pool.lease(64);
  EXPECT_NE(a.bytes().data(), b.bytes().data());
}

TEST(FusionBufferPool, AMovedLeaseGivesBackOnce) {
  FusionBufferPool pool;
  {
    FusionLease a = pool.lease(64);
    FusionLease b = std::move(a);
    a = std::move(b);
    a = pool.lease(128);
    EXPECT_EQ(pool.free_buffers(), 1U);
  }
  EXPECT_EQ(pool.free_buffers(), 2U);
}

}  // namespace
}  // namespace hvd::testing
