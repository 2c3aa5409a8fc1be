#include "processes/rank_rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>

namespace hvd::launcher {
namespace {

using rendezvous::JoinRequest;
using rendezvous::RankInfo;
using rendezvous::ServerRequest;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// hvdrun's side of the rendezvous, and the replies that the processes of each rank receive. A
/// session and its process have the same number.
class RankRendezvousTest : public ::testing::Test {
 protected:
  void start(int size) {
    size_ = size;
    rendezvous_.emplace(
        size, "job", "token",
        [this](int rank, std::uint32_t session, const RankRendezvous::Bytes& frame, bool last) {
          ++frames_;
          bytes_ += frame->size();
          kept_ = frame;  // keeps the memory, so that the next frame has another address
          if (frame.get() != latest_) distinct_bytes_ += frame->size();
          latest_ = frame.get();
          const auto answer =
              rendezvous::decode_reply(std::span(*frame).subspan(sizeof(std::uint32_t)));
          ASSERT_TRUE(answer);
          const auto refusal = rendezvous::decode_refusal(rendezvous::bytes_of(answer->value));
          answers_[{rank, session}] =
              answer->verdict + (refusal ? " " + refusal->text : "") + (last ? " (last)" : "");
          if (refusal) lost_ = refusal->rank;
        });
  }
  static std::string request_frame(const ServerRequest& request) {
    const auto body = encode(request);
    const auto size = static_cast<std::uint32_t>(body.size());
    return std::string(reinterpret_cast<const char*>(&size), sizeof size) +
           rendezvous::text_of(body);
  }
  void send(int rank, std::uint32_t session, const ServerRequest& request) {
    rendezvous_->receive(rank, {.session = session, .bytes = request_frame(request)}, now_);
  }
  RankInfo info(int rank) const {
    return {.job = "job", .token = "token", .build = "1", .rank = rank, .size = size_};
  }
  void join(int rank, std::uint32_t session, const RankInfo& own) {
    const JoinRequest arrival = {.info = own, .identity = "h " + std::to_string(session) + " x"};
    send(rank, session,
         {.verb = "join", .value = rendezvous::text_of(encode(arrival)), .left = 10s});
  }
  void join(int rank, std::uint32_t session) { join(rank, session, info(rank)); }
  void close(int rank, std::uint32_t session) {
    rendezvous_->receive(rank, {.session = session, .last = true}, now_);
  }
  std::string answer(int rank, std::uint32_t session = 0) {
    return std::exchange(answers_[{rank, session}], "");
  }

  Deadline now_ = Deadline() + 1h;
  int size_ = 0;
  std::optional<RankRendezvous> rendezvous_;
  std::map<std::pair<int, std::uint32_t>, std::string> answers_;
  int lost_ = -2;
  std::size_t frames_ = 0, bytes_ = 0, distinct_bytes_ = 0;
  RankRendezvous::Bytes kept_;
  const void* latest_ = nullptr;
};

TEST_F(RankRendezvousTest, OneRoundAfterTheOther) {
  start(2);
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(rendezvous_->has_requested_join(rank), round > 0);
      join(rank, round);
    }
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(answer(rank, round), "accepted");
      send(rank, round, {.verb = "leave"});
      close(rank, round);
    }
  }
  EXPECT_FALSE(rendezvous_->next_deadline());
}

TEST_F(RankRendezvousTest, ARankThatJoinsAgainWaitsForRanksThatHaveNotLeft) {
  start(2);
  join(0, 0);
  join(1, 0);
  send(0, 0, {.verb = "leave"});
  close(0, 0);
  join(0, 1);
  answer(1);
  send(1, 0, {.verb = "get", .key = "k"});
  EXPECT_EQ(answer(1), "nothing") << "its own rendezvous continues";
  EXPECT_EQ(answer(0, 1), "");
  close(1, 0);  // it need not leave first, because no other session is left in this rendezvous
  join(1, 1);
  EXPECT_EQ(answer(0, 1), "accepted");
  EXPECT_EQ(answer(1, 1), "accepted");
}

