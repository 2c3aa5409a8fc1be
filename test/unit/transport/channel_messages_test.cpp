#include "transport/channel_messages.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "hvd/error.h"
#include "support/fake_carrier.h"
#include "support/fakes.h"
#include "support/reference.h"

namespace hvd::message {
namespace {

using namespace std::chrono_literals;
using testing::Bytes;
using testing::FakeNetwork;

/// World ranks 1 and 3 of a job of four, each with a channel of the set {1, 3}.
class ChannelMessagesTest : public ::testing::Test {
 protected:
  std::shared_ptr<ChannelMessages> open(int rank, int process_set = 5, int instance = 0) {
    const ChannelSpec spec{.process_set = process_set,
                           .ranks = {1, 3},
                           .set_rank = rank == 1 ? 0 : 1,
                           .instance = instance};
    return std::make_shared<ChannelMessages>(network->carrier(rank), spec,
                                             rank == 1 ? peers_of_1 : peers_of_3);
  }
  /// Posts a receive from the other rank, into the buffer of `messages`.
  void receive(ChannelMessages& channel, int kind = 0) {
    std::byte* const place = channel.buffer().reserve(kBytes);
    channel.requests().reset(1);
    channel.receive(0, {place, kBytes}, 1 - channel.rank(), kind);
  }
  /// Rank 3 sends to rank 1, and the carrier writes the data at once.
  void send_to_one(int kind = 0) {
    three->requests().reset(1);
    three->send(0, message, 0, kind);
  }

  static constexpr std::size_t kBytes = 100;
  testing::FakePeers peers_of_1{1, 4};
  testing::FakePeers peers_of_3{3, 4};
  const std::shared_ptr<FakeNetwork> network = FakeNetwork::create(4);
  std::shared_ptr<ChannelMessages> one = open(1);
  std::shared_ptr<ChannelMessages> three = open(3);
  const Bytes message = Bytes(kBytes, std::byte{9});
};

TEST_F(ChannelMessagesTest, SendsBetweenPositionsInTheSetAndRingsWorldRanks) {
  EXPECT_FALSE(one->moved_since_last_call());
  receive(*one);
  EXPECT_TRUE(one->moved_since_last_call());
  one->ring_touched();
  EXPECT_EQ(peers_of_1.rung(3), 1) << "the sender may wait for the receive";
  send_to_one();
  three->ring_touched();
  EXPECT_EQ(peers_of_3.rung(1), 1) << "the receiver";
  EXPECT_EQ(one->test().size(), 1U);
  EXPECT_TRUE(one->moved_since_last_call());
  one->ring_touched();
  EXPECT_EQ(peers_of_1.rung(3), 2);
  EXPECT_EQ(one->buffer().memory().get()[kBytes - 1], std::byte{9});
}

TEST_F(ChannelMessagesTest, KeepsChannelsAndKindsApart) {
  const auto other_set = open(1, 6);
  const auto other_instance = open(1, 5, 3);
  receive(*other_set);
  receive(*other_instance);
  receive(*one, kHierarchicalBackendKind);
  send_to_one(kFlatBackendKinds);
  EXPECT_TRUE(other_set->test().empty());
  EXPECT_TRUE(other_instance->test().empty());
  EXPECT_TRUE(one->test().empty());
  EXPECT_EQ(three->test().size(), 1U);
  send_to_one(kHierarchicalBackendKind);
  EXPECT_EQ(one->test().size(), 1U);
}

TEST_F(ChannelMessagesTest, NeedsACarrierWithTagsForTheSet) {
  network->max_process_sets = 6;
  EXPECT_NO_THROW(open(1, 5));
  EXPECT_THROW(open(1, 6), Error);
}

TEST_F(ChannelMessagesTest, FreesMemoryThatTheCarrierHasLetGo) {
  receive(*one);
  const std::weak_ptr<const std::byte> memory = one->buffer().memory();
  EXPECT_EQ(one->abandon(), MemoryRelease::kDone);
  EXPECT_TRUE(one->abandoned());
  EXPECT_EQ(one->requests().in_flight(), 0);
  EXPECT_TRUE(one->settle());
  one.reset();
  EXPECT_TRUE(memory.expired());
  send_to_one();
}

TEST_F(ChannelMessagesTest, KeepsMemoryThatTheCarrierNeverLetsGo) {
  network->cancel_result = MemoryRelease::kNever;
  receive(*one);
  const std::weak_ptr<const std::byte> memory = one->buffer().memory();
  EXPECT_EQ(one->abandon(), MemoryRelease::kNever);
  EXPECT_EQ(one->buffer().memory(), nullptr);
  EXPECT_FALSE(one->settle());
  one.reset();
  const auto kept = memory.lock();
  ASSERT_NE(kept, nullptr);
  send_to_one();
  EXPECT_EQ(kept.get()[0], std::byte{9}) << "the carrier has written to it";
}

TEST_F(ChannelMessagesTest, WaitsAtItsEndForACarrierThatIsAboutToLetGo) {
  network->pending_cancels = 3;
  receive(*one);
  const std::weak_ptr<const std::byte> memory = one->buffer().memory();
  EXPECT_EQ(one->abandon(), MemoryRelease::kPending);
  EXPECT_EQ(network->cancel_calls(), 1) << "no rank waits yet";
  EXPECT_FALSE(memory.expired());
  send_to_one();  // the carrier may still write to the memory
  one.reset();
  EXPECT_EQ(network->cancel_calls(), 4);
  EXPECT_TRUE(memory.expired());
}

TEST_F(ChannelMessagesTest, KeepsMemoryThatIsNotLetGoInTime) {
  network->pending_cancels = 1 << 30;
  receive(*one);
  const std::weak_ptr<const std::byte> memory = one->buffer().memory();
  const auto before = std::chrono::steady_clock::now();
  EXPECT_EQ(one->abandon(), MemoryRelease::kPending);
  one.reset();
  const auto took = std::chrono::steady_clock::now() - before;
  EXPECT_GE(took, kCancelTime);
  EXPECT_LT(took, kCancelTime + 5s);
  EXPECT_FALSE(memory.expired());
  send_to_one();
}

TEST_F(ChannelMessagesTest, DoesNotCancelWhereNoMessageIsUnderWay) {
  std::byte* const place = one->buffer().reserve(kBytes);
  EXPECT_NE(place, nullptr);
  const std::weak_ptr<const std::byte> memory = one->buffer().memory();
  EXPECT_EQ(one->abandon(), MemoryRelease::kDone);
  one.reset();
  EXPECT_EQ(network->cancel_calls(), 0);
  EXPECT_TRUE(memory.expired());
}

/// Receives one message.
class ReceiveWork final : public MessageWork {
 public:
  using MessageWork::MessageWork;

