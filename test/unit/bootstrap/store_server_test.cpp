#include "bootstrap/store_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/seeds.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// A server of a job of three ranks, and the replies that each session has received.
class StoreServerTest : public ::testing::Test {
 protected:
  StoreServerTest() { start({}); }
  void start(StoreServer::Options options) {
    options.name = "tcp://node:1";
    options.job = "job";
    options.token = "token";
    server_.emplace(std::move(options), [this](int id, const StoreServer::Frame& frame, bool last) {
      std::string shown;
      if (frame) {
        std::uint32_t size = 0;
        std::memcpy(&size, frame->data(), sizeof size);
        ASSERT_EQ(size + sizeof size, frame->size());
        last_reply_ = *decode_store_reply(std::span(*frame).subspan(sizeof size));
        shown = text_of(last_reply_);
        if (frame.get() != latest_.get()) distinct_bytes_ += frame->size();
        latest_ = frame;
      }
      if (last) shown += " (last)";
      replies_[id] += replies_[id].empty() ? shown : " | " + shown;
    });
  }
  static std::string text_of(const StoreReply& reply) {
    if (const auto refusal = decode_refusal(bytes_of(reply.value)))
      return "refused " + refusal->text;
    return reply.verdict + (reply.number != 0 ? " " + std::to_string(reply.number) : "") +
           (reply.value.empty() || reply.verdict == "challenge" ? "" : " " + reply.value);
  }
  static StoreHello hello_of(int rank, int size = 3) {
    return {.job = "job",
            .rank = rank,
            .size = size,
            .process = "host h, process " + std::to_string(rank),
            .nonce = random_id()};
  }
  std::string reply(int id) { return std::exchange(replies_[id], ""); }
  bool handle(int id, std::span<const std::byte> frame) {
    const bool valid = server_->handle(id, frame, now_);
    if (!valid) server_->drop(id);
    return valid;
  }
  /// Sends the hello and the proof. Returns the proof.
  Bytes prove(int id, const StoreHello& hello, const std::string& token = "token") {
    EXPECT_TRUE(handle(id, encode(hello)));
    EXPECT_EQ(reply(id), "challenge");
    const auto fields = *split_fields(bytes_of(last_reply_.value), 3);
    EXPECT_EQ(fields[0], "job");
    EXPECT_EQ(fields[2] == server_proof(token, hello, fields[1]), token == "token");
    const Bytes proof = join_fields({"proof", client_proof(token, hello, fields[1])});
    handle(id, proof);
    return proof;
  }
  /// Opens a session of the rank that is admitted.
  int admit(int rank) {
    const int id = next_id_++;
    server_->open(id, now_);
    prove(id, hello_of(rank));
    EXPECT_EQ(reply(id), "admitted");
    return id;
  }
  std::string send(int id, const StoreRequest& request) {
    EXPECT_TRUE(handle(id, encode(request)));
    return reply(id);
  }
  std::string wait(int id, std::initializer_list<std::string> keys,
                   std::chrono::seconds left = 9s) {
    return send(id, {.verb = "wait",
                     .key = std::to_string(keys.size()),
                     .value = rendezvous::text_of(join_fields(keys)),
                     .left = left});
  }

  Deadline now_ = Deadline() + 1h;
  std::optional<StoreServer> server_;
  std::map<int, std::string> replies_;
  StoreReply last_reply_;
  StoreServer::Frame latest_;
  std::size_t distinct_bytes_ = 0;
  int next_id_ = 0;
};

TEST_F(StoreServerTest, KeepsValues) {
  const int a = admit(0), b = admit(1);
  EXPECT_EQ(send(a, {.verb = "get", .key = "k"}), "absent");
  EXPECT_EQ(send(a, {.verb = "set", .key = "k", .value = "1"}), "done");
  EXPECT_EQ(send(b, {.verb = "get", .key = "k"}), "value 1");
  EXPECT_EQ(send(b, {.verb = "set", .key = "k", .value = "2"}), "done");
  EXPECT_EQ(send(a, {.verb = "get", .key = "k"}), "value 2");
  EXPECT_EQ(send(a, {.verb = "create", .key = "k", .value = "3"}), "exists");
  EXPECT_EQ(send(a, {.verb = "create", .key = "", .value = "3"}), "done");
  EXPECT_EQ(send(b, {.verb = "get"}), "value 3");
  EXPECT_EQ(send(b, {.verb = "add", .key = "n", .value = "2"}), "done 2");
  EXPECT_EQ(send(a, {.verb = "add", .key = "n", .value = "-5"}), "done -3");
  EXPECT_EQ(send(a, {.verb = "get", .key = "n"}), "value -3");
}

