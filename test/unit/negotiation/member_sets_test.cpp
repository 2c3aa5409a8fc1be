// Process sets that their members make and remove without the other ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "hvd/error.h"
#include "negotiation/validator.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

wire::Request make_alone(std::vector<int> ranks, const std::string& name = "") {
  wire::Request request = allreduce(name_by_members(name, ranks), {0});
  request.kind = OpKind::kAddProcessSet;
  request.process_set = wire::kOwnMembers;
  request.new_set = std::move(ranks);
  return request;
}

wire::Request remove_alone(int process_set, std::uint64_t ordinal = 0) {
  wire::Request request = unnamed(OpKind::kRemoveProcessSet, ordinal, {0});
  request.process_set = request.removed_set = process_set;
  return request;
}

wire::Request on_set(wire::Request request, int process_set) {
  request.process_set = process_set;
  return request;
}

std::vector<std::string> texts_of(const Applied& applied) {
  std::vector<std::string> texts;
  for (const FailedUse& error : applied.errors) texts.push_back(error.message);
  return texts;
}

TEST(MemberSets, OnlyTheMembersSubmitAndAllRanksLearnTheNumber) {
  Cluster cluster(4);
  cluster.submit(1, make_alone({1, 3}));
  EXPECT_THAT(cluster.exchange()[1].batches, IsEmpty()) << "rank 3 has not submitted it";
  cluster.submit(3, make_alone({1, 3}));
  const auto applied = cluster.exchange();
  for (const int member : {1, 3}) {
    EXPECT_EQ(applied[static_cast<std::size_t>(member)].batches.at(0).result, 1);
    EXPECT_THAT(*applied[static_cast<std::size_t>(member)].batches.at(0).members,
                ElementsAre(1, 3));
  }
  for (const int outside : {0, 2}) {
    EXPECT_THAT(applied[static_cast<std::size_t>(outside)].batches, IsEmpty());
    EXPECT_TRUE(cluster.rank(outside).process_sets().by_members(1));
  }
  cluster.submit(1, on_set(allreduce("a"), 1));
  cluster.submit(3, on_set(allreduce("a"), 1));
  EXPECT_THAT(cluster.exchange()[3].batches, SizeIs(1));
}

TEST(MemberSets, SetsOfDifferentRanksAreMadeAtTheSameTimeInAnyOrder) {
  Cluster cluster(4);
  cluster.submit(0, make_alone({0, 1}, "x"));
  cluster.submit(3, make_alone({2, 3}, "x"));
  cluster.submit(1, make_alone({1, 2}, "y"));
  cluster.report_all();
  cluster.submit(2, make_alone({1, 2}, "y"));
  cluster.submit(2, make_alone({2, 3}, "x"));
  cluster.submit(1, make_alone({0, 1}, "x"));
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[1].batches, SizeIs(2));
  ASSERT_THAT(applied[2].batches, SizeIs(2));
  std::set<std::int64_t> numbers;
  for (const int rank : {1, 2}) {
    for (const AgreedBatch& batch : applied[static_cast<std::size_t>(rank)].batches)
      numbers.insert(batch.result);
  }
  EXPECT_THAT(numbers, ElementsAre(1, 2, 3));
}

TEST(MemberSets, NumbersDoNotDependOnTheOrderOfTheReports) {
  const auto numbers = [](const std::vector<int>& order) {
    Cluster cluster(4);
    for (const int rank : {0, 1}) cluster.submit(rank, make_alone({0, 1}));
    for (const int rank : {2, 3}) cluster.submit(rank, make_alone({2, 3}));
    for (const int rank : order) cluster.report(rank);
    EXPECT_TRUE(cluster.decide());
    const auto applied = cluster.apply_everywhere();
    return std::pair(applied[0].batches.at(0).result, applied[2].batches.at(0).result);
  };
  EXPECT_EQ(numbers({0, 1, 2, 3}), numbers({3, 2, 1, 0}));
}

TEST(MemberSets, EachUseOfANameMakesAnotherSet) {
  Cluster cluster(2);
  for (const int expected : {1, 2}) {
    cluster.submit_everywhere(make_alone({0, 1}, "x"));
    for (const Applied& applied : cluster.exchange())
      EXPECT_EQ(applied.batches.at(0).result, expected);
  }
}

TEST(MemberSets, MembersThatPassDifferentRanksGetAnErrorThatNamesThem) {
  Cluster cluster(4);
  cluster.submit(0, make_alone({0, 1}, "x"));
  cluster.submit(1, make_alone({0, 1, 2}, "x"));
  const auto applied = cluster.exchange();
  const auto disagree = HasSubstr("rank 0 makes [0,1] and not [0,1,2]");
  EXPECT_THAT(texts_of(applied[0]), ElementsAre(disagree));
  EXPECT_THAT(texts_of(applied[1]), ElementsAre(disagree));
  EXPECT_THAT(texts_of(applied[1]), ElementsAre(HasSubstr("rank 1 makes [0,1,2] and not [0,1]")));
  EXPECT_THAT(texts_of(applied[2]), IsEmpty());
  const auto error = cluster.submit(2, make_alone({0, 1, 2}, "x"));
  ASSERT_TRUE(error) << "the others do not wait for rank 2 any more";
  EXPECT_THAT(error->message, disagree);
  EXPECT_FALSE(cluster.coordinator().waiting());
}

