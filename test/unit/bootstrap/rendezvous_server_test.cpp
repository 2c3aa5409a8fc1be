#include "bootstrap/rendezvous_server.h"

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

/// A server, and the replies that it sends. Session 10 + N is rank N.
class RendezvousServerTest : public ::testing::Test {
 protected:
  void serve(int size) {
    server_.emplace(RendezvousServer::Options{.place = "here", .size = size, .advice = "look"},
                    [this](int session, const std::shared_ptr<const Bytes>& frame, bool last) {
                      const auto answer =
                          decode_reply(std::span(*frame).subspan(sizeof(std::uint32_t)));
                      ASSERT_TRUE(answer);
                      const auto refusal = decode_refusal(bytes_of(answer->value));
                      replies_[session].push_back(answer->verdict + " " +
                                                  (refusal ? refusal->text : answer->value) +
                                                  (last ? " (last)" : ""));
                      if (refusal) lost_ = refusal->rank;
                      frames_.insert(frame.get());
                      kept_.push_back(frame);
                    });
  }
  bool say(int session, const ServerRequest& request) {
    return server_->handle(session, encode(request), now_);
  }
  bool join(int session, const RankInfo& own, std::chrono::milliseconds left = 10s) {
    const JoinRequest arrival = {.info = own, .identity = "h " + std::to_string(session) + " x"};
    return say(session, {.verb = "join", .value = text_of(encode(arrival)), .left = left});
  }
  void all_join(int size) {
    serve(size);
    for (int rank = 0; rank < size; ++rank) join(10 + rank, info(rank, size));
    for (int rank = 0; rank < size; ++rank)
      ASSERT_THAT(replies_[10 + rank], ElementsAre("accepted "));
    replies_.clear();
  }
  std::string last_reply(int session) {
    return replies_[session].empty() ? "nothing yet" : replies_[session].back();
  }

  const Deadline begin_ = Deadline() + 1h;
  Deadline now_ = begin_;
  std::optional<RendezvousServer> server_;
  std::map<int, std::vector<std::string>> replies_;
  std::set<const Bytes*> frames_;
  std::vector<std::shared_ptr<const Bytes>> kept_;
  int lost_ = -2;
};

TEST_F(RendezvousServerTest, EncodesRequestsAndReplies) {
  const auto request = decode_server_request(
      encode(ServerRequest{.verb = "put", .key = "k", .value = "v", .left = 7ms}));
  ASSERT_TRUE(request);
  EXPECT_EQ(request->verb + request->key + request->value, "putkv");
  EXPECT_EQ(request->left, 7ms);
  EXPECT_FALSE(decode_server_request(join_fields({"put", "k", "v"})));
  EXPECT_FALSE(decode_server_request(join_fields({"put", "k", "v", "soon"})));
  EXPECT_EQ(decode_server_request(join_fields({"wait", "k", "", "-5"}))->left, 0ms);
  EXPECT_EQ(decode_server_request(join_fields({"wait", "k", "", "9223372036854775807"}))->left,
            std::chrono::milliseconds(std::int64_t{1} << 40));
  EXPECT_FALSE(decode_reply(join_fields({"done"})));
}

TEST_F(RendezvousServerTest, AnExchangeIsOneFrameForAll) {
  all_join(3);
  frames_.clear();
  for (const int rank : {2, 0, 1}) {
    EXPECT_EQ(last_reply(10), "nothing yet");
    EXPECT_TRUE(say(10 + rank, {.verb = "exchange",
                                .key = "address",
                                .value = "of " + std::to_string(rank),
                                .left = 10s}));
  }
  const std::string all = "all " + text_of(join_fields({"of 0", "of 1", "of 2"}));
  for (int session = 10; session < 13; ++session) EXPECT_THAT(replies_[session], ElementsAre(all));
  EXPECT_EQ(frames_.size(), 1U);
  EXPECT_FALSE(server_->next_deadline());
}

TEST_F(RendezvousServerTest, NamesTheRankMissingFromAnExchangeAtTheDeadline) {
  all_join(3);
  say(10, {.verb = "exchange", .key = "a", .value = "", .left = 2s});
  say(12, {.verb = "exchange", .key = "a", .value = "", .left = 3s});
  EXPECT_EQ(server_->next_deadline(), now_ + 2s);
  server_->on_time(now_ + 2s);
  EXPECT_EQ(last_reply(10), "absent 1");
  EXPECT_EQ(last_reply(12), "nothing yet");
  say(10, {.verb = "exchange", .key = "a", .value = "", .left = 2s});
  EXPECT_EQ(last_reply(10), "exists ") << "rank 0 has contributed already";
}

TEST_F(RendezvousServerTest, AWaitEndsWithAValueOrItsDeadline) {
  all_join(2);
  say(10, {.verb = "wait", .key = "k", .left = 2s});
  EXPECT_FALSE(say(10, {.verb = "get", .key = "k"})) << "one request at a time";
  say(11, {.verb = "put", .key = "k", .value = "v"});
  EXPECT_EQ(last_reply(10), "value v");
  say(10, {.verb = "wait", .key = "other", .left = 2s});
  server_->on_time(now_ + 1s);
  EXPECT_EQ(last_reply(10), "value v");
  server_->on_time(now_ + 2s);
  EXPECT_EQ(last_reply(10), "nothing ");
}