TEST_F(StoreServerTest, AMalformedAmountChangesNothing) {
  const int a = admit(0);
  const std::string most = std::to_string(INT64_MAX);
  EXPECT_EQ(send(a, {.verb = "add", .key = "n", .value = most}), "done " + most);
  for (const std::string amount : {"1", "", "one", "99999999999999999999"})
    EXPECT_EQ(send(a, {.verb = "add", .key = "n", .value = amount}), "malformed") << amount;
  EXPECT_EQ(send(a, {.verb = "get", .key = "n"}), "value " + most);
  send(a, {.verb = "set", .key = "text", .value = "x"});
  EXPECT_EQ(send(a, {.verb = "add", .key = "text", .value = "1"}), "malformed");
}

TEST_F(StoreServerTest, RemovesAllValuesIfOneIsUnchanged) {
  const int a = admit(0);
  send(a, {.verb = "set", .key = "run", .value = "1"});
  send(a, {.verb = "set", .key = "k", .value = "v"});
  EXPECT_EQ(send(a, {.verb = "remove_all_if", .key = "run", .value = "0"}), "done");
  EXPECT_EQ(send(a, {.verb = "remove_all_if", .key = "other", .value = ""}), "done");
  EXPECT_EQ(send(a, {.verb = "get", .key = "k"}), "value v");
  const int b = admit(1);
  EXPECT_EQ(wait(b, {"answer"}), "");
  EXPECT_EQ(send(a, {.verb = "remove_all_if", .key = "run", .value = "1"}), "done");
  EXPECT_EQ(reply(b), "absent") << "the answer will not be stored";
  EXPECT_EQ(send(a, {.verb = "get", .key = "k"}), "absent");
}

TEST_F(StoreServerTest, AWaitEndsWithTheFirstOfItsKeys) {
  const int a = admit(0), b = admit(1);
  EXPECT_EQ(wait(a, {"x", "y"}), "");
  EXPECT_EQ(wait(b, {"z"}), "");
  send(admit(2), {.verb = "set", .key = "y", .value = "v"});
  EXPECT_EQ(reply(a), "value 1 v");
  EXPECT_EQ(reply(b), "");
  EXPECT_EQ(wait(a, {"x", "y", "z"}), "value 1 v") << "it has a value already";
  EXPECT_EQ(wait(a, {"y", "x"}), "value v");
  EXPECT_EQ(wait(a, {"x"}), "");
  EXPECT_EQ(*server_->next_deadline(), now_ + 9s);
  server_->on_time(now_ + 9s);
  EXPECT_EQ(reply(a), "absent");
  EXPECT_EQ(reply(b), "absent");
  EXPECT_FALSE(server_->next_deadline());
  EXPECT_EQ(wait(a, {"n"}), "");
  send(b, {.verb = "add", .key = "n", .value = "1"});
  EXPECT_EQ(reply(a), "value 1");
}

TEST_F(StoreServerTest, ALostSessionPublishesItsWill) {
  const int a = admit(0), b = admit(1), c = admit(2);
  send(b, {.verb = "will", .key = "failed", .value = "old"});
  send(b, {.verb = "will", .key = "failed", .value = "rank 1"});
  send(c, {.verb = "will", .key = "failed", .value = "rank 2"});
  wait(a, {"all", "failed"});
  server_->drop(b);
  EXPECT_EQ(reply(a), "value 1 rank 1");
  server_->drop(c);
  EXPECT_EQ(send(a, {.verb = "get", .key = "failed"}), "value rank 1") << "the first one counts";
}

TEST_F(StoreServerTest, AWillMayWaitForAKey) {
  const int a = admit(0), b = admit(1), c = admit(2);
  send(b, {.verb = "will", .key = "failed", .value = "rank 1", .once = "accepted.1"});
  send(c, {.verb = "will", .key = "failed", .value = "rank 2", .once = "accepted.2"});
  server_->drop(b);
  server_->drop(c);
  EXPECT_EQ(wait(a, {"failed"}), "") << "neither has been accepted";
  server_->on_time(now_ + 10s);
  EXPECT_EQ(reply(a), "absent");
  send(a, {.verb = "set", .key = "accepted.2", .value = "x"});
  EXPECT_EQ(send(a, {.verb = "get", .key = "failed"}), "value rank 2");
  const int d = admit(1);
  send(a, {.verb = "set", .key = "accepted.3", .value = "x"});
  send(d, {.verb = "will", .key = "lost", .value = "rank 1", .once = "accepted.3"});
  server_->drop(d);
  EXPECT_EQ(send(a, {.verb = "get", .key = "lost"}), "value rank 1");
}

