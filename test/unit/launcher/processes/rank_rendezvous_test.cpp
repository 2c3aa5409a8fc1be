#include "processes/rank_rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>

namespace hvd::launcher {
namespace {

using rendezvous::StoreHello;
using rendezvous::StoreReply;
using rendezvous::StoreRequest;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// hvdrun's side of the rendezvous, and the replies that the processes of each rank receive. A
/// session and its process have the same number.
class RankRendezvousTest : public ::testing::Test {
 protected:
  void start(int size) {
    size_ = size;
    replies_.clear();
    rendezvous_.emplace(
        size, "job", "token",
        [this](int rank, std::uint32_t session, const RankRendezvous::Bytes& frame, bool last) {
          ASSERT_TRUE(frame);
          ++frames_;
          if (frame.get() != kept_.get()) distinct_bytes_ += frame->size();
          kept_ = frame;  // keeps the memory, so that the next frame has another address
          std::string shown;
          if (!frame->empty()) {
            reply_ =
                *rendezvous::decode_store_reply(std::span(*frame).subspan(sizeof(std::uint32_t)));
            shown = text_of(reply_);
          }
          replies_[{rank, session}] = shown + (last ? " (last)" : "");
        });
  }
  std::string text_of(const StoreReply& reply) {
    const auto refusal = rendezvous::decode_refusal(rendezvous::bytes_of(reply.value));
    if (refusal) lost_ = refusal->rank;
    if (refusal) return "refused " + refusal->text;
    return reply.verdict + (reply.verdict == "value" ? " " + reply.value : "");
  }
  static std::string frame_of(const rendezvous::Bytes& body) {
    const auto size = static_cast<std::uint32_t>(body.size());
    return std::string(reinterpret_cast<const char*>(&size), sizeof size) +
           rendezvous::text_of(body);
  }
  void receive(int rank, std::uint32_t session, const std::string& bytes) {
    rendezvous_->receive(rank, {.session = session, .bytes = bytes}, now_);
  }
  std::string send(int rank, std::uint32_t session, const StoreRequest& request) {
    receive(rank, session, frame_of(encode(request)));
    return reply(rank, session);
  }
  std::string wait(int rank, std::uint32_t session, const std::string& key) {
    return send(rank, session,
                {.verb = "wait",
                 .key = "1",
                 .value = rendezvous::text_of(rendezvous::join_fields({key})),
                 .left = 60s});
  }
  StoreHello hello(int rank, std::uint32_t session) const {
    return {.job = "job",
            .rank = rank,
            .size = size_,
            .process = "host h, process " + std::to_string(session),
            .nonce = "n"};
  }
  /// Joins as hvd does, with the token. Returns the last reply.
  std::string join(int rank, std::uint32_t session, const StoreHello& own,
                   const std::string& token = "token") {
    receive(rank, session, frame_of(encode(own)));
    if (reply(rank, session) != "challenge") return "no challenge";
    const auto challenge = *rendezvous::split_fields(rendezvous::bytes_of(reply_.value), 3);
    receive(rank, session,
            frame_of(rendezvous::join_fields(
                {"proof", rendezvous::client_proof(token, own, challenge[1])})));
    return reply(rank, session);
  }
  std::string join(int rank, std::uint32_t session) {
    return join(rank, session, hello(rank, session));
  }
  void close(int rank, std::uint32_t session) {
    rendezvous_->receive(rank, {.session = session, .last = true}, now_);
  }
  std::string reply(int rank, std::uint32_t session = 0) {
    return std::exchange(replies_[{rank, session}], "");
  }

  Deadline now_ = Deadline() + 1h;
  int size_ = 0;
  std::optional<RankRendezvous> rendezvous_;
  std::map<std::pair<int, std::uint32_t>, std::string> replies_;
  StoreReply reply_;
  int lost_ = -2;
  std::size_t frames_ = 0, distinct_bytes_ = 0;
  RankRendezvous::Bytes kept_;
};

TEST_F(RankRendezvousTest, RanksJoinAgainAndAgain) {
  start(2);
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(rendezvous_->has_requested_join(rank), round > 0);
      EXPECT_EQ(join(rank, round), "admitted");
    }
    const std::string key = std::to_string(round);
    EXPECT_EQ(wait(1, round, key), "");
    EXPECT_EQ(send(0, round, {.verb = "set", .key = key, .value = "v"}), "done");
    EXPECT_EQ(reply(1, round), "value v");
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(send(rank, round, {.verb = "close"}), "done (last)");
      close(rank, round);
    }
  }
  EXPECT_FALSE(rendezvous_->next_deadline());
}

