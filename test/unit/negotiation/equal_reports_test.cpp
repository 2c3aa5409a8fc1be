#include "negotiation/equal_reports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "hvd/error.h"
#include "negotiation/aggregator.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::SizeIs;

constexpr TimePoint kNow{std::chrono::seconds(5)};
constexpr Duration kLongestHold = milliseconds(100);

/// The report of one rank with requests of these names.
wire::Report report_of(int rank, const std::vector<std::string>& names, std::uint64_t number = 1) {
  wire::Report::Group group{RankSet(rank)};
  for (std::size_t i = 0; i < names.size(); ++i)
    group.requests.push_back({wire::stamp_of_request(number, i), allreduce(names[i])});
  wire::Report report;
  report.applied.push_back({0, RankSet(rank)});
  report.sections.push_back({0, {std::move(group)}});
  return report;
}

const wire::Report::Group& group_of(const wire::Report& report) {
  return report.sections.at(0).groups.at(0);
}

/// The report as the next rank decodes it.
wire::Report decoded(const wire::Report& report, std::span<const std::byte> known_items) {
  return std::get<wire::Report>(wire::decode(wire::encode(report), known_items));
}

TEST(EqualReports, ItemsWithKnownBytesAreNotDecodedAgain) {
  EqualReports equal;
  EXPECT_TRUE(equal.known_items().empty());
  equal.begin(wire::Report::Group(group_of(report_of(4, {"a", "b"}))), kNow);
  const wire::Report same = decoded(report_of(5, {"a", "b"}), equal.known_items());
  EXPECT_TRUE(group_of(same).known);
  EXPECT_THAT(group_of(same).requests, SizeIs(0));
  EXPECT_EQ(group_of(same).ranks, RankSet(5));
  wire::Report::Group restored = group_of(same);
  equal.restore(restored);
  EXPECT_EQ(restored, group_of(report_of(5, {"a", "b"})));
  EXPECT_THAT(same.applied, ElementsAre(wire::Report::Applied{0, RankSet(5)}));
  for (const wire::Report& other : {report_of(5, {"a"}), report_of(5, {"a", "c"}),
                                    report_of(5, {"a", "b", "c"}), report_of(5, {"a", "b"}, 2)}) {
    EXPECT_EQ(decoded(other, equal.known_items()), other);
  }
}

TEST(EqualReports, TheSameItemsOfOtherRanksAreAdded) {
  EqualReports equal;
  EXPECT_FALSE(equal.add(group_of(report_of(4, {"a"})))) << "no report was kept";
  equal.begin(wire::Report::Group(group_of(report_of(4, {"a"}))), kNow);
  EXPECT_TRUE(equal.add(group_of(report_of(6, {"a"}))));
  EXPECT_TRUE(equal.add(group_of(decoded(report_of(5, {"a"}), equal.known_items()))));
  EXPECT_FALSE(equal.add(group_of(report_of(7, {"b"}))));
  EXPECT_FALSE(equal.add(group_of(report_of(7, {"a"}, 2)))) << "other stamps";
  EXPECT_FALSE(equal.add(group_of(report_of(6, {"a"})))) << "the rank has reported it";
  EXPECT_EQ(equal.since(), kNow);
  const wire::Report::Group taken = equal.take();
  EXPECT_EQ(taken.ranks, RankSet(4, 6));
  EXPECT_EQ(taken.requests, group_of(report_of(4, {"a"})).requests);
  EXPECT_TRUE(equal.empty());
  EXPECT_TRUE(equal.known_items().empty());
}

/// The aggregator of rank 4 for ranks 4 to 7 of eight.
class AggregatorOfEqualReports : public ::testing::Test {
 protected:
  std::optional<wire::Report> accept(const wire::Report& report) {
    aggregator_.accept(decoded(report, aggregator_.known_items()), kNow);
    return aggregator_.next_report(kNow);
  }

  Cluster cluster_{8};
  Aggregator aggregator_{RankSet(4, 7), cluster_.rank(4), kLongestHold};
};

TEST_F(AggregatorOfEqualReports, AreForwardedAsOneGroup) {
  for (const int rank : {6, 4, 7}) EXPECT_FALSE(accept(report_of(rank, {"a", "b"})));
  EXPECT_TRUE(aggregator_.holds_anything());
  EXPECT_EQ(aggregator_.deadline(), kNow + kLongestHold);
  const auto merged = accept(report_of(5, {"a", "b"}));
  ASSERT_TRUE(merged);
  EXPECT_EQ(group_of(*merged).ranks, RankSet(4, 7));
  EXPECT_EQ(group_of(*merged).requests, group_of(report_of(4, {"a", "b"})).requests);
  EXPECT_THAT(merged->applied, ElementsAre(wire::Report::Applied{0, RankSet(4, 7)}));
  EXPECT_FALSE(aggregator_.holds_anything());
}

TEST_F(AggregatorOfEqualReports, AReportThatDiffersIsMergedByName) {
  EXPECT_FALSE(accept(report_of(6, {"a", "b"})));
  EXPECT_FALSE(accept(report_of(4, {"a", "b"})));
  EXPECT_FALSE(accept(report_of(7, {"b"}))) << "ends the equality";
  EXPECT_TRUE(aggregator_.known_items().empty());
  const auto first = accept(report_of(5, {"a", "b"}));
  ASSERT_TRUE(first);
  EXPECT_EQ(group_of(*first).ranks, RankSet(4, 7));
  ASSERT_THAT(group_of(*first).requests, SizeIs(1));
  EXPECT_EQ(group_of(*first).requests[0].request.name, "b");
  const auto rest = accept(report_of(7, {"a"}, 2));
  ASSERT_TRUE(rest);
  EXPECT_EQ(group_of(*rest).requests.at(0).request.name, "a");
}

TEST_F(AggregatorOfEqualReports, AKnownReportThatCannotBeAddedKeepsItsItems) {
  EXPECT_FALSE(accept(report_of(6, {"a"})));
  wire::Report twice = decoded(report_of(6, {"a"}), aggregator_.known_items());
  ASSERT_TRUE(group_of(twice).known);
  aggregator_.accept(std::move(twice), kNow);
  const auto merged = aggregator_.next_report(kNow + kLongestHold);
  ASSERT_TRUE(merged);
  std::size_t requests = 0;
  for (const auto& group : merged->sections.at(0).groups) requests += group.requests.size();
  EXPECT_EQ(requests, 2U) << "the coordinator reports the error";
}

TEST_F(AggregatorOfEqualReports, AreForwardedInPartsAfterTheLongestHold) {
  EXPECT_FALSE(accept(report_of(6, {"a"})));
  EXPECT_FALSE(accept(report_of(4, {"a"})));
  const auto merged = aggregator_.next_report(kNow + kLongestHold);
  ASSERT_TRUE(merged);
  EXPECT_TRUE(merged->overdue);
  EXPECT_TRUE(aggregator_.passing_through());
  const RankSet both = [] {
    RankSet ranks(4);
    ranks.add(RankSet(6));
    return ranks;
  }();
  EXPECT_EQ(group_of(*merged).ranks, both);
  const auto late = accept(report_of(5, {"a"}));
  ASSERT_TRUE(late) << "reports pass through";
  EXPECT_EQ(group_of(*late).ranks, RankSet(5));
}

}  // namespace
}  // namespace hvd::control
