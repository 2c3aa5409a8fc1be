#include "transport/send_pool.h"

#include <gtest/gtest.h>

#include "hvd/error.h"
#include "support/fake_carrier.h"
#include "support/reference.h"

namespace hvd::message {
namespace {

using testing::Bytes;
using testing::FakeNetwork;

constexpr Tag kTag = make_tag({.kind = kControlKind});

/// Rank 0 sends to ranks 1 and 2.
class SendPoolTest : public ::testing::Test {
 protected:
  /// The next message of the rank; empty without a message.
  Bytes receive(int rank) {
    const auto carrier = network->carrier(rank);
    const auto arrival = carrier->probe(kTag);
    if (!arrival) return {};
    RequestTable requests(*carrier, Plane::kControl);
    requests.reset(1);
    Bytes bytes(arrival->bytes);
    requests.receive(0, bytes, *arrival);
    EXPECT_EQ(requests.test().size(), 1U);
    return bytes;
  }
  int retired() {
    int ranks = 0;
    pool->retire([&](std::span<const int> done) { ranks += static_cast<int>(done.size()); });
    return ranks;
  }

  const std::shared_ptr<FakeNetwork> network = FakeNetwork::create(3);
  const std::shared_ptr<Carrier> zero = network->carrier(0);
  std::unique_ptr<SendPool> pool = std::make_unique<SendPool>(*zero);
  const std::vector<int> others = {1, 2};
  const Bytes message = Bytes(100, std::byte{5});
};

TEST_F(SendPoolTest, CopiesAMessageOnceForAllItsReceivers) {
  Bytes bytes = message;
  pool->send(bytes, others, kTag);
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  EXPECT_TRUE(pool->empty()) << "it was sent at once";
  EXPECT_EQ(retired(), 0) << "so no rank has to be rung again";
  EXPECT_EQ(network->sent(), 2);
  EXPECT_EQ(receive(1), message);
  EXPECT_EQ(receive(2), message);
}

TEST_F(SendPoolTest, AMessageToNoRankIsNotSent) {
  pool->send(message, {}, kTag);
  EXPECT_TRUE(pool->empty());
  EXPECT_EQ(network->sent(), 0);
  EXPECT_EQ(network->requests_made(), 0);
}

TEST_F(SendPoolTest, AnUnreachableRankDoesNotKeepTheMessageFromOthers) {
  network->unreachable = 1;
  EXPECT_THROW(pool->send(message, others, kTag), Error);
  EXPECT_EQ(receive(2), message);
}

TEST_F(SendPoolTest, ASendThatFailsLaterThrowsOnceAndDoesNotAffectOthers) {
  network->eager_bytes = 10;
  pool->send(message, others, kTag);
  pool->send(message, std::vector{2}, kTag);
  network->unreachable = 1;
  EXPECT_EQ(receive(2), message);
  EXPECT_EQ(receive(2), message);
  int told = 0;
  const auto count = [&](std::span<const int> done) { told += static_cast<int>(done.size()); };
  EXPECT_THROW(pool->retire(count), Error);
  EXPECT_EQ(told, 1) << "the second message has been sent";
  EXPECT_EQ(retired(), 2);
  EXPECT_TRUE(pool->empty());
}

TEST_F(SendPoolTest, ReportsTheRanksThatASlowMessageHasReached) {
  network->eager_bytes = 10;
  pool->send(message, others, kTag);
  EXPECT_FALSE(pool->empty());
  EXPECT_EQ(receive(2), message);
  EXPECT_EQ(retired(), 0);
  EXPECT_FALSE(pool->empty());
  EXPECT_EQ(receive(1), message);
  EXPECT_EQ(retired(), 2);
  EXPECT_TRUE(pool->empty());
}

TEST_F(SendPoolTest, UsesItsBuffersAgain) {
  for (int round = 0; round < 10; ++round) pool->send(message, others, kTag);
  EXPECT_EQ(network->requests_made(), 1);
  pool->send(Bytes(100'000), others, kTag);
  pool->send(message, others, kTag);
  EXPECT_EQ(network->requests_made(), 2) << "a large buffer is not reused";
}

TEST_F(SendPoolTest, CancelsMessagesUnderWayWhenItEnds) {
  network->eager_bytes = 0;
  network->pending_cancels = 3;
  pool->send(message, others, kTag);
  pool->send(message, others, kTag);
  pool.reset();
  EXPECT_GE(network->cancel_calls(), 5);
  EXPECT_TRUE(receive(1).empty());
}

TEST_F(SendPoolTest, KeepsMemoryThatIsNotReleased) {
  network->eager_bytes = 0;
  network->cancel_result = MemoryRelease::kNever;
  pool->send(message, others, kTag);
  pool.reset();
  EXPECT_EQ(receive(1), message) << "the carrier reads it now";
}

TEST_F(SendPoolTest, SurvivesAFailureHalfWay) {
  network->broken = true;
  EXPECT_THROW(pool->send(message, others, kTag), Error);
  EXPECT_FALSE(pool->empty());
}

}  // namespace
}  // namespace hvd::message
