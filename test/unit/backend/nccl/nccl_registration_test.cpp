// The channel's fusion buffers are registered with NCCL on all ranks, or on no rank.
#include <string>

#include "unit/backend/nccl/nccl_channel_test.h"

namespace hvd::testing {
namespace {

constexpr std::size_t kRegistered = 4096;

TEST_F(NcclChannelTest, TwoBuffersAreRegisteredBeforeTheFirstLaunchAndGivenBackInOrder) {
  start(3, {.version = 21900}, {.registered_bytes = kRegistered});
  ASSERT_TRUE(connect(3));
  for (int rank = 0; rank < 3; ++rank) {
    Channel& channel = *ranks_[static_cast<std::size_t>(rank)]->channel;
    ASSERT_EQ(channel.fusion_buffers().size(), 2U);
    for (const auto& buffer : channel.fusion_buffers()) EXPECT_EQ(buffer.size(), kRegistered);
    EXPECT_TRUE(channel.ready());
    EXPECT_EQ(nccl_->counts(rank).registrations, 2) << "not registered again";
  }
  EXPECT_EQ(allreduce(sum(2), {{1, 2}, {3, 4}, {5, 6}}), (std::vector<float>{9, 12}));
  for (int rank = 0; rank < 3; ++rank) {
    Channel& channel = *ranks_[static_cast<std::size_t>(rank)]->channel;
    channel.release_fusion_buffers();
    channel.release_fusion_buffers();
    EXPECT_TRUE(channel.fusion_buffers().empty());
    EXPECT_EQ(nccl_->counts(rank).registered, 0);
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
  end_ranks();
  EXPECT_EQ(nccl_->counts(0).destroyed, 1);
}

TEST_F(NcclChannelTest, AnAbortComesBeforeTheBuffersAreFreed) {
  start(2, {}, {.registered_bytes = kRegistered});
  ASSERT_TRUE(connect(2));
  for (int rank = 0; rank < 2; ++rank) {
    Channel& channel = *ranks_[static_cast<std::size_t>(rank)]->channel;
    channel.abort();
    channel.wait_for_abort();
    EXPECT_EQ(nccl_->counts(rank).registered, 0) << "the abort ends registrations";
    EXPECT_EQ(nccl_->counts(rank).allocated, 2);
    channel.release_fusion_buffers();
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
}

TEST_F(NcclChannelTest, AnAbortWhileTheRanksVoteLeavesNothingBehind) {
  if (nccl_launches_on_thread()) GTEST_SKIP() << "it has to stop between two steps of NCCL";
  start(2, {}, {.registered_bytes = kRegistered});
  // Rank 1 stops calling ready() once it has joined, so rank 0 has registered and waits for its
  // vote.
  for (int round = 0; round < 50 && nccl_->counts(0).registered < 2; ++round) {
    EXPECT_FALSE(ranks_[0]->channel->ready());
    if (nccl_->counts(1).inits > 0) continue;
    EXPECT_FALSE(ranks_[1]->channel->ready());
  }
  ASSERT_EQ(nccl_->counts(0).registered, 2);
  EXPECT_FALSE(ranks_[0]->channel->ready());
  for (int rank = 0; rank < 2; ++rank) {
    Channel& channel = *ranks_[static_cast<std::size_t>(rank)]->channel;
    channel.abort();
    channel.release_fusion_buffers();
    EXPECT_EQ(nccl_->counts(rank).registered, 0);
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
}

class NcclRegistrationTest : public NcclChannelTest {
 protected:
  /// Checks that the communicator works and no rank has registered buffers.
  void expect_none(std::size_t ranks) {
    ASSERT_TRUE(connect(ranks));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(ranks_[rank]->channel->fusion_buffers().empty()) << rank;
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).registered, 0) << rank;
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).allocated, 0) << rank;
    }
    EXPECT_EQ(allreduce(sum(1), std::vector<std::vector<float>>(ranks, {1.0F})),
              std::vector<float>{static_cast<float>(ranks)});
    end_ranks();
  }
};

TEST_F(NcclRegistrationTest, OldVersionsDoNotRegister) {
  start(2, {.version = 21805}, {.registered_bytes = kRegistered});
  expect_none(2);
  EXPECT_EQ(nccl_->counts(0).registrations, 0);
}

TEST_F(NcclRegistrationTest, DoesNotRegisterWhenSwitchedOff) {
  start(2);
  expect_none(2);
  EXPECT_EQ(nccl_->counts(0).registrations, 0);
}

TEST_F(NcclRegistrationTest, ASetOfOneDoesNotRegister) {
  start(1, {}, {.registered_bytes = kRegistered});
  expect_none(1);
  EXPECT_EQ(nccl_->counts(0).registrations, 0);
}

TEST_F(NcclRegistrationTest, NoRankRegistersIfOneCannot) {
  start(3, {.register_throws_at = 1}, {.registered_bytes = kRegistered});
  expect_none(3);
  EXPECT_EQ(nccl_->counts(0).registrations, 2) << "rank 0 was able to";
}

TEST_F(NcclRegistrationTest, NoRankRegistersIfOneHasNoMemory) {
  start(3, {.allocate_throws_at = 2}, {.registered_bytes = kRegistered});
  expect_none(3);
  EXPECT_EQ(nccl_->counts(0).registrations, 2) << "rank 0 was able to";
}

TEST_F(NcclRegistrationTest, RanksWithDifferentSizesDoNotRegister) {
  start(3, {}, {.registered_bytes = kRegistered},
        nccl::NcclOptions{.registered_bytes = 2 * kRegistered});
  expect_none(3);
  EXPECT_EQ(nccl_->counts(0).registrations, 2) << "rank 0 was able to";
}

TEST_F(NcclRegistrationTest, NoRankRegistersIfOneHasSwitchedItOff) {
  start(3, {}, {.registered_bytes = kRegistered}, nccl::NcclOptions{});
  expect_none(3);
}

}  // namespace
}  // namespace hvd::testing
