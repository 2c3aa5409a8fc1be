#include "negotiation/wait_inquiries.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/text.h"
#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TimePoint at_ms(int millisecond) { return TimePoint(milliseconds(millisecond)); }

wire::WaitQuestion question(std::uint64_t number, const std::string& name,
                            wire::SequencePosition sequence_position) {
  return {.question = number,
          .limit_ms = 100,
          .sequence_position = sequence_position,
          .request = allreduce(name)};
}

/// "rank: probe 1 of 'a'" or "rank: answer 5 (3, 7): text".
std::vector<std::string> shown(const std::vector<WaitInquiries::Outgoing>& messages) {
  std::vector<std::string> lines;
  for (const auto& [rank, message] : messages) {
    if (const auto* const probe = std::get_if<wire::WaitProbe>(&message)) {
      lines.push_back(text(rank, ": probe ", probe->probe, " of '", probe->name, "'"));
    } else {
      const auto& answer = std::get<wire::WaitAnswer>(message);
      lines.push_back(text(rank, ": answer ", answer.question, " (", answer.after.plan, ", ",
                           answer.after.position, "): ", answer.text));
    }
  }
  return lines;
}

class WaitInquiriesTest : public ::testing::Test {
 protected:
  std::vector<std::string> release(int now, std::uint64_t last_plan = 0) {
    return shown(inquiries_.release(at_ms(now), last_plan, [](const WaitInquiries::Result& result) {
      std::string all = text(result.unanswered.to_vector().size(), " silent");
      for (const auto& [rank, activity] : result.missing) all += text("; ", rank, " ", activity);
      return all;
    }));
  }
  void ask(int rank, const wire::WaitQuestion& asked, int now, RankSet departed = {}) {
    inquiries_.ask(rank, asked, RankSet(0, 3), departed, at_ms(now));
  }

  WaitInquiries inquiries_;
};

TEST_F(WaitInquiriesTest, ProbesTheSuspectsAndAnswersWhenAllHaveReplied) {
  EXPECT_TRUE(inquiries_.empty());
  ask(2, question(5, "a", {3, 7}), 0);
  EXPECT_THAT(release(0),
              ElementsAre("0: probe 1 of 'a'", "1: probe 1 of 'a'", "3: probe 1 of 'a'"));
  EXPECT_EQ(inquiries_.deadline(), at_ms(100));
  inquiries_.accept(0, {1, {3, 7}, true, ""});
  inquiries_.accept(1, {1, {4, 6}, false, "sleeps"});
  inquiries_.accept(1, {1, {9, 9}, false, "twice"});
  inquiries_.accept(3, {2, {9, 9}, false, "of another probe"});
  EXPECT_THAT(release(50), IsEmpty());
  inquiries_.accept(3, {1, {3, 9}, false, "computes"});
  EXPECT_THAT(release(50, 2), ElementsAre("2: answer 5 (4, 9): 0 silent; 1 sleeps; 3 computes"));
  EXPECT_TRUE(inquiries_.empty());
  inquiries_.accept(3, {1, {3, 9}, false, "too late"});
  EXPECT_THAT(release(1000), IsEmpty());
}

TEST_F(WaitInquiriesTest, TheAnswerIsGivenInTimeWithoutReplies) {
  ask(0, question(1, "a", {0, 0}), 10);
  release(10);
  inquiries_.accept(1, {1, {0, 0}, true, ""});
  EXPECT_THAT(release(109), IsEmpty());
  EXPECT_THAT(release(110, 8), ElementsAre("0: answer 1 (8, 0): 2 silent"));
}

TEST_F(WaitInquiriesTest, RanksThatHaveLeftAreMissingAndNotProbed) {
  ask(0, question(1, "a", {0, 0}), 0, RankSet(2, 3));
  EXPECT_THAT(release(0), ElementsAre("1: probe 1 of 'a'"));
  inquiries_.accept(1, {1, {0, 0}, true, ""});
  EXPECT_THAT(release(0),
              ElementsAre("0: answer 1 (0, 0): 0 silent; 2 has called shutdown(); 3 has "
                          "called shutdown()"));
}

TEST_F(WaitInquiriesTest, RanksAtOnePointShareTheProbes) {
  ask(0, question(1, "a", {2, 2}), 0);
  ask(1, question(1, "a", {2, 2}), 0);
  EXPECT_THAT(release(0),
              ElementsAre("1: probe 1 of 'a'", "2: probe 1 of 'a'", "3: probe 1 of 'a'"))
      << "rank 1 has asked too late to spare it the probe";
  inquiries_.accept(2, {1, {2, 2}, true, ""});
  inquiries_.accept(3, {1, {2, 2}, false, "sleeps"});
  EXPECT_THAT(release(0), ElementsAre("0: answer 1 (2, 2): 0 silent; 3 sleeps",
                                      "1: answer 1 (2, 2): 0 silent; 3 sleeps"));
}

