#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "hvd/error.h"
#include "mpi/mpi_control_plane.h"
#include "mpi/support/mpi_test.h"

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;
using testing::mpi_rank;
using testing::mpi_size;
using Bytes = std::vector<std::byte>;

/// A plane and its world, left in order.
class MpiControlPlaneTest : public ::testing::TestWithParam<bool> {
 protected:
  MpiControlPlaneTest()
      : world_(MpiWorld::join({.start_timeout = 30s, .control_segment = GetParam()})),
        plane_(make_mpi_control_plane(world_)) {}
  ~MpiControlPlaneTest() override {
    testing::mpi_barrier();
    plane_->farewell();
  }

  std::shared_ptr<MpiWorld> world_;
  std::unique_ptr<control::ControlPlane> plane_;
};

/// A message that says who sent it and which one it is, of a size that depends on both: empty,
/// eager, and in several parts.
Bytes make_message(int source, int number) {
  constexpr std::size_t kSizes[] = {8, 100, 4000, 4096, 5000, 40'000, 300'000};
  Bytes message(kSizes[static_cast<std::size_t>(source + number) % std::size(kSizes)],
                std::byte(source * 31 + number));
  const std::int32_t header[] = {source, number};
  std::memcpy(message.data(), header, sizeof header);
  return message;
}

TEST_P(MpiControlPlaneTest, KeepsTheOrderOfEachRank) {
  constexpr int kMessages = 200;
  std::vector<int> next(static_cast<std::size_t>(mpi_size()), 0);
  int to_come = mpi_rank() == 0 ? kMessages * mpi_size() : 0;
  for (int number = 0; number < kMessages; ++number)
    plane_->report(make_message(mpi_rank(), number));
  const SteadyClock clock;
  const TimePoint end = clock.now() + 60s;
  while ((to_come > 0 || plane_->busy()) && clock.now() < end) {
    const auto message = plane_->poll();
    if (!message) continue;
    --to_come;
    int& expected = next[static_cast<std::size_t>(message->source)];
    EXPECT_TRUE(message->bytes == make_message(message->source, expected))
        << "from rank " << message->source << ", number " << expected;
    ++expected;
  }
  EXPECT_EQ(to_come, 0);
}

TEST_P(MpiControlPlaneTest, PublishesToAllWhileTheyReport) {
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    plane_->report(make_message(mpi_rank(), round));
    if (mpi_rank() == 0) {
      for (int peer = 0; peer < mpi_size(); ++peer) {
        const auto message = testing::receive(*plane_);
        EXPECT_TRUE(message.bytes == make_message(message.source, round));
      }
      plane_->publish(make_message(0, round + 1000));
    }
    const auto plan = testing::receive(*plane_);
    EXPECT_EQ(plan.source, 0);
    EXPECT_TRUE(plan.bytes == make_message(0, round + 1000)) << "round " << round;
  }
}

TEST_P(MpiControlPlaneTest, SendsToOneRank) {
  if (mpi_rank() == 0) {
    for (int peer = 0; peer < mpi_size(); ++peer) plane_->send(peer, make_message(peer, 7));
  }
  const auto message = testing::receive(*plane_);
  EXPECT_EQ(message.source, 0);
  EXPECT_TRUE(message.bytes == make_message(mpi_rank(), 7));
}

TEST_P(MpiControlPlaneTest, CarriesEmptyAndLargeMessages) {
  const Bytes large(20'000'000, std::byte{42});
  plane_->report({});
  plane_->report(large);
  if (mpi_rank() == 0) {
    std::vector<int> seen(static_cast<std::size_t>(mpi_size()));
    for (int message = 0; message < 2 * mpi_size(); ++message) {
      const auto received = testing::receive(*plane_);
      const bool first = seen[static_cast<std::size_t>(received.source)]++ == 0;
      EXPECT_EQ(received.bytes.size(), first ? 0U : large.size());
      EXPECT_TRUE(first || received.bytes == large);
    }
    plane_->publish({});
  }
  EXPECT_TRUE(testing::receive(*plane_).bytes.empty());
}