TEST(MemberSets, RanksThatHaveGotTheErrorMayTryAgainAtOnce) {
  Cluster cluster(3);
  cluster.submit(0, make_alone({0, 1}));
  cluster.submit(1, make_alone({0, 1, 2}));
  cluster.exchange();
  EXPECT_FALSE(cluster.submit(0, make_alone({0, 1, 2}))) << "not part of the use that failed";
  cluster.submit(1, make_alone({0, 1, 2}));
  ASSERT_TRUE(cluster.submit(2, make_alone({0, 1, 2})));
  cluster.submit(2, make_alone({0, 1, 2}));
  for (const Applied& applied : cluster.exchange()) EXPECT_EQ(applied.batches.at(0).result, 1);
}

TEST(MemberSets, MembersThatUseDifferentOrdersGetAnError) {
  Cluster cluster(3);
  cluster.submit(0, make_alone({0, 1}));
  cluster.submit(1, make_alone({1, 2}));
  EXPECT_THAT(texts_of(cluster.exchange()[0]), IsEmpty()) << "rank 2 may make [1,2] first";
  cluster.submit(2, make_alone({0, 2}));
  const auto applied = cluster.exchange();
  for (const Applied& each : applied) {
    ASSERT_THAT(each.errors, SizeIs(1));
    EXPECT_EQ(each.errors[0].code, StatusCode::kMismatch);
    EXPECT_THAT(each.errors[0].message, AllOf(HasSubstr("rank 0 makes [0,1] and not [0,2]"),
                                              HasSubstr("rank 1 makes [1,2] and not [0,1]"),
                                              HasSubstr("rank 2 makes [0,2] and not [1,2]")));
  }
}

TEST(MemberSets, SetsOfDifferentNamesDoNotWaitForEachOther) {
  Cluster cluster(2);
  cluster.submit(0, make_alone({0, 1}, "x"));
  cluster.submit(1, make_alone({0, 1}, "y"));
  EXPECT_THAT(texts_of(cluster.exchange()[0]), IsEmpty());
  cluster.submit(1, make_alone({0, 1}, "x"));  // another thread
  cluster.submit(0, make_alone({0, 1}, "y"));
  EXPECT_THAT(cluster.exchange()[0].batches, SizeIs(2));
}

TEST(MemberSets, AMemberThatLeavesEndsTheSetAndARankOutsideDoesNot) {
  Cluster cluster(3);
  cluster.rank(2).request_shutdown();
  cluster.report_all();
  cluster.submit(0, make_alone({0, 1}));
  cluster.submit(1, make_alone({0, 1}));
  EXPECT_THAT(cluster.exchange()[0].batches, SizeIs(1));
  cluster.submit(0, make_alone({0, 2}));
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[0].errors, SizeIs(1));
  EXPECT_EQ(applied[0].errors[0].code, StatusCode::kShutdown);
  EXPECT_EQ(applied[0].errors[0].rank, 2);
  EXPECT_THAT(applied[1].errors, IsEmpty());
}

TEST(MemberSets, AMemberThatHasJoinedEndsTheSetAndARankOutsideDoesNot) {
  Cluster cluster(3);
  cluster.submit(2, unnamed(OpKind::kJoin, 0, {0}));
  cluster.report_all();
  cluster.submit(0, make_alone({0, 1}));
  cluster.submit(1, make_alone({0, 1}));
  EXPECT_THAT(cluster.exchange()[0].batches, SizeIs(1));
  cluster.submit(0, make_alone({0, 2}));
  const auto applied = cluster.exchange();
  EXPECT_THAT(texts_of(applied[0]), ElementsAre(HasSubstr("rank 2 has called join()")));
  EXPECT_THAT(applied[2].errors, IsEmpty());
}

TEST(MemberSets, AMemberThatNeverSubmitsItStallsTheOthers) {
  CoordinatorOptions options;
  options.stall.shutdown = std::chrono::seconds(1);
  Cluster cluster(3, options);
  cluster.submit(0, make_alone({0, 1}, "x"));
  cluster.exchange();
  cluster.now += std::chrono::seconds(2);
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[0].errors, SizeIs(1));
  EXPECT_EQ(applied[0].errors[0].code, StatusCode::kStalled);
  EXPECT_THAT(applied[0].errors[0].message, HasSubstr("add_process_set 'x [0,1]'"));
  EXPECT_THAT(applied[2].errors, IsEmpty());
  EXPECT_TRUE(cluster.submit(1, make_alone({0, 1}, "x"))) << "late";
}

