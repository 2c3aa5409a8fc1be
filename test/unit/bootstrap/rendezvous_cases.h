#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "unit/bootstrap/ranks.h"

/// Tests for every kind of Rendezvous. A test program instantiates AnyRendezvous with its own kinds
/// of places.
namespace hvd::rendezvous {

/// Joins at a place that is new for each test.
using JoinPlace = std::function<std::unique_ptr<Rendezvous>(const RankInfo&, Deadline)>;

class AnyRendezvous : public ::testing::TestWithParam<JoinPlace (*)()> {
 protected:
  std::unique_ptr<Rendezvous> join_as(const RankInfo& own, Deadline deadline = soon()) const {
    return join_(own, deadline);
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join_(info(rank, size), deadline);
  }

 private:
  const JoinPlace join_ = GetParam()();
};

TEST_P(AnyRendezvous, RanksJoinInAnyOrderExchangeAndLeave) {
  using namespace std::chrono_literals;
  const auto rank = [this](int own, int job) {
    return [this, own, job] {
      std::this_thread::sleep_for(own == job ? 50ms : 0ms);
      const auto place = join_as(own, 3);
      EXPECT_EQ(place->rank(), own);
      EXPECT_EQ(place->size(), 3);
      for (const std::string what : {"address", "a/b c", ""}) {
        const std::string mine = what + std::to_string(job);
        const auto all = place->exchange(what, copy_of(mine + std::to_string(own)), soon());
        ASSERT_EQ(all.size(), 3U);
        for (int other = 0; other < 3; ++other)
          EXPECT_EQ(shown(all[static_cast<std::size_t>(other)]), mine + std::to_string(other));
      }
      place->leave(soon());
    };
  };
  // The place can be used again once all ranks have left.
  for (int job = 0; job < 3; ++job)
    EXPECT_THAT(all_of({rank(0, job), rank(1, job), rank(2, job)}), ::testing::Each("fine"));
}

TEST_P(AnyRendezvous, AValueIsPutOnce) {
  const auto place = join_as(0, 1);
  const std::string large(1 << 20, 'x');
  EXPECT_EQ(shown(place->get("key")), "nothing");
  EXPECT_EQ(shown(place->wait("key", 0, in(std::chrono::milliseconds(1)))), "nothing");
  place->put("key", copy_of(large));
  EXPECT_EQ(shown(place->get("key")), large);
  EXPECT_EQ(shown(place->wait("key", 0, soon())), large);
  EXPECT_THAT(outcome_of([&] { place->put("key", {}); }),
              ::testing::HasSubstr("'key' was put into"));
  EXPECT_EQ(shown(place->get("key")), large);
  place->leave(soon());
}

TEST_P(AnyRendezvous, AWaitEndsWithThePut) {
  const auto waits = [&] {
    const auto place = join_as(0, 2);
    EXPECT_EQ(shown(place->wait("late", 0, soon())), "here");
    place->leave(soon());
  };
  const auto puts = [&] {
    const auto place = join_as(1, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    place->put("late", copy_of("here"));
    place->leave(soon());
  };
  EXPECT_THAT(all_of({waits, puts}), ::testing::Each("fine"));
}

TEST_P(AnyRendezvous, NamesTheMissingRanksOnAllThatHaveJoined) {
  EXPECT_THAT(
      all_of({[&] { join_as(0, 4, in(std::chrono::milliseconds(500))); }, [&] { join_as(2, 4); }}),
      ::testing::Each(::testing::AllOf(::testing::StartsWith("lost -1: "),
                                       ::testing::HasSubstr("ranks 1 and 3 have not joined at "),
                                       ::testing::HasSubstr("start as many ranks as"))));
}

TEST_P(AnyRendezvous, NamesThemWhenRank0HasMoreTime) {
  EXPECT_THAT(all_of({[&] { join_as(0, 3); }, [&] { join_as(1, 3, in(std::chrono::seconds(2))); }}),
              ::testing::Each(::testing::StartsWith("lost 2: ")));
}

TEST_P(AnyRendezvous, NamesRank0IfItIsMissing) {
  EXPECT_THAT(outcome_of([&] { join_as(1, 2, short_time()); }), ::testing::StartsWith("lost 0: "));
}

TEST_P(AnyRendezvous, AContradictionOfRank0IsAnErrorOnAllRanks) {
  const std::vector<std::pair<RankInfo, std::string>> contradictions = {
      {info(4, 5), "expects 5 ranks"}, {info(1, 3, "0.2.0"), "has hvd 0.2.0"}};
  for (const auto& [other, reason] : contradictions) {
    EXPECT_THAT(all_of({[&] { join_as(0, 3); }, [&, &own = other] { join_as(own); }}),
                ::testing::Each(::testing::AllOf(
                    ::testing::StartsWith("usage: "),
                    ::testing::HasSubstr("rank " + std::to_string(other.rank) + " ("),
                    ::testing::HasSubstr(reason))));
  }
}

// Rank 0 has already refused the other ranks, and stays to inform late ranks.
TEST_P(AnyRendezvous, ALateRankReceivesTheReason) {
  EXPECT_THAT(all_of({[&] { join_as(0, 3); }, [&] { join_as(info(1, 3, "0.2.0")); },
                      [&] {
                        std::this_thread::sleep_for(std::chrono::milliseconds(300));
                        join_as(2, 3);
                      }}),
              ::testing::Each(::testing::AllOf(::testing::StartsWith("usage: "),
                                               ::testing::HasSubstr("has hvd 0.2.0"))));
}

TEST_P(AnyRendezvous, AWaitEndsWithTheFailureOrTheLossOfARank) {
  const std::vector<std::pair<Failure, std::string>> failures = {
      {{"rank 1 has no GPU"}, "error: rank 1 has no GPU"},
      {{"rank 7 has ended", 7}, "lost 7: rank 7 has ended"}};
  for (const auto& [failure, outcome] : failures) {
    const auto outcomes = all_of({[&] { join_as(0, 2)->wait("never", 0, soon()); },
                                  [&, &reason = failure] { join_as(1, 2)->fail(reason); }});
    EXPECT_EQ(outcomes[0], outcome);
  }
}

}  // namespace hvd::rendezvous