TEST_F(RankRendezvousTest, ASecondProcessOfARankIsRefusedAlone) {
  start(2);
  join(1, 0);
  join(1, 7);  // while the first waits
  EXPECT_THAT(answer(1, 7),
              AllOf(HasSubstr("refused hvd::init: rank 1 (host h, process 7) has joined at "
                              "hvdrun:// twice, first from host h, process 0"),
                    HasSubstr("(last)")));
  join(0, 0);
  EXPECT_EQ(answer(1), "accepted");
  join(1, 8);  // while it begins
  EXPECT_THAT(answer(1, 8), HasSubstr("twice"));
  send(1, 0, {.verb = "leave"});
  join(1, 9);  // while it is in the job
  EXPECT_THAT(answer(1, 9), HasSubstr("twice"));
  EXPECT_EQ(lost_, -1);
  close(1, 0);
  join(1, 10);
  EXPECT_EQ(answer(1, 10), "") << "it may wait for the next rendezvous";
}

TEST_F(RankRendezvousTest, ARankWithAnotherNumberOrSizeContradictsAll) {
  for (const bool rank : {true, false}) {
    start(2);
    join(0, 0);
    RankInfo other = info(1);
    (rank ? other.rank : other.size) = 3;
    join(1, 0, other);
    for (const int each : {0, 1})
      EXPECT_THAT(answer(each),
                  AllOf(HasSubstr("refused hvd::init: hvdrun has started rank 1 of 2, which has "
                                  "joined as rank "),
                        HasSubstr(rank ? "rank 3 of 2" : "rank 1 of 3"), HasSubstr("(last)")));
    EXPECT_TRUE(rendezvous_->has_requested_join(1))
        << "hvd reports the loss to the rank, so hvdrun does not stop it at once";
    join(0, 1);
    join(1, 1);
    EXPECT_EQ(answer(0, 1), "accepted") << "the next time";
  }
}

TEST_F(RankRendezvousTest, EachRankReceivesAContradictionOnce) {
  start(4);
  join(0, 0);
  RankInfo other = info(1);
  other.build = "2";
  join(1, 0, other);
  for (const int rank : {0, 1}) EXPECT_THAT(answer(rank), HasSubstr("has hvd 2, rank 0 has 1;"));
  rendezvous_->rank_ended(1, "exit code 2", false, now_);
  join(2, 0);
  EXPECT_THAT(answer(2), HasSubstr("has hvd 2, rank 0 has 1;")) << "and not that rank 1 has ended";
  join(2, 1);
  EXPECT_THAT(answer(2, 1), HasSubstr("rank 1 has ended (exit code 2)"));
  join(3, 0);
  EXPECT_THAT(answer(3), HasSubstr("has hvd 2, rank 0 has 1;"));
}

TEST_F(RankRendezvousTest, AProcessOfAnotherJobIsRefusedAlone) {
  start(2);
  join(0, 0);
  RankInfo other = info(1);
  other.token = "guess";
  join(1, 0, other);
  EXPECT_THAT(answer(1), AllOf(HasSubstr("refused"), HasSubstr("HVD_JOB_TOKEN"),
                               ::testing::Not(HasSubstr("guess"))));
  other = info(1);
  other.job = "of yesterday";
  join(1, 1, other);
  EXPECT_THAT(answer(1, 1), HasSubstr("those of another job"));
  join(1, 2);
  EXPECT_EQ(answer(0), "accepted");
}

TEST_F(RankRendezvousTest, TheEndOfARankIsReportedAtOnce) {
  start(3);
  join(0, 0);
  rendezvous_->rank_ended(2, "exit code 3", false, now_);  // it has never joined
  EXPECT_EQ(answer(0),
            "refused hvd::init: rank 2 has ended (exit code 3) and will not join at hvdrun:// "
            "(last)");
  EXPECT_EQ(lost_, 2);
  rendezvous_->rank_ended(0, "exit code 1", false, now_);
  join(1, 0);  // a later process also gets this reason, although other ranks have ended since
  EXPECT_THAT(answer(1), HasSubstr("rank 2 has ended (exit code 3)"));
}

TEST_F(RankRendezvousTest, ARankThatEndsAfterALossIsNotNamed) {
  start(3);
  join(2, 0);
  rendezvous_->rank_ended(0, "exit code 3", true, now_);
  EXPECT_EQ(answer(2), "");
  rendezvous_->rank_ended(1, "killed by signal 9", false, now_);
  EXPECT_THAT(answer(2), HasSubstr("rank 1 has ended (killed by signal 9)"));
  EXPECT_FALSE(rendezvous_->next_deadline());
}

