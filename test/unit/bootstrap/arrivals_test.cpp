#include "bootstrap/arrivals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using namespace std::chrono_literals;

const std::string kRun(32, 'a');
const ProcessInfo kProcess = {
    .host = "alpha", .boot = "d3b0", .pid = 17, .start_time = 99, .pid_namespace = 4026531836};

Arrival arrival(int rank, int size = 4, const std::string& build = "0.1.0") {
  return {.rank = rank,
          .size = size,
          .build = build,
          .process = kProcess,
          .nonce = "n",
          .left = 10s,
          .payload = "of " + std::to_string(rank)};
}
Bytes sent(const Arrival& content, const std::string& token = "secret") {
  return encode(content, kRun, token);
}
Arrivals arrivals(int size = 4) { return {info(0, size), kRun, "file:///x", "of 0", false}; }
std::string answer_text(const Answer& answer) {
  return answer.accepted ? "accepted" : answer.refusal.text;
}

TEST(Arrival, IsEncodedWithItsProof) {
  const Bytes whole = sent(arrival(2));
  const auto back = decode_arrival(whole);
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->rank, 2);
  EXPECT_EQ(back->size, 4);
  EXPECT_EQ(back->build, "0.1.0");
  EXPECT_EQ(to_string(back->process), "host alpha, process 17");
  EXPECT_EQ(back->process.start_time, 99U);
  EXPECT_EQ(back->process.pid_namespace, 4026531836U);
  EXPECT_EQ(back->nonce, "n");
  EXPECT_EQ(back->left, 10s);
  EXPECT_EQ(back->payload, "of 2");
  EXPECT_TRUE(proven(*back, kRun, "secret"));
  EXPECT_FALSE(proven(*back, kRun, "guess"));
  EXPECT_FALSE(proven(*back, std::string(32, 'b'), "secret")) << "it is for another run";
  for (const auto change : {+[](Arrival& a) { a.rank = 3; }, +[](Arrival& a) { a.payload += "x"; },
                            +[](Arrival& a) { a.nonce = "m"; }, +[](Arrival& a) { a.size = 5; },
                            +[](Arrival& a) { a.process.pid = 18; }}) {
    Arrival changed = *back;
    change(changed);
    EXPECT_FALSE(proven(changed, kRun, "secret"));
  }
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes)
    EXPECT_FALSE(decode_arrival(std::span(whole).first(bytes)).has_value()) << bytes;
}

TEST(Arrival, InvalidValuesAreRejected) {
  EXPECT_FALSE(decode_notice(encode(RunNotice{.run = "short", .process = kProcess})));
  EXPECT_FALSE(
      decode_notice(encode(RunNotice{.run = std::string(31, 'a') + "/", .process = kProcess})));
  EXPECT_TRUE(decode_notice(encode(RunNotice{.run = kRun, .process = kProcess})));
  EXPECT_FALSE(decode_refusal(join_fields({"junk", "1", ""})));
  EXPECT_FALSE(decode_refusal(join_fields({"lost", "one", ""})));
  EXPECT_EQ(decode_failure(copy_of("j\nk")).text, "j?k");
  const Bytes huge(4, std::byte{0xff});
  EXPECT_FALSE(split_fields(huge, 1).has_value());
}

TEST(Arrivals, AcceptEachRankOnce) {
  Arrivals all = arrivals(3);
  EXPECT_FALSE(all.complete());
  EXPECT_EQ(answer_text(all.decide(sent(arrival(2, 3)))), "accepted");
  EXPECT_THAT(answer_text(all.decide(sent(arrival(2, 3)))),
              HasSubstr("rank 2 has joined at file:///x twice, first from host alpha, process 17"));
  EXPECT_THAT(all.absent(), ElementsAre(1));
  EXPECT_EQ(all.shortest_time(), 10s);
  EXPECT_EQ(answer_text(all.decide(sent(arrival(1, 3)))), "accepted");
  EXPECT_TRUE(all.complete());
  EXPECT_THAT(all.take_payloads(), ElementsAre("of 0", "of 1", "of 2"));
}

