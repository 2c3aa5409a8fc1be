#include "transport/local_mail.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "mpi/support/hosts.h"
#include "support/fake_carrier.h"
#include "support/join_nodes.h"

namespace hvd::message {
namespace {

using testing::Bytes;
using testing::FakeNetwork;

constexpr std::size_t kLarge = std::size_t{100} << 10;

Bytes filled(int number, std::size_t size = 4) {
  return Bytes(size, static_cast<std::byte>(number));
}

/// All ranks of a job, driven by one thread.
struct HostJob {
  explicit HostJob(int size) : network(FakeNetwork::create(size, 7)) {
    auto nodes = testing::join_nodes(size);
    for (int rank = 0; rank < size; ++rank)
      planes.push_back(make_control_plane(network->carrier(rank), std::move(nodes[rank])));
  }
  control::ControlPlane& operator[](std::size_t rank) { return *planes[rank]; }

  std::shared_ptr<FakeNetwork> network;
  std::vector<std::unique_ptr<control::ControlPlane>> planes;
};

TEST(LocalMail, ASmallMessageNeedsNoCarrier) {
  HostJob job(2);
  job.network->broken = true;
  job[1].send(0, filled(1));
  EXPECT_FALSE(job[1].busy());
  EXPECT_FALSE(job[0].quiet());
  const auto message = job[0].poll();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->source, 1);
  EXPECT_EQ(message->bytes, filled(1));
  EXPECT_TRUE(job[0].quiet());
}

TEST(LocalMail, LargeAndSmallMessagesOfARankKeepTheirOrder) {
  HostJob job(3);
  job.network->stalled_source = 1;
  job[1].send(0, filled(1));
  job[1].send(0, filled(2, kLarge));
  job[1].send(0, filled(3));
  job[1].send(0, filled(4, kLarge));
  job[2].send(0, filled(5));
  EXPECT_EQ(job[0].poll()->bytes, filled(1));
  EXPECT_EQ(job[0].poll()->bytes, filled(5)) << "the message of rank 1 is under way";
  EXPECT_FALSE(job[0].poll().has_value());
  job.network->stalled_source = -1;
  EXPECT_EQ(job[0].poll()->bytes, filled(2, kLarge));
  EXPECT_EQ(job[0].poll()->bytes, filled(3));
  EXPECT_EQ(job[0].poll()->bytes, filled(4, kLarge));
  EXPECT_FALSE(job[0].poll().has_value());
  EXPECT_TRUE(job[0].quiet());
}

TEST(LocalMail, AMessageOfTheCarrierWaitsForThoseBeforeIt) {
  HostJob job(2);
  for (int number = 0; number < 20; ++number) job[1].send(0, filled(number));
  job[1].send(0, filled(20, kLarge));
  for (int number = 0; number < 20; ++number) EXPECT_EQ(job[0].poll()->bytes, filled(number));
  EXPECT_EQ(job[0].poll()->bytes, filled(20, kLarge));
}

TEST(LocalMail, KeepsMessagesForWhichThereIsNoRoomAndRingsWhenTheyAreSent) {
  constexpr int kMessages = 100;
  constexpr std::size_t kSize = 8000;
  HostJob job(2);
  for (int number = 0; number < kMessages; ++number)
    job[1].send(0, filled(number, number % 7 == 6 ? kLarge : kSize));
  EXPECT_TRUE(job[1].busy());
  for (int number = 0; number < kMessages; ++number) {
    std::optional<control::Message> message = job[0].poll();
    if (!message) {
      EXPECT_FALSE(job[0].quiet()) << "messages are kept for this rank";
      const auto ticket = job[0].doorbell().ticket();
      EXPECT_FALSE(job[1].poll().has_value());
      EXPECT_NE(job[0].doorbell().ticket(), ticket);
      message = job[0].poll();
    }
    ASSERT_TRUE(message.has_value()) << number;
    EXPECT_EQ(message->bytes, filled(number, number % 7 == 6 ? kLarge : kSize)) << number;
  }
  EXPECT_FALSE(job[1].poll().has_value());
  EXPECT_FALSE(job[1].busy());
  EXPECT_TRUE(job[0].quiet());
}

TEST(LocalMail, AMessageToSeveralRanksReachesThoseOfTheHostThoughAnotherOneIsLost) {
  const testing::PretendHosts pretend("aab");
  HostJob job(3);
  job.network->unreachable = 2;
  const std::vector<int> others{2, 1};
  EXPECT_THROW(job[0].send(others, filled(1)), Error);
  const auto message = job[1].poll();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->bytes, filled(1));
}

TEST(LocalMail, RanksOfOtherHostsUseTheCarrier) {
  const testing::PretendHosts pretend("aab");
  HostJob job(3);
  job[2].send(1, filled(1));
  job[0].send(1, filled(2));
  std::vector<int> sources;
  for (int count = 0; count < 2; ++count) sources.push_back(job[1].poll()->source);
  EXPECT_EQ(sources, (std::vector<int>{0, 2}));
  job[1].send(2, filled(3));
  EXPECT_EQ(job[2].poll()->bytes, filled(3));
}

TEST(LocalMail, RanksThatShareNoMemoryUseTheCarrier) {
  const auto network = FakeNetwork::create(2, 7);
  const auto nodes = testing::join_nodes(2, /*without=*/1);
  std::vector<std::unique_ptr<control::ControlPlane>> planes;
  for (int rank = 0; rank < 2; ++rank)
    planes.push_back(
        make_control_plane(network->carrier(rank), nodes[static_cast<std::size_t>(rank)]));
  planes[1]->await_lazy_messages(true);
  planes[0]->send_lazily(1, filled(1));
  EXPECT_EQ(planes[1]->poll()->bytes, filled(1));
  planes[1]->await_lazy_messages(false);
}

TEST(LocalMail, AWaitingMessageIsSentBeforeTheRankLeaves) {
  HostJob job(2);
  for (int number = 0; number < 6; ++number) job[1].send(0, filled(number, 8000));
  EXPECT_TRUE(job[1].busy());
  std::jthread leaving([&] { job.planes[1].reset(); });
  for (int number = 0; number < 6;) {
    const auto message = job[0].poll();
    if (message) EXPECT_EQ(message->bytes, filled(number++, 8000));
  }
}

}  // namespace
}  // namespace hvd::message
