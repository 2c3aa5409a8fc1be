#include "bootstrap/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const RankInfo kRank0 = {
    .job = "train", .token = "secret", .build = "0.1.0 a", .rank = 0, .size = 4};

JoinRequest request_of(const RankInfo& info) {
  return {.info = info,
          .identity = "alpha 17 5f",
          .boot = "d3b0",
          .pid_namespace = 4026531836,
          .pid = 17};
}
std::string objection_to(const RankInfo& info) {
  const auto objection = find_objection(request_of(info), kRank0, "file:///x");
  if (!objection) return "none";
  EXPECT_TRUE(objection->usage);
  return objection->text;
}

TEST(Admission, EncodesJoinRequests) {
  const auto back = decode_join_request(encode(request_of(kRank0)));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->info.job, "train");
  EXPECT_EQ(back->info.token, "secret");
  EXPECT_EQ(back->info.build, "0.1.0 a");
  EXPECT_EQ(back->info.rank, 0);
  EXPECT_EQ(back->info.size, 4);
  EXPECT_EQ(back->identity, "alpha 17 5f");
  EXPECT_EQ(back->boot, "d3b0");
  EXPECT_EQ(back->pid_namespace, 4026531836);
  EXPECT_EQ(back->pid, 17);
  EXPECT_EQ(back->process(), "host alpha, process 17");
}

TEST(Admission, ARankWithAShorterTimeoutIsRefusedEarlier) {
  const auto now = std::chrono::steady_clock::now();
  const Deadline late = now + std::chrono::hours(1);
  const auto in_a_minute =
      decode_join_request(encode(request_of(kRank0), now + std::chrono::minutes(1)));
  ASSERT_TRUE(in_a_minute);
  EXPECT_LT(earlier_refusal_time(late, *in_a_minute), now + std::chrono::minutes(1));
  EXPECT_GT(earlier_refusal_time(late, *in_a_minute), now);
  EXPECT_EQ(earlier_refusal_time(now, *in_a_minute), now);
  EXPECT_EQ(earlier_refusal_time(late, request_of(kRank0)), late);
}

TEST(Admission, RejectsInvalidBytes) {
  const Bytes whole = encode(request_of(kRank0));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes)
    EXPECT_FALSE(decode_join_request(std::span(whole).first(bytes)).has_value()) << bytes;
  EXPECT_FALSE(decode_join_request(join_fields({"hvd rendezvous 2", "", "", "", "0", "1", "x"})));
  EXPECT_FALSE(decode_join_request(
      join_fields({"hvd rendezvous 3", "", "", "", "x", "1", "x", "", "1", "1"})));
  Bytes huge(4, std::byte{0xff});
  EXPECT_FALSE(split_fields(huge, 1).has_value());
  EXPECT_FALSE(decode_refusal(join_fields({"usage", "first", ""})).has_value());
}

TEST(Admission, RefusesRanksThatContradictRank0) {
  RankInfo other = kRank0;
  other.rank = 2;
  EXPECT_EQ(objection_to(other), "none");
  other.size = 3;
  EXPECT_THAT(objection_to(other), HasSubstr("rank 2 (host alpha, process 17) expects 3 ranks, "
                                             "rank 0 4; give all ranks the same world size"));
  other.build = "0.2.0 b";
  EXPECT_THAT(objection_to(other), HasSubstr("has hvd 0.2.0 b, rank 0 has 0.1.0 a"));
  other.token = "guess";
  EXPECT_THAT(objection_to(other),
              AllOf(HasSubstr("another token"), Not(HasSubstr("guess")), Not(HasSubstr("secret"))));
  other.job = "test";
  EXPECT_THAT(objection_to(other), HasSubstr("for job 'test', where rank 0 begins job 'train'"));
}

TEST(Admission, ARefusalIsTheSameErrorEverywhere) {
  const auto lost = decode_refusal(encode(missing({2}, "file:///x", std::chrono::seconds(10))));
  ASSERT_TRUE(lost.has_value());
  try {
    lost->raise();
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.rank(), 2);
    EXPECT_THAT(
        error.what(),
        HasSubstr("rank 2 has not joined at file:///x within 10.0 s (HVD_START_TIMEOUT); "));
  }
  const auto missing_in_1_s = [](const std::vector<int>& ranks) {
    return missing(ranks, "here", std::chrono::seconds(1));
  };
  EXPECT_THAT(missing_in_1_s({1, 3}).text, HasSubstr("ranks 1 and 3 have not joined at here"));
  EXPECT_EQ(missing_in_1_s({1, 3}).rank, -1);
  std::vector<int> many(1000);
  std::iota(many.begin(), many.end(), 1);
  EXPECT_THAT(missing_in_1_s(many).text, HasSubstr("ranks 1 to 1000 have not joined"));
  EXPECT_THROW(decode_refusal(encode({.usage = true, .text = "no"}))->raise(), UsageError);
}

TEST(Admission, NamesARefusedProcessForAMissingRank) {
  const RankInfo own = {.job = "a", .token = "t", .rank = 0, .size = 4};
  ForeignProcesses strangers;
  for (const RankInfo& other : {RankInfo{.job = "b", .token = "t", .rank = 1, .size = 4},
                                RankInfo{.job = "a", .token = "u", .rank = 2, .size = 4},
                                RankInfo{.job = "b", .token = "t", .rank = 99, .size = 4}})
    strangers.add({.info = other, .identity = "h 7 x"}, own);
  EXPECT_EQ(strangers.text({3, 99}), "");
  EXPECT_THAT(
      strangers.text({1, 2}),
      AllOf(HasSubstr("; a process (host h, process 7) that joined as rank 1 was refused: it "
                      "has another job name (HVD_JOB_NAME)"),
            HasSubstr("rank 2 was refused: it has another token (HVD_JOB_TOKEN)")));
}

TEST(Admission, Rank0GivesUpBeforeTheOthers) {
  using namespace std::chrono_literals;
  const Deadline now = std::chrono::steady_clock::now();
  EXPECT_EQ(refusal_time(now + 5min), now + 5min - 1s);
  EXPECT_LT(refusal_time(now + 1s), now + 1s);
  EXPECT_GT(refusal_time(now + 1s), now + 899ms);
  EXPECT_GE(refusal_time(now - 1s), now - 1s) << "the deadline has passed for all";
}

// A rank stores a value and then fails. A wait that reads between the two finds the value.
TEST(Admission, AValueStoredBeforeAFailureIsFound) {
  std::optional<Bytes> value;
  const auto get = [&] { return value; };
  const auto nothing = [] { return std::optional<Bytes>(); };
  EXPECT_FALSE(find_value(get, nothing).has_value());
  const auto put_and_fail = [&] {
    value = copy_of("it");
    return std::optional(encode(Failure{"rank 1 has no GPU"}));
  };
  EXPECT_EQ(shown(find_value(get, put_and_fail)), "it");
  const auto fail = [] { return std::optional(encode(Failure{"rank 1 has ended", 1})); };
  EXPECT_EQ(outcome_of([&] { find_value(nothing, fail); }), "lost 1: rank 1 has ended");
}

TEST(Admission, EachRequestHasItsOwnIdentity) {
  EXPECT_NE(join_request_of({}).identity, join_request_of({}).identity);
}

}  // namespace
}  // namespace hvd::rendezvous