TEST(MemberSets, TheMembersAloneRemoveIt) {
  Cluster cluster(3);
  for (const int rank : {0, 2}) cluster.submit(rank, make_alone({0, 2}));
  cluster.exchange();
  cluster.submit(2, on_set(allreduce("a"), 1));
  for (const int rank : {0, 2}) cluster.submit(rank, remove_alone(1));
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[0].batches, SizeIs(1));
  EXPECT_THAT(texts_of(applied[2]), ElementsAre(HasSubstr("process set 1 was removed")));
  for (const Applied& each : applied) EXPECT_THAT(each.sets_removed, ElementsAre(1));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(cluster.rank(rank).process_sets().was_removed(1));
    EXPECT_EQ(cluster.rank(rank).awaiting(), 0u);
  }
  EXPECT_FALSE(cluster.coordinator().waiting());
}

TEST(MemberSets, ASecondRemovalEndsWithTheSet) {
  Cluster cluster(2);
  cluster.submit_everywhere(make_alone({0, 1}));
  cluster.exchange();
  cluster.submit_everywhere(remove_alone(1, 0));
  cluster.submit_everywhere(remove_alone(1, 1));
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[0].batches, SizeIs(1));
  EXPECT_THAT(texts_of(applied[0]), ElementsAre(HasSubstr("process set 1 was removed")));
  EXPECT_FALSE(cluster.coordinator().waiting());
  EXPECT_EQ(cluster.rank(1).awaiting(), 0u);
}

TEST(MemberSets, AReplayDoesNotBeginWhileASetWaitsForAMember) {
  CoordinatorOptions options;
  options.schedule_lock = true;
  Cluster cluster(2, options);
  cluster.submit(0, make_alone({0, 1}));
  cluster.exchange();
  for (int step = 0; step < 8; ++step) {
    cluster.submit_everywhere(allreduce("a"));
    EXPECT_THAT(cluster.exchange()[0].replay, IsEmpty());
  }
  cluster.submit(1, make_alone({0, 1}));
  cluster.exchange();
  bool replayed = false;
  for (int step = 0; step < 8 && !replayed; ++step) {
    cluster.submit_everywhere(allreduce("a"));
    replayed = !cluster.exchange()[0].replay.empty();
  }
  EXPECT_TRUE(replayed);
}

TEST(MemberSets, AReportThatNoRankCanHaveMadeIsRefused) {
  Cluster cluster(3);
  EXPECT_THROW(cluster.submit(2, make_alone({0, 1})), UsageError);
  const auto refuses = [&](const wire::Request& request) {
    const std::uint64_t applied = cluster.rank(2).last_applied();
    const wire::Report report =
        make_report({.rank = 2, .last_applied = applied, .requests = {request}});
    EXPECT_THROW(cluster.coordinator().accept(report, cluster.now), Error);
  };
  refuses(make_alone({0, 1}));
  refuses(make_alone({2, 3}));
  wire::Request renamed = make_alone({0, 2});
  renamed.name = "x";
  refuses(renamed);
  for (const int rank : {0, 2}) cluster.submit(rank, make_alone({0, 2}));
  cluster.exchange();
  wire::Request of_other_set = remove_alone(2);
  of_other_set.process_set = 1;
  refuses(of_other_set);
}

TEST(MemberSets, AListIsNamedByItsRanksOrItsDigest) {
  EXPECT_EQ(name_by_members("", {0, 2}), "[0,2]");
  EXPECT_EQ(name_by_members("x", {0, 2}), "x [0,2]");
  std::vector<int> many(5000);
  for (int i = 0; i < 5000; ++i) many[static_cast<std::size_t>(i)] = 2 * i;
  const std::string text = members_text(many);
  EXPECT_THAT(text, ::testing::StartsWith("[0,2,4,6,...,9998]#5000#"));
  EXPECT_LT(text.size(), 128u);
  many[2500] += 1;
  EXPECT_NE(members_text(many), text);
}

TEST(MemberSets, ARequestThatIsNoMembersOperationDoesNotDecode) {
  const auto refused = [](const wire::Request& request) {
    const wire::Report report = make_report({.rank = 0, .requests = {request}});
    EXPECT_THROW(wire::decode(wire::encode(report)), Error) << describe(request);
  };
  refused(on_set(allreduce("a"), wire::kOwnMembers));
  wire::Request unsorted = make_alone({0, 1});
  unsorted.new_set = {1, 0};
  refused(unsorted);
  wire::Request of_no_rank = make_alone({0});
  of_no_rank.new_set.clear();
  refused(of_no_rank);
  refused(in_group(make_alone({0, 1}), "g", 1, 0));
  const wire::Request request = make_alone({0, 1}, "x");
  EXPECT_EQ(request, std::get<wire::Report>(wire::decode(wire::encode(
                                                make_report({.rank = 0, .requests = {request}}))))
                         .sections.at(0)
                         .groups.at(0)
                         .requests.at(0)
                         .request);
}

}  // namespace
}  // namespace hvd::control