TEST_F(RankRendezvousTest, ASecondProcessOfARankIsRefusedAlone) {
  start(2);
  EXPECT_EQ(join(1, 0), "admitted");
  EXPECT_EQ(join(1, 7),
            "refused hvd::init: rank 1 (host h, process 7) has joined at hvdrun:// twice, first "
            "from host h, process 0, which has not called hvd::shutdown() since; one process of "
            "each rank calls hvd::init() (last)");
  EXPECT_EQ(lost_, -1);
  EXPECT_EQ(send(1, 0, {.verb = "get", .key = "k"}), "absent");
  close(1, 0);
  EXPECT_EQ(join(1, 10), "admitted");
}

TEST_F(RankRendezvousTest, ARankWithAnotherNumberOrSizeContradictsAll) {
  for (const bool rank : {true, false}) {
    start(2);
    join(0, 0);
    EXPECT_EQ(wait(0, 0, "k"), "");
    StoreHello other = hello(1, 0);
    other.rank = rank ? 3 : 1;
    other.size = rank ? 4 : 3;
    const std::string text =
        "refused hvd::init: hvdrun has started rank 1 of 2, which has joined as rank " +
        std::string(rank ? "3 of 4" : "1 of 3") +
        " (host h, process 0); leave Options::rank, Options::world_size, HVD_RANK and HVD_SIZE to "
        "hvdrun";
    EXPECT_EQ(join(1, 0, other), text + " (last)");
    EXPECT_EQ(reply(0), text);
    EXPECT_TRUE(rendezvous_->has_requested_join(1))
        << "hvd reports the loss to the rank, so hvdrun does not stop it at once";
    close(0, 0);
    EXPECT_EQ(join(0, 1), "admitted") << "the next time";
    EXPECT_EQ(join(1, 1), "admitted");
    EXPECT_EQ(wait(0, 1, "k"), "");
  }
}

TEST_F(RankRendezvousTest, EachRankReceivesAContradictionOnce) {
  start(4);
  join(0, 0);
  StoreHello other = hello(1, 0);
  other.size = 5;
  const std::string text = "hvdrun has started rank 1 of 4, which has joined as rank 1 of 5";
  EXPECT_THAT(join(1, 0, other), HasSubstr(text));
  EXPECT_THAT(wait(0, 0, "k"), HasSubstr(text)) << "it did not wait then";
  rendezvous_->rank_ended(1, "exit code 2", false, now_);
  EXPECT_THAT(join(2, 0), HasSubstr(text)) << "and not that rank 1 has ended";
  EXPECT_EQ(join(2, 1), "admitted");
  EXPECT_THAT(wait(2, 1, "k"), HasSubstr("rank 1 has ended (exit code 2)"));
  EXPECT_THAT(join(3, 0), HasSubstr(text));
}

TEST_F(RankRendezvousTest, AProcessOfAnotherJobIsRefusedAlone) {
  start(2);
  join(0, 0);
  wait(0, 0, "k");
  EXPECT_EQ(join(1, 0, hello(1, 0), "guess"), " (last)");
  StoreHello other = hello(1, 1);
  other.job = "of yesterday";
  EXPECT_EQ(join(1, 1, other), " (last)");
  EXPECT_FALSE(rendezvous_->has_requested_join(1));
  EXPECT_EQ(join(1, 2), "admitted");
  EXPECT_EQ(reply(0), "");
}

TEST_F(RankRendezvousTest, TheEndOfARankIsReportedAtOnce) {
  start(3);
  join(0, 0);
  wait(0, 0, "k");
  rendezvous_->rank_ended(2, "exit code 3", false, now_);  // it has never joined
  EXPECT_EQ(reply(0),
            "refused hvd::init: rank 2 has ended (exit code 3) and will not join at hvdrun://");
  EXPECT_EQ(lost_, 2);
  rendezvous_->rank_ended(0, "exit code 1", false, now_);
  join(1, 0);  // a later process also gets this reason, although other ranks have ended since
  EXPECT_THAT(wait(1, 0, "k"), HasSubstr("rank 2 has ended (exit code 3)"));
}

TEST_F(RankRendezvousTest, ARankThatEndsAfterALossIsNotNamed) {
  start(3);
  join(2, 0);
  wait(2, 0, "k");
  rendezvous_->rank_ended(0, "exit code 3", true, now_);
  EXPECT_EQ(reply(2), "");
  rendezvous_->rank_ended(1, "killed by signal 9", false, now_);
  EXPECT_THAT(reply(2), HasSubstr("rank 1 has ended (killed by signal 9)"));
  EXPECT_FALSE(rendezvous_->next_deadline());
}

