#include "bootstrap/meeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// A meeting, and what its sessions are answered. Session 10 + N is rank N.
class MeetingTest : public ::testing::Test {
 protected:
  void hold(int size) {
    meeting_.emplace(Meeting::Rules{.place = "here", .size = size, .advice = "look"},
                     [this](int session, const std::shared_ptr<const Bytes>& frame, bool last) {
                       const auto answer =
                           decode_answer(std::span(*frame).subspan(sizeof(std::uint32_t)));
                       ASSERT_TRUE(answer);
                       const auto refusal = decode_refusal(bytes_of(answer->value));
                       answers_[session].push_back(answer->verdict + " " +
                                                   (refusal ? refusal->text : answer->value) +
                                                   (last ? " (last)" : ""));
                       if (refusal) lost_ = refusal->rank;
                       frames_.insert(frame.get());
                       kept_.push_back(frame);
                     });
  }
  static Introduction introduction(int rank, int size) {
    return {.job = "train", .token = "secret", .build = "1", .rank = rank, .size = size};
  }
  bool say(int session, const Request& request) {
    return meeting_->handle(session, encode(request), now_);
  }
  bool come(int session, const Introduction& own, std::chrono::milliseconds left = 10s) {
    const Arrival arrival = {.introduction = own,
                             .identity = "h " + std::to_string(session) + " x"};
    return say(session, {.verb = "come", .value = text_of(encode(arrival)), .left = left});
  }
  void all_come(int size) {
    hold(size);
    for (int rank = 0; rank < size; ++rank) come(10 + rank, introduction(rank, size));
    for (int rank = 0; rank < size; ++rank)
      ASSERT_THAT(answers_[10 + rank], ElementsAre("welcome "));
    answers_.clear();
  }
  std::string last_answer(int session) {
    return answers_[session].empty() ? "nothing yet" : answers_[session].back();
  }

  const Deadline begin_ = Deadline() + 1h;
  Deadline now_ = begin_;
  std::optional<Meeting> meeting_;
  std::map<int, std::vector<std::string>> answers_;
  std::set<const Bytes*> frames_;
  std::vector<std::shared_ptr<const Bytes>> kept_;
  int lost_ = -2;
};

TEST_F(MeetingTest, RequestsAndAnswersTravel) {
  const auto request =
      decode_request(encode(Request{.verb = "put", .key = "k", .value = "v", .left = 7ms}));
  ASSERT_TRUE(request);
  EXPECT_EQ(request->verb + request->key + request->value, "putkv");
  EXPECT_EQ(request->left, 7ms);
  EXPECT_FALSE(decode_request(join_fields({"put", "k", "v"})));
  EXPECT_FALSE(decode_request(join_fields({"put", "k", "v", "soon"})));
  EXPECT_EQ(decode_request(join_fields({"wait", "k", "", "-5"}))->left, 0ms);
  EXPECT_EQ(decode_request(join_fields({"wait", "k", "", "9223372036854775807"}))->left,
            std::chrono::milliseconds(std::int64_t{1} << 40));
  EXPECT_FALSE(decode_answer(join_fields({"done"})));
}

TEST_F(MeetingTest, AnExchangeIsOneFrameForAll) {
  all_come(3);
  frames_.clear();
  for (const int rank : {2, 0, 1}) {
    EXPECT_EQ(last_answer(10), "nothing yet");
    EXPECT_TRUE(say(10 + rank, {.verb = "exchange",
                                .key = "address",
                                .value = "of " + std::to_string(rank),
                                .left = 10s}));
  }
  const std::string all = "all " + text_of(join_fields({"of 0", "of 1", "of 2"}));
  for (int session = 10; session < 13; ++session) EXPECT_THAT(answers_[session], ElementsAre(all));
  EXPECT_EQ(frames_.size(), 1U);
  EXPECT_FALSE(meeting_->next_deadline());
}

TEST_F(MeetingTest, WhoIsAbsentFromAnExchangeIsNamedAtTheDeadline) {
  all_come(3);
  say(10, {.verb = "exchange", .key = "a", .value = "", .left = 2s});
  say(12, {.verb = "exchange", .key = "a", .value = "", .left = 3s});
  EXPECT_EQ(meeting_->next_deadline(), now_ + 2s);
  meeting_->on_time(now_ + 2s);
  EXPECT_EQ(last_answer(10), "absent 1");
  EXPECT_EQ(last_answer(12), "nothing yet");
  say(10, {.verb = "exchange", .key = "a", .value = "", .left = 2s});
  EXPECT_EQ(last_answer(10), "exists ") << "its part has come";
}

TEST_F(MeetingTest, AWaitEndsWithAValueOrItsDeadline) {
  all_come(2);
  say(10, {.verb = "wait", .key = "k", .left = 2s});
  EXPECT_FALSE(say(10, {.verb = "get", .key = "k"})) << "one request at a time";
  say(11, {.verb = "put", .key = "k", .value = "v"});
  EXPECT_EQ(last_answer(10), "value v");
  say(10, {.verb = "wait", .key = "other", .left = 2s});
  meeting_->on_time(now_ + 1s);
  EXPECT_EQ(last_answer(10), "value v");
  meeting_->on_time(now_ + 2s);
  EXPECT_EQ(last_answer(10), "nothing ");
}

