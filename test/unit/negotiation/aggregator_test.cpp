#include "negotiation/aggregator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr Duration kHold = milliseconds(100);

/// The aggregator of rank 4 for ranks 4 to 7 of eight. All ranks have agreed on "a", "b" and an
/// unnamed allreduce before. Ranks 2, 4, 5 and 6 share a set.
class AggregatorTest : public ::testing::Test {
 protected:
  AggregatorTest() : cluster_(8) {
    for (int rank = 0; rank < 8; ++rank) {
      cluster_.submit(rank, allreduce("a"));
      cluster_.submit(rank, allreduce("b"));
      cluster_.submit(rank, unnamed(OpKind::kAllreduce, 0));
      wire::Request set;
      set.name = "set";
      set.kind = OpKind::kAddProcessSet;
      set.new_set = {2, 4, 5, 6};
      cluster_.submit(rank, set);
    }
    exchange();
    for (const int rank : {2, 4, 5, 6}) cluster_.submit(rank, in_set(allreduce("of set")));
    exchange();
  }

  static wire::Request in_set(wire::Request request) {
    request.process_set = 1;
    return request;
  }
  void exchange() {
    cluster_.report_all();
    const auto plan = cluster_.decide();
    cluster_.apply_everywhere();
    aggregator_.apply(*plan);
  }
  /// Reports these submissions of the rank to the aggregator, as cache bits or in full.
  std::optional<wire::Report> report(int rank, const std::vector<wire::Request>& requests) {
    for (const auto& request : requests) cluster_.submit(rank, request);
    aggregator_.accept(*cluster_.rank(rank).next_report(), now_);
    return take();
  }
  std::optional<wire::Report> take() {
    auto merged = aggregator_.next_report(now_);
    if (!merged) return merged;
    EXPECT_EQ(std::get<wire::Report>(wire::decode(wire::encode(*merged))), *merged);
    return merged;
  }
  static const wire::Report::Group& only_group(const std::optional<wire::Report>& merged) {
    EXPECT_TRUE(merged && merged->sections.size() == 1 && merged->sections[0].groups.size() == 1);
    return merged->sections.at(0).groups.at(0);
  }

  Cluster cluster_;
  Aggregator aggregator_{RankSet(4, 7), cluster_.rank(4), kHold};
  TimePoint now_{std::chrono::seconds(5)};
};

TEST_F(AggregatorTest, ForwardsOnceTheLastBelowHasSubmitted) {
  EXPECT_FALSE(report(4, {allreduce("a"), allreduce("b")}));
  EXPECT_FALSE(report(6, {allreduce("a"), allreduce("b")}));
  EXPECT_TRUE(aggregator_.holds_anything());
  EXPECT_FALSE(report(7, {allreduce("b"), allreduce("a")}));
  const auto merged = report(5, {allreduce("a"), allreduce("b")});
  EXPECT_EQ(only_group(merged).ranks, RankSet(4, 7));
  EXPECT_THAT(only_group(merged).hits, ElementsAre(wire::StampedHits{3, wire::SlotSet({0, 1})}));
  EXPECT_THAT(merged->applied, ElementsAre(wire::Report::Applied{2, RankSet(4, 7)}));
  EXPECT_FALSE(merged->overdue);
  EXPECT_FALSE(aggregator_.holds_anything());
  EXPECT_FALSE(aggregator_.passing_through());
}

TEST_F(AggregatorTest, SplitsHitsThatArriveInDifferentParts) {
  EXPECT_FALSE(report(4, {allreduce("a"), allreduce("b"), allreduce("new")}));
  EXPECT_FALSE(report(5, {allreduce("b")}));
  EXPECT_FALSE(report(6, {allreduce("b"), allreduce("new")}));
  EXPECT_THAT(only_group(report(7, {allreduce("b")})).hits,
              ElementsAre(wire::StampedHits{3, wire::SlotSet({1})}));
  EXPECT_FALSE(report(5, {allreduce("a"), allreduce("new")}));
  EXPECT_THAT(only_group(report(7, {allreduce("new")})).requests, SizeIs(1));
  EXPECT_FALSE(report(6, {allreduce("a")}));
  EXPECT_THAT(only_group(report(7, {allreduce("a")})).hits,
              ElementsAre(wire::StampedHits{3, wire::SlotSet({0})}));
}

TEST_F(AggregatorTest, WaitsOnlyForMembersOfTheSet) {
  EXPECT_FALSE(report(4, {in_set(allreduce("of set")), in_set(allreduce("other"))}));
  EXPECT_FALSE(report(6, {in_set(allreduce("other")), in_set(allreduce("of set"))}));
  const auto merged = report(5, {in_set(allreduce("of set")), in_set(allreduce("other"))});
  EXPECT_EQ(only_group(merged).ranks, RankSet(4, 6));
  EXPECT_THAT(only_group(merged).hits, SizeIs(1));
  EXPECT_THAT(only_group(merged).requests, SizeIs(1));
}