TEST_F(RankRendezvousTest, ARankThatEndsAfterALossIsNamedInTheEnd) {
  start(3);
  join(2, 0);
  wait(2, 0, "k");
  rendezvous_->rank_ended(0, "exit code 3", true, now_);
  rendezvous_->rank_ended(1, "exit code 3", true, now_);
  EXPECT_EQ(rendezvous_->next_deadline(), now_ + 1s);
  rendezvous_->on_time(now_ + 1s);
  EXPECT_THAT(reply(2), HasSubstr("rank 0 has ended (exit code 3)"));
}

// Such a rank was refused by rank 0, which then gives the reason to the other ranks.
TEST_F(RankRendezvousTest, ARankThatEndsAfterItHasLeftIsNamedASecondLater) {
  start(3);
  join(0, 0);
  join(1, 0);
  wait(0, 0, "failed");
  EXPECT_EQ(send(1, 0, {.verb = "close"}), "done (last)");
  rendezvous_->rank_ended(1, "exit code 2", false, now_);
  EXPECT_EQ(reply(0), "");
  join(2, 0);
  EXPECT_EQ(wait(2, 0, "failed"), "");
  rendezvous_->on_time(now_ + 1s);
  for (const int rank : {0, 2})
    EXPECT_THAT(reply(rank), HasSubstr("rank 1 has ended (exit code 2)"));
}

TEST_F(RankRendezvousTest, ALostProcessPublishesItsWill) {
  for (const bool program_ended : {false, true}) {
    start(2);
    join(0, 0);
    join(1, 0);
    send(1, 0, {.verb = "will", .key = "failed", .value = "rank 1"});
    wait(0, 0, "failed");
    if (program_ended) {
      rendezvous_->rank_ended(1, "killed by signal 9", false, now_);
    } else {
      close(1, 0);
    }
    EXPECT_EQ(reply(0), "value rank 1");
  }
}

TEST_F(RankRendezvousTest, FramesMayBeCutAnywhere) {
  start(1);
  const StoreHello own = hello(0, 0);
  for (const char byte : frame_of(encode(own))) receive(0, 0, std::string(1, byte));
  EXPECT_EQ(reply(0), "challenge");
  const auto challenge = *rendezvous::split_fields(rendezvous::bytes_of(reply_.value), 3);
  const std::string both = frame_of(rendezvous::join_fields(
                               {"proof", rendezvous::client_proof("token", own, challenge[1])})) +
                           frame_of(encode(StoreRequest{.verb = "get", .key = "k"}));
  for (const char byte : both) receive(0, 0, std::string(1, byte));
  EXPECT_EQ(reply(0), "absent");
}

TEST_F(RankRendezvousTest, InvalidBytesEndTheSessionAlone) {
  start(2);
  receive(0, 1, "GET / HTTP/1.1\r\n\r\n");
  EXPECT_EQ(reply(0, 1), " (last)");
  EXPECT_EQ(send(0, 2, {.verb = "set", .key = "before it has joined"}), " (last)");
  receive(0, 3, frame_of(rendezvous::join_fields({"hvd store 0", "", "0", "2", "p", "n"})));
  EXPECT_EQ(reply(0, 3), "version (last)");
  close(0, 17);
  EXPECT_EQ(join(0, 0), "admitted");
}

// The bytes of a burst arrive after the session has been ended. They do not begin another one.
TEST_F(RankRendezvousTest, TheRestOfABurstIsIgnored) {
  start(1);
  const std::string junk(64 << 10, '\x7f');
  receive(0, 1, junk);
  EXPECT_EQ(reply(0, 1), " (last)");
  frames_ = 0;
  for (int i = 0; i < 100; ++i) receive(0, 1, junk);
  receive(0, 1, frame_of(encode(hello(0, 1))));
  EXPECT_EQ(frames_, 0U);
  EXPECT_FALSE(rendezvous_->next_deadline());
  close(0, 1);
  EXPECT_EQ(join(0, 1), "admitted") << "the supervisor may use the number again";
}

TEST_F(RankRendezvousTest, AnIdleSessionEnds) {
  start(1);
  receive(0, 1, "\1");
  EXPECT_EQ(rendezvous_->next_deadline(), now_ + 10s);
  rendezvous_->on_time(now_ + 10s);
  EXPECT_EQ(reply(0, 1), " (last)");
}

// In a large job, hvdrun sends the same value to each rank. All frames share its bytes.
TEST_F(RankRendezvousTest, AValueForManyIsCopiedOnce) {
  constexpr int kRanks = 500;
  start(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) join(rank, 0);
  for (int rank = 1; rank < kRanks; ++rank) wait(rank, 0, "all");
  frames_ = distinct_bytes_ = 0;
  send(0, 0, {.verb = "set", .key = "all", .value = std::string(100'000, 'x')});
  EXPECT_EQ(frames_, std::size_t{kRanks});
  EXPECT_LT(distinct_bytes_, 101'000U);
}

}  // namespace
}  // namespace hvd::launcher