TEST_F(MeetingTest, TheFirstDeadlineIsThatOfAll) {
  hold(4);
  come(10, introduction(0, 4), 50s);
  come(13, introduction(3, 4), 20s);
  EXPECT_EQ(meeting_->next_deadline(), now_ + 19s) << "in time for the others to hear it";
  meeting_->on_time(now_ + 18s);
  EXPECT_EQ(last_answer(10), "nothing yet");
  meeting_->on_time(now_ + 19s);
  for (const int session : {10, 13})
    EXPECT_EQ(
        last_answer(session),
        "refused hvd::init: ranks 1, 2 have not come to here within 20.0 s (HVD_START_TIMEOUT); "
        "look (last)");
  EXPECT_TRUE(meeting_->over());
  come(11, introduction(1, 4));
  EXPECT_THAT(last_answer(11), HasSubstr("ranks 1, 2 have not come"));
}

TEST_F(MeetingTest, AStrangerIsNamedWhereARankIsMissed) {
  hold(2);
  come(10, introduction(0, 2));
  Introduction stranger = introduction(1, 2);
  stranger.token = "guess";
  come(11, stranger);
  EXPECT_THAT(last_answer(11), HasSubstr("another token"));
  meeting_->on_time(now_ + 10s);
  EXPECT_THAT(last_answer(10), HasSubstr("that came as rank 1 was refused: it has another token"));
}

TEST_F(MeetingTest, WhoEndsBeforeAllHaveComeIsLostToAll) {
  hold(3);
  come(10, introduction(0, 3));
  come(11, introduction(1, 3));
  meeting_->drop(11);
  EXPECT_EQ(last_answer(10),
            "refused hvd::init: rank 1 (host h, process 11) came to here and has ended before the "
            "job has "
            "begun, while rank 2 had not come; see what it last wrote (last)");
  EXPECT_EQ(lost_, 1);
  EXPECT_TRUE(meeting_->over());
}

TEST_F(MeetingTest, KnowsWhetherThereIsSomebodyLeftToTell) {
  hold(3);
  come(10, introduction(0, 3));
  come(11, introduction(1, 3));
  EXPECT_FALSE(meeting_->everybody_knows());
  meeting_->drop(11);
  EXPECT_FALSE(meeting_->everybody_knows());
  come(12, introduction(2, 3));
  EXPECT_TRUE(meeting_->everybody_knows());
}

TEST_F(MeetingTest, WhoEndsBeforeItHasLeftIsLostToWhoeverWaits) {
  all_come(3);
  say(10, {.verb = "exchange", .key = "a", .value = "", .left = 10s});
  meeting_->drop(12);
  EXPECT_THAT(last_answer(10), HasSubstr("rank 2 (host h, process 12) has ended"));
  EXPECT_EQ(lost_, 2);
  say(11, {.verb = "exchange", .key = "a", .value = "", .left = 10s});
  EXPECT_THAT(last_answer(11), HasSubstr("rank 2 (host h, process 12) has ended"));
}

TEST_F(MeetingTest, WhoEndsAfterItHasLeftIsNot) {
  all_come(2);
  for (const int session : {10, 11}) say(session, {.verb = "leave"});
  EXPECT_TRUE(meeting_->over());
  EXPECT_EQ(meeting_->who(11), "host h, process 11");
  meeting_->drop(11);
  say(10, {.verb = "wait", .key = kAllLeft, .left = 1s});
  EXPECT_EQ(last_answer(10), "value ");
}

TEST_F(MeetingTest, WhoComesAgainWhenTheJobHasBegunBeginsNothing) {
  all_come(2);
  meeting_->drop(11);
  come(21, introduction(1, 2));
  EXPECT_THAT(last_answer(21), AllOf(HasSubstr("refused"), HasSubstr("had begun")));
  EXPECT_EQ(last_answer(10), "nothing yet");
}

TEST_F(MeetingTest, TheFirstThatComesIsTheMeasureWhereNoneIsGiven) {
  hold(2);
  Introduction other = introduction(1, 2);
  other.build = "2";
  come(11, other);
  come(10, introduction(0, 2));
  for (const int session : {10, 11})
    EXPECT_THAT(last_answer(session), HasSubstr("rank 0 (host h, process 10) has hvd 1, rank 1 has "
                                                "2; start the same program everywhere"));
}

TEST_F(MeetingTest, NonsenseIsNoRequest) {
  hold(2);
  EXPECT_FALSE(meeting_->handle(10, {}, now_));
  EXPECT_FALSE(say(10, {.verb = "put", .key = "k"})) << "it has not come";
  EXPECT_TRUE(say(10, {.verb = "come", .value = "hello"}));
  EXPECT_THAT(last_answer(10), HasSubstr("another version of hvd"));
  EXPECT_TRUE(come(10, introduction(0, 2)));
  EXPECT_FALSE(come(10, introduction(0, 2)));
  EXPECT_FALSE(say(10, {.verb = "leave"})) << "not all have come";
  come(11, introduction(1, 2));
  EXPECT_FALSE(say(10, {.verb = "dance"}));
}

}  // namespace
}  // namespace hvd::rendezvous