TEST_F(AggregatorTest, UnnamedHitsAndDisagreementsAreCountedByName) {
  for (const int rank : {4, 5, 6})
    EXPECT_FALSE(report(rank, {unnamed(OpKind::kAllreduce, 1), allreduce("new", {rank})}));
  const auto merged = report(7, {unnamed(OpKind::kAllreduce, 1, {9}), allreduce("new", {7})});
  ASSERT_TRUE(merged);
  std::size_t requests = 0;
  std::size_t hits = 0;
  for (const auto& group : merged->sections.at(0).groups) {
    requests += group.requests.size();
    hits += group.unnamed_hits.size();
  }
  EXPECT_EQ(requests, 5u);
  EXPECT_EQ(hits, 1u);
  EXPECT_FALSE(aggregator_.holds_anything());
}

TEST_F(AggregatorTest, FirstDimensionsStayEachRanksOwn) {
  EXPECT_FALSE(report(5, {allgather("rows", {3, 2})}));
  EXPECT_FALSE(report(7, {allgather("rows", {1, 2})}));
  EXPECT_FALSE(report(4, {allgather("rows", {3, 2})}));
  const auto merged = report(6, {allgather("rows", {3, 2})});
  const auto& asked = only_group(merged).requests.at(0);
  EXPECT_EQ(asked.request, allgather("rows", {3, 2}));
  EXPECT_THAT(asked.first_dims, ElementsAre(wire::DimRun{3, 3}, wire::DimRun{1, 1}));
}

TEST_F(AggregatorTest, NothingIsHeldForLong) {
  EXPECT_FALSE(aggregator_.deadline());
  EXPECT_FALSE(report(6, {allreduce("a"), allreduce("new")}));
  EXPECT_EQ(aggregator_.deadline(), now_ + kHold);
  now_ += kHold;
  auto merged = take();
  ASSERT_TRUE(merged);
  EXPECT_TRUE(merged->overdue);
  EXPECT_EQ(only_group(merged).ranks, RankSet(6));
  // From here on every report is forwarded at once, until plans have ended both operations.
  EXPECT_FALSE(report(4, {allreduce("a")})->overdue);
  EXPECT_TRUE(report(5, {allreduce("b")}));
  EXPECT_TRUE(aggregator_.passing_through());
}

TEST_F(AggregatorTest, IsClosedAgainWhenPlansHaveEndedWhatWentOnInParts) {
  EXPECT_FALSE(report(6, {allreduce("a"), allreduce("new")}));
  now_ += kHold;
  const auto merged = take();
  cluster_.coordinator().accept(*merged, now_);
  for (const int rank : {4, 5, 7})
    cluster_.coordinator().accept(*report(rank, {allreduce("a"), allreduce("new")}), now_);
  for (int rank = 0; rank < 4; ++rank) {
    cluster_.submit(rank, allreduce("a"));
    cluster_.submit(rank, allreduce("new"));
  }
  exchange();
  EXPECT_FALSE(report(6, {allreduce("a"), allreduce("new")}));
  EXPECT_FALSE(aggregator_.passing_through());
}

TEST_F(AggregatorTest, OverdueOperationsOfRanksBelowAreNotHeld) {
  wire::Report below;
  below.overdue = true;
  below.applied = {{2, RankSet(6)}};
  below.sections = {{2, {{RankSet(6), {{3, wire::SlotSet({0})}}}}}};
  aggregator_.accept(below, now_);
  const auto merged = take();
  ASSERT_TRUE(merged);
  EXPECT_TRUE(merged->overdue);
}

TEST_F(AggregatorTest, AJoinALeaverAndAnAcknowledgementGoOnAtOnce) {
  EXPECT_FALSE(report(5, {allreduce("a")}));
  aggregator_.accept(make_report({.rank = 7, .last_applied = 2}), now_);
  const auto acknowledged = take();
  ASSERT_TRUE(acknowledged);
  EXPECT_TRUE(acknowledged->sections.empty());
  EXPECT_THAT(acknowledged->applied, ElementsAre(wire::Report::Applied{2, [] {
                                                                         RankSet ranks(5);
                                                                         ranks.add(RankSet(7));
                                                                         return ranks;
                                                                       }()}));
  wire::Request join;
  join.name = "join";
  join.kind = OpKind::kJoin;
  const auto joined = report(6, {allreduce("b"), join});
  ASSERT_TRUE(joined);
  EXPECT_THAT(joined->sections.at(0).groups, SizeIs(2));  // rank 5's "a", and all of rank 6's
  EXPECT_TRUE(report(4, {allreduce("a")}));
  aggregator_.accept(make_report({.rank = 7, .last_applied = 2, .shutdown = true}), now_);
  const auto left = take();
  EXPECT_EQ(left->leaving, RankSet(7));
  EXPECT_TRUE(left->ended.empty());
  aggregator_.accept(make_report({.rank = 5, .last_applied = 2, .shutdown = true, .ended = true}),
                     now_);
  wire::Report below;
  below.leaving = below.ended = RankSet(6);
  aggregator_.accept(below, now_);
  EXPECT_EQ(take()->ended, RankSet(5, 6));
}