TEST_F(StoreServerTest, AWillAlsoSetsAKey) {
  const int a = admit(0), b = admit(1), c = admit(2);
  send(b, {.verb = "will", .key = "outcome", .value = "1", .once = "accepted", .also = "left.1"});
  send(c, {.verb = "will", .key = "outcome", .value = "2", .also = "left.2"});
  send(a, {.verb = "set", .key = "outcome", .value = "begun"});
  server_->drop(b);
  server_->drop(c);
  EXPECT_EQ(send(a, {.verb = "get", .key = "left.1"}), "absent");
  EXPECT_EQ(send(a, {.verb = "get", .key = "left.2"}), "value");
  send(a, {.verb = "set", .key = "accepted", .value = "x"});
  EXPECT_EQ(send(a, {.verb = "get", .key = "left.1"}), "value");
  EXPECT_EQ(send(a, {.verb = "get", .key = "outcome"}), "value begun");
}

TEST_F(StoreServerTest, AClosedSessionPublishesNothing) {
  const int a = admit(0), b = admit(1);
  send(b, {.verb = "will", .key = "failed", .value = "rank 1"});
  EXPECT_EQ(send(b, {.verb = "close"}), "done (last)");
  server_->drop(b);
  EXPECT_EQ(send(a, {.verb = "get", .key = "failed"}), "absent");
  EXPECT_FALSE(server_->has_session(1));
  admit(1);
  EXPECT_TRUE(server_->has_session(1));
}

TEST_F(StoreServerTest, AFailureEndsWaitsForAbsentKeysNowAndLater) {
  const int a = admit(0), b = admit(1);
  send(a, {.verb = "set", .key = "k", .value = "v"});
  wait(a, {"x"});
  server_->fail(Refusal::lost(2, "rank 2 has ended"));
  server_->fail(Refusal::lost(0, "rank 0 has ended"));
  EXPECT_EQ(reply(a), "refused rank 2 has ended");
  EXPECT_EQ(wait(b, {"x", "k"}), "value 1 v");
  EXPECT_EQ(wait(b, {"x"}), "refused rank 2 has ended");
  EXPECT_EQ(wait(admit(2), {"x"}), "refused rank 2 has ended");
  EXPECT_EQ(send(b, {.verb = "get", .key = "x"}), "absent");
}

TEST_F(StoreServerTest, AFailureOfSessionsDoesNotReachLaterOnes) {
  const int a = admit(0), b = admit(1);
  wait(a, {"x"});
  server_->fail_sessions(Refusal::usage("contradiction"));
  EXPECT_EQ(reply(a), "refused contradiction");
  EXPECT_EQ(wait(b, {"x"}), "refused contradiction");
  EXPECT_EQ(wait(admit(2), {"x"}), "");
}

TEST_F(StoreServerTest, ASecondSessionOfARankIsRefusedAlone) {
  const int first = admit(1);
  server_->open(50, now_);
  prove(50, hello_of(1));
  EXPECT_EQ(reply(50),
            "refused hvd::init: rank 1 (host h, process 1) has joined at tcp://node:1 twice, first "
            "from host h, process 1; start each rank once (last)");
  EXPECT_EQ(send(first, {.verb = "get", .key = "k"}), "absent");
}

TEST_F(StoreServerTest, ARankMayHaveSeveralSessions) {
  start({.one_session_per_rank = false});
  const int first = admit(1), second = admit(1);
  EXPECT_EQ(send(first, {.verb = "set", .key = "k", .value = "v"}), "done");
  EXPECT_EQ(send(second, {.verb = "get", .key = "k"}), "value v");
  server_->drop(first);
  EXPECT_TRUE(server_->has_session(1)) << "the second one";
  server_->drop(second);
  EXPECT_FALSE(server_->has_session(1));
}