TEST_F(RendezvousServerTest, TheShortestTimeoutCountsForAll) {
  serve(4);
  join(10, info(0, 4), 50s);
  join(13, info(3, 4), 20s);
  EXPECT_EQ(server_->next_deadline(), now_ + 19s) << "in time for the others to receive the reason";
  server_->on_time(now_ + 18s);
  EXPECT_EQ(last_reply(10), "nothing yet");
  server_->on_time(now_ + 19s);
  for (const int session : {10, 13})
    EXPECT_EQ(last_reply(session),
              "refused hvd::init: ranks 1 and 2 have not joined at here within 20.0 s "
              "(HVD_START_TIMEOUT); "
              "look (last)");
  EXPECT_TRUE(server_->finished());
  join(11, info(1, 4));
  EXPECT_THAT(last_reply(11), HasSubstr("ranks 1 and 2 have not joined"));
}

TEST_F(RendezvousServerTest, NamesARefusedProcessForAMissingRank) {
  serve(2);
  join(10, info(0, 2));
  RankInfo stranger = info(1, 2);
  stranger.token = "guess";
  join(11, stranger);
  EXPECT_THAT(last_reply(11), HasSubstr("another token"));
  server_->on_time(now_ + 10s);
  EXPECT_THAT(last_reply(10), HasSubstr("that joined as rank 1 was refused: it has another token"));
}

TEST_F(RendezvousServerTest, ReportsARankThatEndsBeforeAllHaveJoinedToAll) {
  serve(3);
  join(10, info(0, 3));
  join(11, info(1, 3));
  server_->drop(11);
  EXPECT_EQ(last_reply(10),
            "refused hvd::init: rank 1 (host h, process 11) joined at here and ended before the "
            "job began, while rank 2 had not joined; see what it last wrote (last)");
  EXPECT_EQ(lost_, 1);
  EXPECT_TRUE(server_->finished());
}

TEST_F(RendezvousServerTest, ReportsWhetherAllRanksAreInformed) {
  serve(3);
  join(10, info(0, 3));
  join(11, info(1, 3));
  EXPECT_FALSE(server_->all_informed());
  server_->drop(11);
  EXPECT_FALSE(server_->all_informed());
  join(12, info(2, 3));
  EXPECT_TRUE(server_->all_informed());
}

TEST_F(RendezvousServerTest, ReportsARankThatEndsBeforeItLeavesToTheWaitingRanks) {
  all_join(3);
  say(10, {.verb = "exchange", .key = "a", .value = "", .left = 10s});
  server_->drop(12);
  EXPECT_THAT(last_reply(10), HasSubstr("rank 2 (host h, process 12) ended"));
  EXPECT_EQ(lost_, 2);
  say(11, {.verb = "exchange", .key = "a", .value = "", .left = 10s});
  EXPECT_THAT(last_reply(11), HasSubstr("rank 2 (host h, process 12) ended"));
}

TEST_F(RendezvousServerTest, DoesNotReportARankThatEndsAfterItHasLeft) {
  all_join(2);
  for (const int session : {10, 11}) say(session, {.verb = "leave"});
  EXPECT_TRUE(server_->finished());
  EXPECT_EQ(server_->process(11), "host h, process 11");
  server_->drop(11);
  say(10, {.verb = "wait", .key = kAllLeft, .left = 1s});
  EXPECT_EQ(last_reply(10), "value ");
}

TEST_F(RendezvousServerTest, RefusesARankThatJoinsAgainAfterTheJobBegan) {
  all_join(2);
  server_->drop(11);
  join(21, info(1, 2));
  EXPECT_THAT(last_reply(21), AllOf(HasSubstr("refused"), HasSubstr("after the job began")));
  EXPECT_EQ(last_reply(10), "nothing yet");
}

TEST_F(RendezvousServerTest, TheFirstRankIsTheReferenceByDefault) {
  serve(2);
  join(11, info(1, 2, "2"));
  join(10, info(0, 2, "1"));
  for (const int session : {10, 11})
    EXPECT_THAT(last_reply(session), HasSubstr("rank 0 (host h, process 10) has hvd 1, rank 1 has "
                                               "2; start the same program everywhere"));
}

TEST_F(RendezvousServerTest, NonsenseIsNoRequest) {
  serve(2);
  EXPECT_FALSE(server_->handle(10, {}, now_));
  EXPECT_FALSE(say(10, {.verb = "put", .key = "k"})) << "it has not joined";
  EXPECT_TRUE(say(10, {.verb = "join", .value = "hello"}));
  EXPECT_THAT(last_reply(10), HasSubstr("another version of hvd"));
  EXPECT_TRUE(join(10, info(0, 2)));
  EXPECT_FALSE(join(10, info(0, 2)));
  EXPECT_FALSE(say(10, {.verb = "leave"})) << "not all have joined";
  join(11, info(1, 2));
  EXPECT_FALSE(say(10, {.verb = "dance"}));
}

}  // namespace
}  // namespace hvd::rendezvous