TEST_P(MpiControlPlaneTest, AnyRankSendsToSome) {
  std::vector<int> others;
  for (int peer = 0; peer < mpi_size(); ++peer) {
    if (peer != mpi_rank()) others.push_back(peer);
  }
  plane_->send(others, make_message(mpi_rank(), 100));
  for (std::size_t i = 0; i < others.size(); ++i) {
    const control::Message message = testing::receive(*plane_);
    EXPECT_EQ(message.bytes, make_message(message.source, 100));
  }
}

TEST_P(MpiControlPlaneTest, RefusesWhatItCannotCarry) {
  const Bytes too_large((std::size_t{256} << 20) + 1);
  EXPECT_THROW(plane_->report(too_large), Error);
  EXPECT_THROW(plane_->send(mpi_size(), {}), Error);
  EXPECT_THROW(plane_->send(-1, {}), Error);
  EXPECT_THROW(plane_->publish(mpi_rank() == 0 ? std::span<const std::byte>(too_large)
                                               : std::span<const std::byte>()),
               Error);
  EXPECT_FALSE(plane_->poll().has_value());
}

TEST_P(MpiControlPlaneTest, IsBusyOnlyWhileATransferIsUnderWay) {
  EXPECT_FALSE(plane_->busy());
  testing::mpi_barrier();
  if (mpi_rank() == mpi_size() - 1) {
    plane_->report(Bytes(5'000'000));
    EXPECT_TRUE(plane_->busy());
  }
  if (mpi_rank() == 0) testing::receive(*plane_);
  const SteadyClock clock;
  const TimePoint end = clock.now() + 30s;
  while (plane_->busy() && clock.now() < end) EXPECT_FALSE(plane_->poll().has_value());
  EXPECT_FALSE(plane_->busy());
}

TEST_P(MpiControlPlaneTest, LeavesWithoutWaitingForWhoDoesNotReceive) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  if (mpi_rank() == 1) plane_->report(Bytes(5'000'000));
  // Rank 0 takes no part: the message is left behind, and rank 1 gives up on it soon.
  const SteadyClock clock;
  const TimePoint before = clock.now();
  plane_->farewell();
  plane_.reset();
  EXPECT_LT(clock.now() - before, 2s);
  plane_ = make_mpi_control_plane(world_);
}

INSTANTIATE_TEST_SUITE_P(Board, MpiControlPlaneTest, ::testing::Bool(), [](const auto& parameter) {
  return parameter.param ? "Shared" : "Absent";
});

/// What an engine does when it has nothing to do, on the pattern that base/doorbell.h gives.
control::Message sleep_until_message(control::ControlPlane& plane) {
  for (;;) {
    const std::uint32_t ticket = plane.doorbell().ticket();
    if (auto message = plane.poll()) return std::move(*message);
    plane.doorbell().sleep(ticket, Doorbell::Sleeper::kStandby, 10s);
  }
}

TEST(MpiDoorbell, WakesASleepingRank) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto plane = make_mpi_control_plane(std::chrono::milliseconds(30s));
  ASSERT_TRUE(plane->rung_by_all());
  constexpr int kRounds = 21;
  const SteadyClock clock;
  std::vector<std::int64_t> latencies;
  for (int round = 0; round < kRounds; ++round) {
    if (mpi_rank() == 0) {
      std::this_thread::sleep_for(10ms);  // the others are asleep by now
      const std::int64_t sent = clock.now().count();
      plane->publish(std::as_bytes(std::span(&sent, 1)));
      testing::receive(*plane);
      for (int peer = 1; peer < mpi_size(); ++peer) {
        const auto answer = sleep_until_message(*plane);
        std::int64_t latency = 0;
        std::memcpy(&latency, answer.bytes.data(), sizeof latency);
        latencies.push_back(latency);
      }
    } else {
      const auto message = sleep_until_message(*plane);
      std::int64_t sent = 0;
      std::memcpy(&sent, message.bytes.data(), sizeof sent);
      const std::int64_t latency = clock.now().count() - sent;
      plane->report(std::as_bytes(std::span(&latency, 1)));
    }
  }
  if (mpi_rank() == 0) {
    std::sort(latencies.begin(), latencies.end());
    const double median = static_cast<double>(latencies[latencies.size() / 2]) / 1e3;
    std::printf("a sleeping rank handles a message after %.1f us (median of %zu)\n", median,
                latencies.size());
    EXPECT_LT(median, 20'000.0);
  }
  testing::mpi_barrier();
  plane->farewell();
}

}  // namespace
}  // namespace hvd::mpi