TEST_F(StoreServerTest, TheHookRefusesAProcessThatHasTheToken) {
  int asked = 0;
  start({.admit = [&](int id, const StoreHello& hello) -> std::optional<Refusal> {
    ++asked;
    EXPECT_EQ(id, 4);
    return Refusal::usage("not rank " + std::to_string(hello.rank));
  }});
  server_->open(3, now_);
  prove(3, hello_of(2), "guess");
  EXPECT_EQ(asked, 0);
  server_->open(4, now_);
  prove(4, hello_of(2));
  EXPECT_EQ(reply(4), "refused not rank 2 (last)");
  EXPECT_FALSE(handle(4, encode(StoreRequest{.verb = "get"})));
}

TEST_F(StoreServerTest, AProcessWithoutTheTokenIsRefusedAndNamed) {
  server_->open(0, now_);
  prove(0, hello_of(1), "guess");
  EXPECT_EQ(reply(0), "");
  EXPECT_FALSE(handle(0, encode(StoreRequest{.verb = "get"})));
  StoreHello other = hello_of(2);
  other.job = "other";
  other.process = "host h\x1b[2J, process 7";
  server_->open(1, now_);
  prove(1, other);
  const int ranks[] = {0, 1, 2};
  EXPECT_EQ(server_->remarks(ranks),
            "; a process (host h, process 1) that joined as rank 1 was refused: it has another "
            "token (HVD_JOB_TOKEN); a process (host h?[2J, process 7) that joined as rank 2 was "
            "refused: it has another job name (HVD_JOB_NAME)");
  EXPECT_EQ(server_->remarks(std::span(ranks).first(1)), "");
}

TEST_F(StoreServerTest, ARankMayDistrustTheServer) {
  server_->open(0, now_);
  EXPECT_TRUE(handle(0, encode(hello_of(1))));
  EXPECT_FALSE(handle(0, join_fields({"distrust", ""})));
  const int ranks[] = {1};
  EXPECT_THAT(server_->remarks(ranks), HasSubstr("rank 1 was refused: it has another token"));
}

TEST_F(StoreServerTest, ARecordedSessionIsUseless) {
  const StoreHello hello = hello_of(1);
  server_->open(0, now_);
  const Bytes proof = prove(0, hello);
  EXPECT_EQ(reply(0), "admitted");
  send(0, {.verb = "close"});
  server_->open(1, now_);
  EXPECT_TRUE(handle(1, encode(hello)));
  EXPECT_FALSE(handle(1, proof));
  // A server's own proof, sent back, is no proof either.
  server_->open(2, now_);
  EXPECT_TRUE(handle(2, encode(hello)));
  const auto challenge = *split_fields(bytes_of(last_reply_.value), 3);
  EXPECT_FALSE(handle(2, join_fields({"proof", challenge[2]})));
  EXPECT_EQ(reply(2), "challenge");
}

TEST_F(StoreServerTest, RanksOutsideTheJobAreRefused) {
  for (const auto& [rank, size] :
       {std::pair(-3, 2), {2, 2}, {7, 2}, {0, 0}, {0, -1}, {0, 100'000'000}}) {
    const int id = next_id_++;
    server_->open(id, now_);
    EXPECT_FALSE(handle(id, encode(hello_of(rank, size)))) << rank << " of " << size;
    EXPECT_EQ(reply(id), "");
  }
}

TEST_F(StoreServerTest, AnotherVersionIsNamed) {
  server_->open(0, now_);
  EXPECT_TRUE(handle(0, join_fields({"hvd store 99", "job", "0", "1", "p", "n"})));
  EXPECT_EQ(reply(0), "version hvd store 3 (last)");
  server_->open(1, now_);
  EXPECT_TRUE(handle(1, join_fields({"hvd store 100", "with", "other fields"})));
  EXPECT_EQ(reply(1), "version hvd store 3 (last)");
}

TEST_F(StoreServerTest, AnIdleSessionEndsAfterTenSeconds) {
  next_id_ = 2;
  server_->open(0, now_);
  server_->open(1, now_);
  handle(1, encode(hello_of(1)));  // and no proof
  const int admitted = admit(2);
  EXPECT_EQ(*server_->next_deadline(), now_ + 10s);
  reply(1);
  server_->on_time(now_ + 10s);
  EXPECT_EQ(reply(0), " (last)");
  EXPECT_EQ(reply(1), " (last)");
  EXPECT_EQ(reply(admitted), "");
  EXPECT_FALSE(server_->next_deadline());
}

