// The channel's own fusion buffers: registered with NCCL, and symmetric windows, on all ranks or on
// none.
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
    EXPECT_EQ(nccl_->counts(rank).registrations, 2) << "and not again";
  }
  EXPECT_EQ(allreduce(sum(2), {{1, 2}, {3, 4}, {5, 6}}), (std::vector<float>{9, 12}));
  for (int rank = 0; rank < 3; ++rank) {
    Channel& channel = *ranks_[static_cast<std::size_t>(rank)]->channel;
    channel.give_back_fusion_buffers();
    channel.give_back_fusion_buffers();
    EXPECT_TRUE(channel.fusion_buffers().empty());
    EXPECT_EQ(nccl_->counts(rank).registered, 0);
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
  end_ranks();
  EXPECT_EQ(nccl_->counts(0).destroyed, 1);
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

TEST_F(NcclChannelTest, AnAbortComesBeforeTheBuffersAreFreed) {
  start(2, {}, {.registered_bytes = kRegistered});
  ASSERT_TRUE(connect(2));
  for (int rank = 0; rank < 2; ++rank) {
    Channel& channel = *ranks_[static_cast<std::size_t>(rank)]->channel;
    channel.abort();
    channel.wait_for_abort();
    EXPECT_EQ(nccl_->counts(rank).registered, 0) << "NCCL has undone it";
    EXPECT_EQ(nccl_->counts(rank).allocated, 2);
    channel.give_back_fusion_buffers();
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

TEST_F(NcclChannelTest, AnAbortWhileTheRanksVoteLeavesNothingBehind) {
  if (nccl_launches_on_thread()) GTEST_SKIP() << "it stops between two steps of NCCL";
  start(2, {}, {.registered_bytes = kRegistered});
  // Rank 1 stops asking as soon as it has joined, so rank 0 has registered and waits for its vote.
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
    channel.give_back_fusion_buffers();
    EXPECT_EQ(nccl_->counts(rank).registered, 0);
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

class NcclRegistrationTest : public NcclChannelTest {
 protected:
  /// The communicator works, and no rank has a buffer of its own.
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
    EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  }
};

TEST_F(NcclRegistrationTest, OldVersionsRegisterNothing) {
  start(2, {.version = 21805}, {.registered_bytes = kRegistered});
  expect_none(2);
  EXPECT_EQ(nccl_->counts(0).registrations, 0);
}

TEST_F(NcclRegistrationTest, SwitchedOffItRegistersNothing) {
  start(2);
  expect_none(2);
  EXPECT_EQ(nccl_->counts(0).registrations, 0);
}

TEST_F(NcclRegistrationTest, ARankAloneRegistersNothing) {
  start(1, {}, {.registered_bytes = kRegistered});
  expect_none(1);
  EXPECT_EQ(nccl_->counts(0).registrations, 0);
}

TEST_F(NcclRegistrationTest, WhereOneRankCannotRegisterNoneDoes) {
  start(3, {.register_throws_at = 1}, {.registered_bytes = kRegistered});
  expect_none(3);
  EXPECT_EQ(nccl_->counts(0).registrations, 2) << "it could have";
}

TEST_F(NcclRegistrationTest, WhereOneRankHasNoMemoryForItNoneRegisters) {
  start(3, {.allocate_throws_at = 2}, {.registered_bytes = kRegistered});
  expect_none(3);
  EXPECT_EQ(nccl_->counts(0).registrations, 2) << "it could have";
}

TEST_F(NcclRegistrationTest, RanksThatDifferRegisterNothing) {
  start(3, {}, {.registered_bytes = kRegistered},
        nccl::NcclOptions{.registered_bytes = 2 * kRegistered});
  expect_none(3);
  EXPECT_EQ(nccl_->counts(0).registrations, 2) << "it could have";
}

TEST_F(NcclRegistrationTest, WhereOneRankHasSwitchedItOffNoneRegisters) {
  start(3, {}, {.registered_bytes = kRegistered}, nccl::NcclOptions{});
  expect_none(3);
}

constexpr nccl::NcclOptions kWindows{.registered_bytes = kRegistered, .windows = true};

class NcclWindowTest : public NcclChannelTest {
 protected:
  /// The communicator works with registered buffers, of which so many are windows, and all of it is
  /// given back.
  void expect_registered(std::size_t ranks, int windows) {
    ASSERT_TRUE(connect(ranks));
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(ranks_[rank]->channel->fusion_buffers().size(), 2U) << rank;
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).registered, 2) << rank;
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).windows, windows) << rank;
    }
    EXPECT_EQ(allreduce(sum(1), std::vector<std::vector<float>>(ranks, {1.0F})),
              std::vector<float>{static_cast<float>(ranks)});
    for (const auto& rank : ranks_) rank->channel->give_back_fusion_buffers();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const FakeNcclCounts counts = nccl_->counts(static_cast<int>(rank));
      EXPECT_EQ(counts.windows, 0) << rank;
      EXPECT_EQ(counts.registered, 0) << rank;
      EXPECT_EQ(counts.allocated, 0) << rank;
    }
    end_ranks();
    EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  }
  void expect_error(std::size_t ranks, const std::string& what) {
    try {
      connect(ranks);
      ADD_FAILURE() << "expected an Error";
    } catch (const PeerLostError&) {
      ADD_FAILURE() << "nobody is lost";
    } catch (const Error& error) {
      const std::string text = error.what();
      for (const std::string& part :
           {what, std::string("HVD_NCCL_REGISTER=window"), std::string("HVD_NCCL_REGISTER=auto")}) {
        EXPECT_NE(text.find(part), std::string::npos) << text;
      }
    }
    abort_all();
  }
  /// And the buffers are freed afterwards.
  void abort_all() {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank]->channel->abort();
      ranks_[rank]->channel->give_back_fusion_buffers();
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).windows, 0) << rank;
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).registered, 0) << rank;
      EXPECT_EQ(nccl_->counts(static_cast<int>(rank)).allocated, 0) << rank;
    }
    EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
  }
};