TEST_F(WaitInquiriesTest, AnotherUseOfANameIsAnotherQuestion) {
  ask(0, question(1, "a", {2, 2}), 0);
  ask(1, question(1, "a", {3, 2}), 0);
  ask(2, question(1, "a", {2, 1}), 0);
  ask(1, question(2, "b", {2, 2}), 0);
  EXPECT_EQ(release(0).size(), 12u);
}

class WaitQuestionTest : public ::testing::Test {
 protected:
  static CoordinatorOptions options() {
    CoordinatorOptions made;
    made.host_of_rank = {"alpha", "beta", "gamma"};
    return made;
  }
  std::vector<std::string> messages(int now) {
    return shown(coordinator_.wait_messages(at_ms(now)));
  }
  void submit(int rank, const wire::Request& request) {
    coordinator_.accept(make_report({.rank = rank, .requests = {request}}), at_ms(0));
  }

  Coordinator coordinator_{options(), ProcessSetTable(3)};
};

TEST_F(WaitQuestionTest, OnlyRanksThatHaveNotReportedItAreProbed) {
  submit(0, allreduce("a"));
  submit(1, allreduce("a"));
  coordinator_.ask(1, question(1, "a", {0, 0}), at_ms(0));
  EXPECT_TRUE(coordinator_.has_wait_inquiries());
  EXPECT_EQ(coordinator_.next_deadline(), at_ms(100));
  EXPECT_THAT(messages(0), ElementsAre("2: probe 1 of 'a'"));
  coordinator_.accept(2, wire::WaitReply{1, {0, 0}, false, "waits for barrier 'b'"});
  EXPECT_THAT(messages(0), ElementsAre("1: answer 1 (0, 0): for 1 of 3 ranks: rank 2 (gamma) waits "
                                       "for barrier 'b'"));
  EXPECT_FALSE(coordinator_.has_wait_inquiries());
}

TEST_F(WaitQuestionTest, AllAreProbedWithoutAReportOfIt) {
  submit(1, allreduce("b"));
  coordinator_.ask(0, question(1, "a", {0, 0}), at_ms(0));
  EXPECT_THAT(messages(0), ElementsAre("1: probe 1 of 'a'", "2: probe 1 of 'a'"));
  coordinator_.accept(2, wire::WaitReply{1, {0, 0}, true, ""});
  EXPECT_THAT(messages(100),
              ElementsAre("0: answer 1 (0, 0): for 1 of 3 ranks: rank 1 (beta) has not replied for "
                          "0.1 s, and as far as rank 0 knows it last submitted 'b' 0.1 s ago and "
                          "waits for allreduce 'b'"));
}

TEST_F(WaitQuestionTest, WithoutAMissingRankTheGroupOrTheSetIsTheReason) {
  submit(0, in_group(allreduce("m"), "g", 2, 0));
  for (const int rank : {1, 2}) submit(rank, in_group(allreduce("m"), "g", 2, 0));
  wire::WaitQuestion asked = question(1, "m", {0, 0});
  asked.request = in_group(asked.request, "g", 2, 0);
  coordinator_.ask(0, asked, at_ms(0));
  EXPECT_THAT(messages(0),
              ElementsAre(HasSubstr("for the rest of group 'g', of whose 2 members 1")));
  asked.request.name = "unknown to rank 0";
  coordinator_.ask(0, asked, at_ms(0));
  messages(0);
  for (const int rank : {1, 2}) coordinator_.accept(rank, wire::WaitReply{2, {0, 0}, true, ""});
  EXPECT_THAT(messages(0), ElementsAre(HasSubstr("for the rest of group 'g': every rank has")));
  asked = question(3, "a", {0, 0});
  asked.request.process_set = 4;
  coordinator_.ask(0, asked, at_ms(0));
  EXPECT_THAT(messages(0), ElementsAre("0: answer 3 (0, 0): in process set 4, which was removed"));
}

TEST_F(WaitQuestionTest, ARankOutsideOfTheSetIsRefused) {
  wire::WaitQuestion asked = question(1, "set", {0, 0});
  asked.request.kind = OpKind::kAddProcessSet;
  asked.request.process_set = wire::kOwnMembers;
  asked.request.new_set = {0, 2};
  EXPECT_THROW(coordinator_.ask(1, asked, at_ms(0)), Error);
  coordinator_.ask(2, asked, at_ms(0));
  EXPECT_THAT(messages(0), ElementsAre("0: probe 1 of 'set'"));
}

}  // namespace
}  // namespace hvd::control
