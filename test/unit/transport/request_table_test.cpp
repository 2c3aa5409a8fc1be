#include "transport/request_table.h"

#include <gtest/gtest.h>

#include <string>

#include "hvd/error.h"
#include "support/fake_carrier.h"
#include "support/reference.h"

namespace hvd::message {
namespace {

using namespace std::chrono_literals;
using testing::Bytes;
using testing::FakeNetwork;

constexpr Tag kFromZero = make_tag({.source = 0, .process_set = 3, .kind = 2});

/// Rank 0 sends, rank 1 receives.
class RequestTableTest : public ::testing::Test {
 protected:
  RequestTableTest() {
    sender.reset(4);
    receiver.reset(4);
  }
  static std::vector<int> slots(std::span<const int> completed) {
    return {completed.begin(), completed.end()};
  }

  const std::shared_ptr<FakeNetwork> network = FakeNetwork::create(2);
  const std::shared_ptr<Carrier> zero = network->carrier(0);
  const std::shared_ptr<Carrier> one = network->carrier(1);
  RequestTable sender{*zero, Plane::kData};
  RequestTable receiver{*one, Plane::kData};
  const Bytes message = Bytes(10, std::byte{7});
  Bytes room = Bytes(10);
};

TEST_F(RequestTableTest, TracksIdleSlotsAndThePeersOfTheOthers) {
  EXPECT_TRUE(receiver.test().empty()) << "no message is under way, so the carrier is not called";
  receiver.receive(2, room, 0, kFromZero);
  EXPECT_FALSE(receiver.idle(2));
  EXPECT_TRUE(receiver.idle(1));
  EXPECT_EQ(receiver.peer(2), 0);
  EXPECT_EQ(receiver.in_flight(), 1);
  EXPECT_TRUE(receiver.test().empty());
  sender.send(0, message, 1, kFromZero);
  EXPECT_EQ(slots(receiver.test()), std::vector{2});
  EXPECT_TRUE(receiver.idle(2));
  EXPECT_EQ(receiver.peer(2), 0) << "the peer of the last message in the slot";
  EXPECT_EQ(receiver.in_flight(), 0);
  EXPECT_EQ(room, message);
  EXPECT_EQ(slots(sender.test()), std::vector{0});
}

TEST_F(RequestTableTest, KeepsTagsApartAndTheOrderOfEach) {
  const Tag other = kFromZero + 1;
  const Bytes second(10, std::byte{8});
  const Bytes third(10, std::byte{9});
  sender.send(0, message, 1, kFromZero);
  sender.send(1, second, 1, kFromZero);
  sender.send(2, third, 1, other);
  Bytes rooms[3] = {room, room, room};
  receiver.receive(0, rooms[0], 0, other);
  receiver.receive(1, rooms[1], 0, kFromZero);
  receiver.receive(2, rooms[2], 0, kFromZero);
  EXPECT_EQ(receiver.test().size(), 3U);
  EXPECT_EQ(rooms[0], third);
  EXPECT_EQ(rooms[1], message);
  EXPECT_EQ(rooms[2], second);
}

TEST_F(RequestTableTest, NamesTheSenderOfAnUnexpectedSize) {
  receiver.receive(0, std::span(room).first(4), 0, kFromZero);
  sender.send(0, message, 1, kFromZero);
  try {
    static_cast<void>(receiver.test());
    FAIL() << "no throw";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "fake: rank 0 sent 10 bytes, expected 4; do all ranks run the same build with the "
                 "same settings?");
  }
}

TEST_F(RequestTableTest, RefusesANewBeginningWhileMessagesAreUnderWay) {
  receiver.receive(0, room, 0, kFromZero);
  EXPECT_THROW(receiver.reset(1), Error);
}

TEST_F(RequestTableTest, ReceivesAProbedMessage) {
  EXPECT_FALSE(one->probe(kFromZero).has_value());
  sender.send(0, message, 1, kFromZero);
  EXPECT_FALSE(zero->probe(kFromZero).has_value()) << "it went to rank 1";
  const auto arrival = one->probe(with_source(kFromZero, 1));
  ASSERT_TRUE(arrival.has_value()) << "probe() ignores the source";
  EXPECT_EQ(arrival->source, 0);
  EXPECT_EQ(arrival->bytes, 10U);
  EXPECT_FALSE(one->probe(kFromZero).has_value()) << "it is matched once";
  receiver.receive(3, room, *arrival);
  EXPECT_EQ(slots(receiver.test()), std::vector{3});
  EXPECT_EQ(room, message);
}

TEST_F(RequestTableTest, IsIdleOnceTheCarrierHasLetGo) {
  EXPECT_EQ(receiver.cancel(), MemoryRelease::kDone);
  EXPECT_EQ(network->cancel_calls(), 0) << "no message was under way";
  network->pending_cancels = 2;
  receiver.receive(0, room, 0, kFromZero);
  EXPECT_EQ(receiver.cancel(), MemoryRelease::kPending);
  EXPECT_EQ(receiver.in_flight(), 1);
  EXPECT_FALSE(receiver.idle(0));
  EXPECT_TRUE(wait_for_memory(receiver, std::chrono::steady_clock::now() + 10s));
  EXPECT_EQ(receiver.in_flight(), 0);
  EXPECT_TRUE(receiver.idle(0));
  sender.send(0, message, 1, kFromZero);
  EXPECT_EQ(room, Bytes(10)) << "the receive was withdrawn";
}

TEST_F(RequestTableTest, DoesNotWaitForACarrierThatCannotCancel) {
  network->cancel_result = MemoryRelease::kNever;
  receiver.receive(0, room, 0, kFromZero);
  EXPECT_FALSE(wait_for_memory(receiver, std::chrono::steady_clock::now() + 1h));
  EXPECT_EQ(network->cancel_calls(), 1);
  EXPECT_EQ(receiver.in_flight(), 1);
}

TEST_F(RequestTableTest, GivesUpOnACarrierThatIsPendingForTooLong) {
  network->pending_cancels = 1 << 30;
  receiver.receive(0, room, 0, kFromZero);
  const auto before = std::chrono::steady_clock::now();
  EXPECT_FALSE(wait_for_memory(receiver, before + 30ms));
  EXPECT_GE(std::chrono::steady_clock::now() - before, 30ms);
  EXPECT_GT(network->cancel_calls(), 1);
}

}  // namespace
}  // namespace hvd::message