TEST_F(StoreServerTest, TheOldestSessionsMakeRoom) {
  start({.max_unadmitted = 4});
  next_id_ = 100;
  const int first = admit(0);
  for (int id = 1000; id < 2000; ++id) server_->open(id, now_);
  for (int id = 1000; id < 2000; ++id) EXPECT_EQ(reply(id), id < 1996 ? " (last)" : "") << id;
  next_id_ = 2000;
  admit(1);
  EXPECT_EQ(reply(1996), " (last)");
  EXPECT_TRUE(server_->end_oldest_unadmitted());
  EXPECT_EQ(reply(1997), " (last)");
  EXPECT_EQ(send(first, {.verb = "get", .key = "k"}), "absent");
}

// Every prefix of a valid frame, before and after the admission, ends its session alone.
TEST_F(StoreServerTest, TruncatedFramesEndTheirSessionAlone) {
  const int other = admit(0);
  const Bytes hello = encode(hello_of(1));
  const Bytes request = encode(StoreRequest{.verb = "set", .key = "k", .value = "v", .left = 1s});
  for (std::size_t size = 0; size < hello.size(); ++size) {
    const int id = next_id_++;
    server_->open(id, now_);
    EXPECT_FALSE(handle(id, std::span(hello).first(size))) << size;
  }
  for (std::size_t size = 0; size < request.size(); ++size) {
    const int id = admit(1);
    EXPECT_FALSE(handle(id, std::span(request).first(size))) << size;
  }
  EXPECT_EQ(send(other, {.verb = "get", .key = "k"}), "absent");
  EXPECT_EQ(server_->frame_limit(other), kMaxFrameBytes);
  EXPECT_EQ(server_->frame_limit(12345), kMaxHelloBytes);
  EXPECT_FALSE(server_->next_deadline());
}

TEST_F(StoreServerTest, InvalidRequestsEndTheirSession) {
  const auto invalid = [&](const StoreRequest& request) {
    const int id = admit(1);
    return !handle(id, encode(request));
  };
  EXPECT_TRUE(invalid({.verb = "fly"}));
  EXPECT_TRUE(invalid({.verb = "set", .key = std::string(257, 'k')}));
  EXPECT_TRUE(invalid({.verb = "wait", .key = "0"}));
  EXPECT_TRUE(invalid({.verb = "wait", .key = "2", .value = text_of({})}));
  EXPECT_TRUE(invalid({.verb = "wait", .key = "-1"}));
  const int id = admit(1);
  wait(id, {"x"});
  EXPECT_FALSE(handle(id, encode(StoreRequest{.verb = "get", .key = "k"}))) << "it waits already";
  EXPECT_FALSE(server_->next_deadline());
}

TEST_F(StoreServerTest, RandomBytesEndTheirSessionAlone) {
  testing::Random random(7, 0);
  const int other = admit(0);
  for (int i = 0; i < 3000; ++i) {
    Bytes frame = i % 2 == 0 ? encode(hello_of(1))
                             : encode(StoreRequest{.verb = "wait", .key = "1", .value = "x"});
    const int changes = 1 + random.below(4);
    for (int change = 0; change < changes; ++change)
      frame[static_cast<std::size_t>(random.below(static_cast<int>(frame.size())))] =
          static_cast<std::byte>(random.below(256));
    const int id = i % 4 < 2 ? next_id_++ : admit(1);
    if (i % 4 < 2) server_->open(id, now_);
    if (server_->handle(id, frame, now_)) server_->handle(id, frame, now_);
    server_->drop(id);
  }
  EXPECT_EQ(send(other, {.verb = "get", .key = "k"}), "absent");
  EXPECT_FALSE(server_->next_deadline());
}

// In a large job, the server sends one value to each rank. All replies share its bytes.
TEST_F(StoreServerTest, AValueForManyIsCopiedOnce) {
  constexpr int kRanks = 500;
  std::vector<int> ids;
  for (int rank = 0; rank < kRanks; ++rank) {
    const int id = next_id_++;
    server_->open(id, now_);
    prove(id, hello_of(rank, kRanks));
    ids.push_back(id);
  }
  for (int rank = 1; rank < kRanks; ++rank)
    wait(ids[static_cast<std::size_t>(rank)], {"all", "failed"});
  distinct_bytes_ = 0;
  send(ids[0], {.verb = "set", .key = "all", .value = std::string(100'000, 'x')});
  EXPECT_LT(distinct_bytes_, 101'000U);
  EXPECT_EQ(reply(ids.back()).size(), std::string("value ").size() + 100'000);
}

}  // namespace
}  // namespace hvd::rendezvous
