#include "negotiation/mailboxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/text.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;

wire::MessageKey tag(std::int64_t number) { return {.tag = number}; }

Arrival offer(int source, std::uint64_t send, const wire::MessageKey& key,
              std::span<const std::byte> payload = {}) {
  return {source,
          {.send = send,
           .key = key,
           .elements = payload.size(),
           .eager = !payload.empty(),
           .payload = payload}};
}

Status stalled(const std::string& why) { return {StatusCode::kStalled, why}; }

/// The recv that the offer gets, "error TEXT", or "waits".
std::string arrive(Mailboxes& boxes, int source, std::uint64_t send, const wire::MessageKey& key) {
  const auto reception = boxes.arrive(offer(source, send, key));
  if (const auto* recv = std::get_if<std::uint64_t>(&reception)) return text("recv ", *recv);
  if (const auto* error = std::get_if<Status>(&reception)) return "error " + error->message;
  return "waits";
}

std::string post(Mailboxes& boxes, std::uint64_t recv, const wire::MessageKey& key, int source) {
  const auto delivery = boxes.post(recv, key, source);
  if (const auto* arrival = std::get_if<Arrival>(&delivery))
    return text("send ", arrival->offer.send, " of rank ", arrival->source);
  if (const auto* error = std::get_if<Status>(&delivery)) return "error " + error->message;
  return "waits";
}

TEST(Mailboxes, AnOfferAndARecvMatchByRankSetAndTagOrName) {
  Mailboxes boxes;
  EXPECT_EQ(arrive(boxes, 1, 0, tag(5)), "waits");
  EXPECT_EQ(post(boxes, 0, tag(6), 1), "waits");
  EXPECT_EQ(post(boxes, 1, {.process_set = 2, .tag = 5}, 1), "waits");
  EXPECT_EQ(post(boxes, 2, {.name = "5"}, 1), "waits");
  EXPECT_EQ(post(boxes, 3, tag(5), 2), "waits");
  EXPECT_EQ(post(boxes, 4, tag(5), 1), "send 0 of rank 1");
  EXPECT_EQ(arrive(boxes, 2, 9, tag(5)), "recv 3");
  EXPECT_EQ(arrive(boxes, 1, 1, {.name = "5"}), "recv 2");
  EXPECT_EQ(arrive(boxes, 1, 2, {.process_set = 2, .tag = 5}), "recv 1");
  EXPECT_EQ(arrive(boxes, 1, 3, tag(6)), "recv 0");
  EXPECT_TRUE(boxes.empty());
}

TEST(Mailboxes, MessagesOfOneKeyMatchInTheOrderOfTheCalls) {
  Mailboxes boxes;
  arrive(boxes, 1, 0, tag(0));
  arrive(boxes, 2, 0, tag(0));
  arrive(boxes, 1, 1, tag(0));
  EXPECT_EQ(post(boxes, 0, tag(0), 2), "send 0 of rank 2");
  EXPECT_EQ(post(boxes, 1, tag(0), kAnyRank), "send 0 of rank 1");
  EXPECT_EQ(post(boxes, 2, tag(0), kAnyRank), "send 1 of rank 1");
  EXPECT_EQ(post(boxes, 3, tag(0), kAnyRank), "waits");
  EXPECT_EQ(post(boxes, 4, tag(0), 1), "waits");
  EXPECT_EQ(arrive(boxes, 1, 2, tag(0)), "recv 3");
  EXPECT_EQ(arrive(boxes, 1, 3, tag(0)), "recv 4");
}

TEST(Mailboxes, APayloadIsKeptUntilItsRecv) {
  Mailboxes boxes;
  std::vector<std::byte> bytes(3, std::byte{7});
  boxes.arrive(offer(1, 0, tag(1), bytes));
  boxes.arrive(offer(1, 1, tag(2), bytes));
  boxes.arrive(offer(1, 2, tag(3), bytes));
  bytes.assign(3, std::byte{0});  // it has a copy
  EXPECT_EQ(boxes.buffered_bytes(), 9u);
  const auto delivery = boxes.post(0, tag(2), 1);
  const auto& arrival = std::get<Arrival>(delivery);
  EXPECT_THAT(arrival.offer.payload, ElementsAre(std::byte{7}, std::byte{7}, std::byte{7}));
  EXPECT_TRUE(boxes.withdraw(1, 0));
  EXPECT_FALSE(boxes.withdraw(1, 0));
  EXPECT_TRUE(boxes.recall(1, 2, stalled("late")));
  EXPECT_EQ(boxes.buffered_bytes(), 0u);
}