TEST_F(NcclWindowTest, BothBuffersAreWindowsOnAllRanks) {
  start(3, {.version = 22700}, kWindows);
  expect_registered(3, 2);
}

TEST_F(NcclWindowTest, NcclTakesItsTimeForThem) {
  start(3, {.busy_answers = 7}, kWindows);
  expect_registered(3, 2);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(nccl_->counts(rank).windows_begun, 2);
}

TEST_F(NcclWindowTest, OnlyWhereTheyWereAskedFor) {
  start(2, {}, {.registered_bytes = kRegistered});
  expect_registered(2, 0);
  EXPECT_EQ(nccl_->counts(0).windows_begun, 0);
}

TEST_F(NcclWindowTest, OlderVersionsRegisterWithoutThem) {
  start(2, {.version = 22600}, kWindows);
  expect_registered(2, 0);
  EXPECT_EQ(nccl_->counts(0).windows_begun, 0);
}

TEST_F(NcclWindowTest, WhereOneRanksLibraryHasNoneNoneIsBegun) {
  start(3, {.no_windows_at = 1}, kWindows);
  expect_registered(3, 0);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(nccl_->counts(rank).windows_begun, 0);
}

TEST_F(NcclWindowTest, WhereOneRankWantsNoneNoneIsBegun) {
  start(3, {}, kWindows, nccl::NcclOptions{.registered_bytes = kRegistered});
  expect_registered(3, 0);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(nccl_->counts(rank).windows_begun, 0);
}

TEST_F(NcclWindowTest, WithoutRegisteredBuffersOnOneRankNoneIsBegun) {
  start(3, {.register_throws_at = 2}, kWindows);
  ASSERT_TRUE(connect(3));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(nccl_->counts(rank).windows_begun, 0);
    EXPECT_EQ(nccl_->counts(rank).allocated, 0);
  }
}

TEST_F(NcclWindowTest, WhereNcclHasNoUseForThemTheBuffersStayRegistered) {
  start(3, {.null_windows_from = 0}, kWindows);
  expect_registered(3, 0);
}

TEST_F(NcclWindowTest, ShouldOneRankGetNoneTheOthersEndTheirs) {
  start(3, {.null_windows_from = 2}, kWindows);
  expect_registered(3, 0);
}

TEST_F(NcclWindowTest, AnErrorNamesTheSettingAndTheWayOut) {
  start(2, {.window_throws_at = 1}, kWindows);
  expect_error(2, "not an address of cuMem");
}

TEST_F(NcclWindowTest, AnErrorThatComesLaterDoesToo) {
  start(2, {.window_fails_at = 1}, kWindows);
  expect_error(2, "out of device memory");
}

TEST_F(NcclWindowTest, ARankThatDoesNotComeIsLostAfterTheDeadline) {
  if (nccl_launches_on_thread()) GTEST_SKIP() << "it stops between two steps of NCCL";
  nccl::NcclOptions options = kWindows;
  options.init_timeout = seconds(7);
  start(2, {.window_throws_at = 1}, options);
  for (int round = 0; round < 50 && nccl_->counts(0).windows_begun == 0; ++round) {
    ranks_[0]->channel->ready();
    try {
      ranks_[1]->channel->ready();
    } catch (const Error&) {  // and says nothing to rank 0
    }
  }
  for (int round = 0; round < 20; ++round) EXPECT_FALSE(ranks_[0]->channel->ready());
  clock_.now_ += seconds(8);
  try {
    ranks_[0]->channel->ready();
    ADD_FAILURE() << "expected a PeerLostError";
  } catch (const PeerLostError& error) {
    EXPECT_NE(std::string(error.what()).find("HVD_NCCL_REGISTER=window"), std::string::npos)
        << error.what();
  }
  abort_all();
}

TEST_F(NcclWindowTest, AnAbortUndoesThemBeforeTheBuffersAreFreed) {
  start(2, {}, kWindows);
  ASSERT_TRUE(connect(2));
  EXPECT_EQ(nccl_->counts(0).windows, 2);
  abort_all();
}

TEST_F(NcclWindowTest, AnEndOrAnAbortWhileOneIsMadeLeavesNothingBehind) {
  if (nccl_launches_on_thread()) GTEST_SKIP() << "it stops between two steps of NCCL";
  for (const bool aborts : {true, false}) {
    ranks_.clear();
    start(2, {.busy_answers = 5}, kWindows);
    for (int round = 0; round < 90 && nccl_->counts(0).windows_begun == 0; ++round) {
      for (const auto& rank : ranks_) EXPECT_FALSE(rank->channel->ready());
    }
    ASSERT_EQ(nccl_->counts(0).windows_begun, 1);
    if (aborts) abort_all();
    end_ranks();
    EXPECT_EQ(nccl_->counts(0).aborted, 1);
    EXPECT_EQ(nccl_->counts(0).windows, 0);
  }
  EXPECT_TRUE(gpu_.faults().empty()) << gpu_.faults().front();
}

}  // namespace
}  // namespace hvd::testing
