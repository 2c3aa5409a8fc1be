#include "conformance/control_plane_cases.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "hvd/error.h"

namespace hvd::conformance {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::byte>;

/// Polls for a minute at most.
bool soon(const std::function<bool()>& done) {
  const SteadyClock clock;
  const TimePoint end = clock.now() + 60s;
  while (!done()) {
    if (clock.now() > end) return false;
    sched_yield();
  }
  return true;
}

/// The next message; an empty one of rank -1 if no message arrives.
control::Message receive(control::ControlPlane& plane) {
  std::optional<control::Message> message;
  if (soon([&] { return (message = plane.poll()).has_value(); })) return std::move(*message);
  ADD_FAILURE() << "rank " << plane.rank() << " has received no message";
  return {.source = -1, .bytes = {}};
}

/// Makes a message that contains its sender and its number. Its size depends on both, from these
/// two numbers alone to a message that is sent in several parts.
Bytes make_message(int source, int number) {
  constexpr std::size_t kSizes[] = {8, 100, 4000, 4096, 5000, 40'000, 300'000};
  Bytes message(kSizes[static_cast<std::size_t>(source + number) % std::size(kSizes)],
                std::byte(source * 31 + number));
  const std::int32_t header[] = {source, number};
  std::memcpy(message.data(), header, sizeof header);
  return message;
}

std::vector<int> others_of(const control::ControlPlane& plane) {
  std::vector<int> others;
  for (int peer = 0; peer < plane.size(); ++peer) {
    if (peer != plane.rank()) others.push_back(peer);
  }
  return others;
}

void keep_the_order_of_each_rank(PlaneRank& rank) {
  constexpr int kMessages = 200;
  control::ControlPlane& plane = rank.plane;
  std::vector<int> next(static_cast<std::size_t>(plane.size()), 0);
  int missing = plane.rank() == 0 ? kMessages * (plane.size() - 1) : 0;
  for (int number = 0; number < kMessages && plane.rank() != 0; ++number)
    plane.send(0, make_message(plane.rank(), number));
  const bool ended = soon([&] {
    if (const auto message = plane.poll()) {
      --missing;
      int& expected = next[static_cast<std::size_t>(message->source)];
      EXPECT_TRUE(message->bytes == make_message(message->source, expected))
          << "from rank " << message->source << ", number " << expected;
      ++expected;
    }
    return missing == 0 && !plane.busy();
  });
  EXPECT_TRUE(ended) << missing << " messages have not arrived";
}

void send_to_all_while_they_send(PlaneRank& rank) {
  constexpr int kRounds = 100;
  control::ControlPlane& plane = rank.plane;
  const std::vector<int> others = others_of(plane);
  for (int round = 0; round < kRounds; ++round) {
    if (plane.rank() == 0) {
      for (int peer = 1; peer < plane.size(); ++peer) {
        const auto message = receive(plane);
        EXPECT_TRUE(message.bytes == make_message(message.source, round));
      }
      plane.send(others, make_message(0, round + 1000));
      continue;
    }
    plane.send(0, make_message(plane.rank(), round));
    const auto plan = receive(plane);
    EXPECT_EQ(plan.source, 0);
    EXPECT_TRUE(plan.bytes == make_message(0, round + 1000)) << "round " << round;
  }
}

void send_to_one_rank(PlaneRank& rank) {
  control::ControlPlane& plane = rank.plane;
  if (plane.rank() == 0) {
    for (int peer = 1; peer < plane.size(); ++peer) plane.send(peer, make_message(peer, 7));
    return;
  }
  const auto message = receive(plane);
  EXPECT_EQ(message.source, 0);
  EXPECT_TRUE(message.bytes == make_message(plane.rank(), 7));
}

void carry_empty_and_large_messages(PlaneRank& rank) {
  control::ControlPlane& plane = rank.plane;
  const Bytes large(20'000'000, std::byte{42});
  if (plane.rank() != 0) {
    plane.send(0, {});
    plane.send(0, large);
    EXPECT_TRUE(receive(plane).bytes.empty());
    return;
  }
  std::vector<int> seen(static_cast<std::size_t>(plane.size()));
  for (int message = 0; message < 2 * (plane.size() - 1); ++message) {
    const auto received = receive(plane);
    if (received.source < 0) return;
    const bool first = seen[static_cast<std::size_t>(received.source)]++ == 0;
    EXPECT_EQ(received.bytes.size(), first ? 0U : large.size());
    EXPECT_TRUE(first || received.bytes == large);
  }
  plane.send(others_of(plane), {});
}

void send_from_any_rank_to_some(PlaneRank& rank) {
  control::ControlPlane& plane = rank.plane;
  const std::vector<int> others = others_of(plane);
  plane.send(others, make_message(plane.rank(), 100));
  for (std::size_t i = 0; i < others.size(); ++i) {
    const control::Message message = receive(plane);
    EXPECT_TRUE(message.bytes == make_message(message.source, 100));
  }
}

void be_busy_only_while_a_transfer_is_under_way(PlaneRank& rank) {
  control::ControlPlane& plane = rank.plane;
  EXPECT_FALSE(plane.busy());
  rank.wait_for_all();
  if (plane.size() == 1) return;
  if (plane.rank() == plane.size() - 1) {
    plane.send(0, Bytes(5'000'000));
    EXPECT_TRUE(plane.busy());
  }
  if (plane.rank() == 0) receive(plane);
  EXPECT_TRUE(soon([&] {
    EXPECT_TRUE(!plane.busy() || !plane.poll().has_value());
    return !plane.busy();
  }));
}

}  // namespace

const ControlPlaneCase kControlPlaneCases[6] = {
    {"KeepsTheOrderOfEachRank", keep_the_order_of_each_rank},
    {"SendsToAllWhileTheySend", send_to_all_while_they_send},
    {"SendsToOneRank", send_to_one_rank},
    {"CarriesEmptyAndLargeMessages", carry_empty_and_large_messages},
    {"AnyRankSendsToSome", send_from_any_rank_to_some},
    {"IsBusyOnlyWhileATransferIsUnderWay", be_busy_only_while_a_transfer_is_under_way},
};

}  // namespace hvd::conformance