TEST(Mailboxes, TheNextOfferGetsTheErrorOfAStalledRecv) {
  Mailboxes boxes;
  post(boxes, 0, tag(1), 2);
  post(boxes, 1, tag(1), 2);
  boxes.stall(0, tag(1), stalled("never sent"));
  EXPECT_EQ(arrive(boxes, 1, 0, tag(1)), "waits") << "of another rank";
  EXPECT_EQ(arrive(boxes, 2, 0, tag(1)), "error never sent");
  EXPECT_EQ(arrive(boxes, 2, 1, tag(1)), "recv 1");
}

TEST(Mailboxes, TheNextRecvGetsTheErrorOfARecalledSend) {
  Mailboxes boxes;
  arrive(boxes, 2, 0, tag(1));
  arrive(boxes, 2, 1, tag(1));
  EXPECT_TRUE(boxes.recall(2, 0, stalled("never received")));
  EXPECT_FALSE(boxes.recall(2, 7, stalled("unknown")));
  EXPECT_EQ(boxes.find(2, 0), nullptr);
  ASSERT_NE(boxes.find(2, 1), nullptr);
  EXPECT_EQ(post(boxes, 0, tag(1), 3), "waits") << "from another rank";
  EXPECT_EQ(post(boxes, 1, tag(1), kAnyRank), "error never received");
  EXPECT_EQ(post(boxes, 2, tag(1), 2), "send 1 of rank 2");
}

TEST(Mailboxes, ARemovedRecvMatchesNothing) {
  Mailboxes boxes;
  post(boxes, 0, tag(1), 2);
  EXPECT_TRUE(boxes.remove(0, tag(1)));
  EXPECT_FALSE(boxes.remove(0, tag(1)));
  EXPECT_TRUE(boxes.empty());
  EXPECT_EQ(arrive(boxes, 2, 0, tag(1)), "waits");
}

// Against a list of everything in order, which is the definition.
TEST(Mailboxes, RandomCallsMatchAsInOneList) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Mailboxes boxes;
    std::vector<std::tuple<std::uint64_t, int, int>> recvs;   // id, source, tag
    std::vector<std::tuple<std::uint64_t, int, int>> offers;  // send, source, tag
    for (std::uint64_t id = 0; id < 60; ++id) {
      const int key = static_cast<int>(random() % 3);
      if (random() % 2 == 0) {
        const int source = static_cast<int>(random() % 4) - 1;
        const auto found = std::find_if(offers.begin(), offers.end(), [&](const auto& o) {
          return std::get<2>(o) == key && (source == kAnyRank || std::get<1>(o) == source);
        });
        std::string expected = "waits";
        if (found != offers.end()) {
          expected = text("send ", std::get<0>(*found), " of rank ", std::get<1>(*found));
          offers.erase(found);
        } else {
          recvs.emplace_back(id, source, key);
        }
        ASSERT_EQ(post(boxes, id, tag(key), source), expected) << "seed " << seed;
      } else {
        const int source = static_cast<int>(random() % 3);
        const auto found = std::find_if(recvs.begin(), recvs.end(), [&](const auto& r) {
          return std::get<2>(r) == key && (std::get<1>(r) == kAnyRank || std::get<1>(r) == source);
        });
        std::string expected = "waits";
        if (found != recvs.end()) {
          expected = text("recv ", std::get<0>(*found));
          recvs.erase(found);
        } else {
          offers.emplace_back(id, source, key);
        }
        ASSERT_EQ(arrive(boxes, source, id, tag(key)), expected) << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace hvd::control