 protected:
  bool step() override {
    if (!std::exchange(started_, true)) {
      messages().requests().reset(1);
      std::byte* const place = messages().buffer().reserve(kBytes);
      messages().receive(0, {place, kBytes}, 1, 0);
    }
    static_cast<void>(messages().test());
    return messages().requests().in_flight() == 0;
  }

 private:
  static constexpr std::size_t kBytes = 100;
  bool started_ = false;
};

TEST_F(ChannelMessagesTest, AWorkThatIsDroppedEndsItsChannel) {
  ReceiveWork complete(one);
  EXPECT_FALSE(complete.progress());
  send_to_one();
  EXPECT_TRUE(complete.progress());
  EXPECT_EQ(three->test().size(), 1U);
  auto dropped = std::make_unique<ReceiveWork>(one);
  EXPECT_FALSE(dropped->progress());
  EXPECT_FALSE(one->abandoned());
  dropped.reset();
  EXPECT_TRUE(one->abandoned());
  EXPECT_EQ(network->cancel_calls(), 1);
}

/// Makes progress in every pass, until the test ends it.
class BusyWork final : public MessageWork {
 public:
  using MessageWork::MessageWork;
  int steps = 0;
  bool gives_way = false;
  bool ends = false;

 protected:
  bool step() override {
    ++steps;
    gives_way ? messages().give_way() : messages().keep_going();
    return ends;
  }
};

TEST_F(ChannelMessagesTest, AWorkThatHasMoreToDoIsCalledAgain) {
  BusyWork work(one);
  EXPECT_FALSE(work.progress());
  EXPECT_EQ(work.steps, 8) << "the other Works get their turn";
  EXPECT_TRUE(work.moved());
  work.gives_way = true;
  EXPECT_FALSE(work.progress());
  EXPECT_EQ(work.steps, 9) << "the call has reached its limit of bytes";
  EXPECT_TRUE(work.moved());
  work.ends = true;
  EXPECT_TRUE(work.progress());
}

TEST(MessageBuffer, IsKeptFromOneUseToTheNextAndGrows) {
  MessageBuffer buffer;
  EXPECT_EQ(buffer.memory(), nullptr);
  std::byte* const first = buffer.reserve(10);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 4096, 0U);
  EXPECT_EQ(buffer.reserve(4096), first) << "whole pages";
  const std::weak_ptr<const std::byte> memory = buffer.memory();
  buffer.reserve(4097);
  EXPECT_TRUE(memory.expired());
  buffer.keep_until_exit();
  EXPECT_EQ(buffer.memory(), nullptr);
  EXPECT_NE(buffer.reserve(1), nullptr);
}

}  // namespace
}  // namespace hvd::message