TEST_F(RankRendezvousTest, ARankThatEndsAfterALossIsNamedInTheEnd) {
  start(3);
  join(2, 0);
  rendezvous_->rank_ended(0, "exit code 3", true, now_);
  rendezvous_->rank_ended(1, "exit code 3", true, now_);
  EXPECT_EQ(rendezvous_->next_deadline(), now_ + 1s);
  rendezvous_->on_time(now_ + 1s);
  EXPECT_THAT(answer(2), HasSubstr("rank 0 has ended (exit code 3)"));
}

TEST_F(RankRendezvousTest, TheEndOfAProcessIsReportedAtOnce) {
  start(2);
  join(0, 0);
  join(1, 0);
  close(1, 0);
  EXPECT_EQ(answer(0), "accepted");
  send(0, 0, {.verb = "exchange", .key = "a", .left = 10s});
  EXPECT_EQ(answer(0), "failed hvd::init: rank 1 (host h, process 0) ended while the job began");
  start(2);
  join(0, 0);
  close(0, 0);
  join(1, 0);
  join(0, 1);
  EXPECT_EQ(answer(1), "accepted") << "no rank waited then";
}

TEST_F(RankRendezvousTest, TheEndOfARankFailsTheStartOfOthers) {
  start(2);
  join(0, 0);
  join(1, 0);
  send(0, 0, {.verb = "wait", .key = "k", .left = 10s});
  rendezvous_->rank_ended(1, "killed by signal 9", false, now_);
  EXPECT_THAT(answer(0), HasSubstr("rank 1 (host h, process 0) ended while the job began"));
  EXPECT_EQ(lost_, 1);
}

TEST_F(RankRendezvousTest, MissingRanksAreNamedInTime) {
  start(3);
  join(1, 0);
  ASSERT_TRUE(rendezvous_->next_deadline());
  EXPECT_EQ(*rendezvous_->next_deadline(), now_ + 9s);
  rendezvous_->on_time(now_ + 9s);
  EXPECT_THAT(answer(1), AllOf(HasSubstr("ranks 0 and 2 have not joined at hvdrun:// within "),
                               HasSubstr("before it calls hvd::init()")));
  EXPECT_FALSE(rendezvous_->next_deadline());
}

TEST_F(RankRendezvousTest, FramesMayBeCutAnywhere) {
  start(1);
  const JoinRequest arrival = {.info = info(0), .identity = "h 1 x"};
  const std::string both =
      request_frame({.verb = "join", .value = rendezvous::text_of(encode(arrival)), .left = 10s}) +
      request_frame({.verb = "get", .key = "k"});
  for (const char byte : both) rendezvous_->receive(0, {.bytes = {&byte, 1}}, now_);
  EXPECT_EQ(answer(0), "nothing");
}

TEST_F(RankRendezvousTest, InvalidBytesEndTheSessionAlone) {
  start(2);
  rendezvous_->receive(0, {.session = 1, .bytes = "GET / HTTP/1.1\r\n\r\n"}, now_);
  EXPECT_EQ(answer(0, 1), "nothing (last)");
  send(0, 2, {.verb = "put", .key = "before it has joined"});
  EXPECT_EQ(answer(0, 2), "nothing (last)");
  send(0, 3, {.verb = "join", .value = "of another version"});
  EXPECT_THAT(answer(0, 3), HasSubstr("another version of hvd"));
  close(0, 17);
  join(0, 0);
  join(1, 0);
  EXPECT_EQ(answer(0), "accepted");
}

// In a large job, hvdrun sends a frame to each rank for each exchange, all with the same bytes.
TEST_F(RankRendezvousTest, AnExchangeOfManyIsAFrameForEach) {
  constexpr int kRanks = 500;
  const std::string address(300, 'x');
  start(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) join(rank, 0);
  frames_ = bytes_ = distinct_bytes_ = 0;
  for (int rank = 0; rank < kRanks; ++rank)
    send(rank, 0, {.verb = "exchange", .key = "address", .value = address, .left = 10s});
  EXPECT_EQ(frames_, std::size_t{kRanks});
  const std::size_t part = address.size() + sizeof(std::uint32_t);
  EXPECT_GE(distinct_bytes_, kRanks * part);
  EXPECT_LE(distinct_bytes_, kRanks * part + 64);
  EXPECT_EQ(bytes_, kRanks * distinct_bytes_);
}

}  // namespace
}  // namespace hvd::launcher