TEST(Arrivals, AnAcceptanceProvesTheTokenForTheNonce) {
  Arrivals all = arrivals();
  const Answer answer = all.decide(sent(arrival(1)));
  EXPECT_EQ(answer.proof, proof_of_acceptance(kRun, "n", "secret"));
  EXPECT_NE(answer.proof, proof_of_acceptance(kRun, "m", "secret"));
  EXPECT_NE(answer.proof, proof_of_acceptance(kRun, "n", "guess"));
}

TEST(Arrivals, AContradictionCountsOnceAllRanksAreAccountedFor) {
  Arrivals all = arrivals();
  EXPECT_THAT(answer_text(all.decide(sent(arrival(1, 3)))),
              HasSubstr("rank 1 (host alpha, process 17) expects 3 ranks, rank 0 4; give all ranks "
                        "the same world size"));
  EXPECT_THAT(answer_text(all.decide(sent(arrival(3, 4, "0.2.0")))),
              HasSubstr("has hvd 0.2.0, rank 0 has 0.1.0"));
  EXPECT_FALSE(all.objection()) << "rank 2 may be on its way";
  EXPECT_EQ(answer_text(all.decide(sent(arrival(2)))), "accepted");
  ASSERT_TRUE(all.objection());
  EXPECT_THAT(all.objection()->text, HasSubstr("expects 3 ranks"));
  // A fitting process of rank 1 shows that the other one was a stray.
  EXPECT_EQ(answer_text(all.decide(sent(arrival(1)))), "accepted");
  ASSERT_TRUE(all.objection());
  EXPECT_THAT(all.objection()->text, HasSubstr("has hvd 0.2.0"));
  EXPECT_EQ(answer_text(all.decide(sent(arrival(3)))), "accepted");
  EXPECT_FALSE(all.objection());
  EXPECT_TRUE(all.complete());
}

TEST(Arrivals, NameRefusedProcessesForMissingRanks) {
  Arrivals all = arrivals();
  const std::string refusal = answer_text(all.decide(sent(arrival(1), "guess")));
  EXPECT_THAT(refusal,
              AllOf(HasSubstr("another token"), Not(HasSubstr("guess")), Not(HasSubstr("secret"))));
  EXPECT_THAT(answer_text(all.decide(sent(arrival(99)))), HasSubstr("expected a rank from 0 to 3"));
  EXPECT_EQ(all.refused({2, 3}), "");
  EXPECT_THAT(all.refused({1}),
              HasSubstr("; a process (host alpha, process 17) that joined as rank 1 "
                        "was refused: it has another token (HVD_JOB_TOKEN)"));
  EXPECT_THAT(answer_text(all.decide(copy_of("hvd rendezvous 5"))),
              HasSubstr("another version of hvd"));
  EXPECT_THAT(all.refused({2}), HasSubstr("another version of hvd"));
}

TEST(Arrivals, DetectTheEndOfAProcessOfThisHost) {
  Arrivals all(info(0, 3), kRun, "file:///x", "", true);
  Arrival ended = arrival(1, 3);
  ended.process = this_process();
  ended.process.start_time += 1;  // the pid has been reused
  Arrival alive = arrival(2, 3);
  alive.process = this_process();
  all.decide(sent(alive));
  const auto any_rank = [](int) { return true; };
  EXPECT_EQ(all.find_ended(any_rank), nullptr);
  all.decide(sent(ended));
  ASSERT_NE(all.find_ended(any_rank), nullptr);
  EXPECT_EQ(all.find_ended(any_rank)->rank, 1);
  EXPECT_EQ(all.find_ended([](int rank) { return rank != 1; }), nullptr);
  EXPECT_TRUE(all.has_ended(1));
  EXPECT_FALSE(all.has_ended(2));
}

}  // namespace
}  // namespace hvd::rendezvous
