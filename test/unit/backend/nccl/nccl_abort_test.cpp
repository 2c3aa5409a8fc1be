// When a device hangs, communicators still end, and no thread waits for the device forever.
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "unit/backend/nccl/nccl_channel_test.h"

namespace hvd::testing {
namespace {

/// Options for a rank whose device hangs, with a short timeout, and for the other ranks.
constexpr nccl::NcclOptions kHangs{.teardown_timeout = std::chrono::milliseconds(100),
                                   .registered_bytes = 4096};
constexpr nccl::NcclOptions kEnds{.teardown_timeout = seconds(20), .registered_bytes = 4096};

class NcclAbortTest : public NcclChannelTest {
 protected:
  /// Starts an endless computation of the program on this rank's GPU.
  void hang(std::size_t rank) {
    programs_.push_back(std::make_unique<device::OwnedStream>(*ranks_[rank]->device));
    gpu_.hang(programs_.back()->get());
  }
  bool given_up(std::size_t rank) { return ranks_[rank]->device->api().given_up(); }
  void end_all() {
    for (const auto& channel : second_) channel->release_fusion_buffers();
    for (const auto& rank : ranks_) rank->channel->release_fusion_buffers();
    second_.clear();
    end_ranks();
  }
  void launch(Channel& channel) {
    const auto memory = tensor({1, 2, 3});
    const auto work = channel.launch(sum(3), memory, memory);
    while (!work->progress()) {
    }
  }

  std::vector<std::unique_ptr<device::OwnedStream>> programs_;
  std::vector<std::unique_ptr<Channel>> second_;
};

TEST_F(NcclAbortTest, AHangingGpuIsGivenUp) {
  start(2, {}, kHangs, kEnds);
  ASSERT_TRUE(connect(2));
  hang(0);
  for (const auto& rank : ranks_) rank->channel->abort();
  EXPECT_FALSE(given_up(0)) << "no thread has waited yet";
  for (const auto& rank : ranks_) {
    rank->channel->wait_for_abort();
    rank->channel->release_fusion_buffers();
  }
  end_ranks();
  EXPECT_TRUE(given_up(0));
  EXPECT_EQ(nccl_->counts(0).aborted, 0);
  EXPECT_EQ(nccl_->counts(0).allocated, 2) << "the device may still use them";
  EXPECT_FALSE(given_up(1));
  EXPECT_EQ(nccl_->counts(1).aborted, 1);
  EXPECT_EQ(nccl_->counts(1).allocated, 0);
}

TEST_F(NcclAbortTest, FreeingInOrderDoesNotHangEither) {
  start(2, {}, kEnds, kHangs);
  ASSERT_TRUE(connect(2));
  for (const auto& rank : ranks_) rank->channel->release_fusion_buffers();
  hang(1);
  end_ranks();
  EXPECT_EQ(nccl_->counts(0).destroyed, 1);
  EXPECT_EQ(nccl_->counts(1).destroyed, 0);
  EXPECT_TRUE(given_up(1));
}

TEST_F(NcclAbortTest, AGpuThatWasGivenUpIsRefused) {
  start(1, {}, kHangs);
  ASSERT_TRUE(connect(1));
  hang(0);
  ranks_[0]->channel->abort();
  ranks_[0]->channel->wait_for_abort();
  try {
    const device::DeviceGuard guard(ranks_[0]->device->api(), 0);
    ADD_FAILURE() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("device 0 was given up"), std::string::npos)
        << error.what();
  }
}

// The kernel of the second communicator waits for a peer that never launches. It ends only when its
// own communicator is aborted, and the first communicator cannot be freed before that.
TEST_F(NcclAbortTest, AllCommunicatorsAreAbortedTogether) {
  start(2, {.version = 22200}, kEnds);
  ASSERT_TRUE(connect(2));
  second_ = open_second();
  launch(*second_[0]);
  EXPECT_FALSE(gpu_.run_all());
  ranks_[0]->channel->abort();
  second_[0]->abort();
  EXPECT_TRUE(nccl_->wait_for_aborts(0, 2));
  second_[0]->wait_for_abort();
  EXPECT_FALSE(given_up(0));
  EXPECT_TRUE(gpu_.run_all());
  end_all();
}

TEST_F(NcclAbortTest, BeforeGroupedAbortsTheDeviceIsGivenUp) {
  start(2, {.version = 22100}, kHangs, kEnds);
  ASSERT_TRUE(connect(2));
  second_ = open_second();
  launch(*second_[0]);
  ranks_[0]->channel->abort();
  second_[0]->abort();
  end_all();
  EXPECT_TRUE(given_up(0));
  EXPECT_FALSE(given_up(1));
}

using NcclAbortDeathTest = NcclAbortTest;

TEST_F(NcclAbortDeathTest, TheProcessEndsWithItsOwnCodeThen) {
  GTEST_FLAG_SET(death_test_style,
                 "threadsafe");  // ThreadSanitizer reports forks of programs with threads
  EXPECT_EXIT(
      {
        std::atexit([] {  // stands for CUDA's exit handlers, which may wait
          for (;;) ::pause();
        });
        start(1, {}, kHangs);
        connect(1);
        hang(0);
        ranks_[0]->channel->abort();
        ranks_[0]->channel->wait_for_abort();
        std::exit(9);
      },
      ::testing::ExitedWithCode(9), "device 0 had been given up");
}

}  // namespace
}  // namespace hvd::testing