TEST_F(AggregatorTest, ReportsOfBeforeTheEpochKeepTheirMeaning) {
  aggregator_.accept(make_report({.rank = 5, .last_applied = 1, .cached = {0}}), now_);
  const auto merged = take();
  ASSERT_TRUE(merged);
  EXPECT_EQ(merged->sections.at(0).as_of, 1u);
  EXPECT_EQ(only_group(merged).ranks, RankSet(5));
}

// The star and a deep tree decide the same plans: random requests of every kind, disagreements
// included, all reported before the coordinator decides.
class World {
 public:
  World(int ranks, int radix)
      : star_(ranks),
        tree_({.coordinator = {.host_of_rank = testing::hosts_of_ranks(ranks, 3)},
               .radix = radix,
               .longest_hold = kHold},
              [this](int, int to, const wire::Bytes& bytes) { tree_.receive(to, bytes, {}); }) {}

  void submit(int rank, const wire::Request& request) {
    star_.submit(rank, request);
    tree_.negotiator(rank).submit(request);
  }
  void report(int rank) {
    star_.report(rank);
    tree_.report(rank, {});
  }
  void decide_and_compare(std::size_t in_flight = 0) {
    const auto plan = tree_.coordinator().decide({}, [=](int, DeviceType) { return in_flight; });
    ASSERT_EQ(plan, star_.decide(in_flight));
    if (!plan) return;
    ASSERT_EQ(std::get<wire::Plan>(wire::decode(tree_.coordinator().encode(*plan))), *plan);
    star_.apply_everywhere();
    for (int rank = 0; rank < tree_.size(); ++rank) tree_.apply(rank, *plan);
  }

 private:
  Cluster star_;
  testing::ControlWorld tree_;
};

wire::Request random_request(std::mt19937_64& random, int number, int tensors) {
  const auto dim = static_cast<std::int64_t>(1 + random() % 4);
  wire::Request request = allreduce(numbered("t", static_cast<std::uint64_t>(number)), {dim, 8});
  if (number % 4 == 1) request.kind = OpKind::kAllgather;
  if (number / 2 % 4 == 3 && (number | 1) < tensors)
    request = in_group(request, "group", 2, number % 2);
  if (number % 7 == 3) request = unnamed(OpKind::kAllreduce, 0, {dim});
  return request;
}

TEST(AggregatorAgainstTheStar, ThePlansAreTheSame) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const int ranks = 8 + static_cast<int>(random() % 20);
    World world(ranks, 2 + static_cast<int>(random() % 3));
    const int tensors = 1 + static_cast<int>(random() % 14);
    const bool agree = random() % 2 == 0;
    const bool same_order = random() % 2 == 0;
    std::vector<wire::Request> forms;
    for (int i = 0; i < tensors; ++i) forms.push_back(random_request(random, i, tensors));
    for (std::uint64_t step = 0; step < 6; ++step) {
      std::vector<int> order(static_cast<std::size_t>(ranks));
      for (int rank = 0; rank < ranks; ++rank) order[static_cast<std::size_t>(rank)] = rank;
      std::shuffle(order.begin(), order.end(), random);
      for (const int rank : order) {
        std::vector<int> numbers(static_cast<std::size_t>(tensors));
        for (int i = 0; i < tensors; ++i) numbers[static_cast<std::size_t>(i)] = i;
        if (!same_order) std::shuffle(numbers.begin(), numbers.end(), random);
        for (const int number : numbers) {
          wire::Request request = forms[static_cast<std::size_t>(number)];
          if (request.unnamed)
            request = unnamed(request.kind, number == 3 ? step : 100 + step, request.shape);
          const bool odd = random() % 40 == 0;
          if ((odd && !agree) || (wire::gathers(request.kind) && random() % 10 == 0))
            ++request.shape[0];
          world.submit(rank, request);
          if (random() % (same_order ? 40 : 3) == 0) world.report(rank);
        }
        world.report(rank);
      }
      world.decide_and_compare();
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// The shortcut for rounds of the whole world is taken, left and taken again.
TEST(AggregatorAgainstTheStar, RoundsThatRepeatGiveThePlansTheyWouldGiveAnyway) {
  constexpr int kRanks = 12;
  World world(kRanks, 2);
  std::mt19937_64 random(3);
  for (int step = 0; step < 300; ++step) {
    SCOPED_TRACE(step);
    std::vector<std::string> names = {"a", "b", "c"};
    const auto turn = random() % 10;
    if (turn == 0) names.push_back(numbered("new", random() % 3));
    if (turn == 1) names.pop_back();
    const bool on_device = step > 150;
    for (int rank = kRanks - 1; rank >= 0; --rank) {
      for (const auto& name : names) {
        wire::Request request = allreduce(name);
        if (on_device) request.device = DeviceType::kCuda;
        world.submit(rank, request);
      }
      world.report(rank);
    }
    if (turn == 2) world.decide_and_compare(kBusyBatches);  // holds tensors back
    world.decide_and_compare();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace hvd::control
