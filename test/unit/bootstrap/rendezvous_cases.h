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

#include "bootstrap/rendezvous.h"
#include "bootstrap/store.h"
#include "unit/bootstrap/ranks.h"

/// Tests of the rendezvous over any store. A test program instantiates AnyStore with its own kinds
/// of stores.
namespace hvd::rendezvous {

/// Opens the store of a rank at a URL that is new for each test.
using OpenStore = std::function<std::unique_ptr<Store>(const RankInfo&, Deadline)>;

class AnyStore : public ::testing::TestWithParam<OpenStore (*)()> {
 protected:
  std::unique_ptr<Rendezvous> join_as(const RankInfo& own, Deadline deadline = soon(),
                                      const std::string& payload = "") const {
    return Rendezvous::join(open_(own, deadline), own, bytes_of(payload), deadline);
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join_as(info(rank, size), deadline);
  }
  std::function<void()> joins(const RankInfo& own, Deadline deadline = soon()) const {
    return [this, own, deadline] { join_as(own, deadline)->leave(soon()); };
  }
  std::function<void()> joins(int rank, int size, Deadline deadline = soon()) const {
    return joins(info(rank, size), deadline);
  }
  std::unique_ptr<Store> open(const RankInfo& own) const { return open_(own, soon()); }

 private:
  const OpenStore open_ = GetParam()();
};

TEST_P(AnyStore, RanksJoinInAnyOrderExchangeAndLeave) {
  using namespace std::chrono_literals;
  const auto rank = [this](int own, int job) {
    return [this, own, job] {
      std::this_thread::sleep_for(own == job ? 50ms : 0ms);
      const std::string mine = std::to_string(job) + std::to_string(own);
      const auto joined = join_as(info(own, 3), soon(), "first" + mine);
      EXPECT_EQ(joined->rank(), own);
      EXPECT_EQ(joined->size(), 3);
      for (const std::string what : {"first", "a/b c", ""}) {
        if (what != "first") joined->exchange(what, copy_of(what + mine), soon());
        ASSERT_EQ(joined->parts().size(), 3U);
        for (std::size_t other = 0; other < 3; ++other)
          EXPECT_EQ(text_of(joined->parts()[other]),
                    what + std::to_string(job) + std::to_string(other));
      }
      joined->leave(soon());
    };
  };
  // The URL can be used again once all ranks have left.
  for (int job = 0; job < 3; ++job)
    EXPECT_THAT(all_of({rank(0, job), rank(1, job), rank(2, job)}), ::testing::Each("fine"));
}

TEST_P(AnyStore, PartsMayBeEmptyOrLarge) {
  const std::string large(1 << 20, 'x');
  const auto rank = [&](int own) {
    return [&, own] {
      const auto joined = join_as(own, 2);
      EXPECT_EQ(text_of(joined->parts()[0]), "");
      joined->exchange("large", bytes_of(own == 0 ? large : ""), soon());
      EXPECT_EQ(text_of(joined->parts()[0]), large);
      EXPECT_EQ(text_of(joined->parts()[1]), "");
      joined->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1)}), ::testing::Each("fine"));
}

TEST_P(AnyStore, AJobOfOneRank) {
  const auto joined = join_as(info(0, 1), soon(), "x");
  EXPECT_EQ(text_of(joined->parts()[0]), "x");
  EXPECT_EQ(text_of(joined->exchange("y", copy_of("y"), soon())[0]), "y");
  joined->leave(soon());
}

TEST_P(AnyStore, NamesTheMissingRanksOnAllThatHaveJoined) {
  EXPECT_THAT(
      all_of({joins(0, 4, in(std::chrono::milliseconds(500))), joins(2, 4)}),
      ::testing::Each(::testing::AllOf(::testing::StartsWith("lost -1: "),
                                       ::testing::HasSubstr("ranks 1 and 3 have not joined at "),
                                       ::testing::HasSubstr("start as many ranks as"))));
}

TEST_P(AnyStore, NamesThemWhenRank0HasMoreTime) {
  EXPECT_THAT(all_of({joins(0, 3), joins(1, 3, in(std::chrono::seconds(2)))}),
              ::testing::Each(::testing::StartsWith("lost 2: ")));
}

TEST_P(AnyStore, NamesRank0IfItIsMissing) {
  EXPECT_THAT(outcome_of(joins(1, 2, short_time())), ::testing::StartsWith("lost 0: "));
}

TEST_P(AnyStore, AContradictionOfRank0IsAnErrorOnAllRanks) {
  const std::vector<std::pair<RankInfo, std::string>> contradictions = {
      {info(1, 5), "expects 5 ranks"}, {info(1, 3, "0.2.0"), "has hvd 0.2.0"}};
  for (const auto& [other, reason] : contradictions) {
    EXPECT_THAT(all_of({joins(0, 3), joins(other), joins(2, 3)}),
                ::testing::Each(::testing::AllOf(::testing::StartsWith("usage: "),
                                                 ::testing::HasSubstr("rank 1 ("),
                                                 ::testing::HasSubstr(reason))));
  }
}

TEST_P(AnyStore, AProcessOfAnotherBuildIsRefusedAlone) {
  EXPECT_THAT(all_of({joins(0, 2),
                      [this] {
                        EXPECT_THAT(outcome_of(joins(info(1, 3, "0.2.0"))),
                                    ::testing::HasSubstr("has hvd 0.2.0"));
                      }}),
              ::testing::Not(::testing::Each("fine")))
      << "the only other rank contradicts, so the job cannot begin";
  const auto wrong_and_right = [this] {
    EXPECT_THAT(outcome_of(joins(info(1, 3, "0.2.0"))), ::testing::HasSubstr("has hvd 0.2.0"));
    join_as(1, 3)->leave(soon());
  };
  const auto late = [this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    join_as(2, 3)->leave(soon());
  };
  EXPECT_THAT(all_of({joins(0, 3), wrong_and_right, late}), ::testing::Each("fine"));
}

TEST_P(AnyStore, ALateRankReceivesTheReason) {
  EXPECT_THAT(all_of({joins(0, 3), joins(info(1, 3, "0.2.0")),
                      [&] {
                        std::this_thread::sleep_for(std::chrono::milliseconds(300));
                        join_as(2, 3);
                      }}),
              ::testing::Each(::testing::AllOf(::testing::StartsWith("usage: "),
                                               ::testing::HasSubstr("has hvd 0.2.0"))));
}

// Neither a contradiction nor the loss of a rank, so it is an Error for the late rank, too.
TEST_P(AnyStore, ALateRankReceivesTheFailureOfARank) {
  using namespace std::chrono_literals;
  const auto fails = [this] {
    const auto one = Rendezvous::begin(open(info(1, 3)), info(1, 3), {}, soon());
    const Deadline until = in(300ms);
    while (std::chrono::steady_clock::now() < until) one->step(in(50ms));  // rank 0 accepts it
    one->fail({.text = "rank 1 has no GPU"});
    one->leave(soon());
  };
  const auto late = [this] {
    std::this_thread::sleep_for(600ms);
    join_as(2, 3);
  };
  const auto outcomes = all_of({joins(0, 3), fails, late});
  EXPECT_EQ(outcomes[0], "error: rank 1 has no GPU");
  EXPECT_EQ(outcomes[2], "error: rank 1 has no GPU");
}

TEST_P(AnyStore, RefusesARankStartedTwiceAlone) {
  const auto outcomes =
      all_of({joins(0, 3, in(std::chrono::seconds(1))), joins(1, 3), joins(1, 3)});
  EXPECT_THAT(outcomes[0], ::testing::StartsWith("lost 2: "));
  EXPECT_THAT(outcomes, ::testing::Contains(::testing::AllOf(::testing::StartsWith("usage: "),
                                                             ::testing::HasSubstr("twice"))));
  EXPECT_THAT(outcomes, ::testing::Contains(::testing::StartsWith("lost 2: ")).Times(2));
}

TEST_P(AnyStore, AnotherTokenIsRefusedAlone) {
  auto stranger = info(1, 2);
  stranger.token = "guess";
  EXPECT_THAT(all_of({joins(0, 2),
                      [&] {
                        EXPECT_THAT(outcome_of(joins(stranger)), ::testing::HasSubstr("token"));
                        join_as(1, 2)->leave(soon());
                      }}),
              ::testing::Each("fine"));
}

TEST_P(AnyStore, AnExchangeEndsWithTheFailureOrTheLossOfARank) {
  const std::vector<std::pair<Refusal, std::string>> failures = {
      {{.text = "rank 1 has no GPU"}, "error: rank 1 has no GPU"},
      {Refusal::lost(7, "rank 7 has ended"), "lost 7: rank 7 has ended"}};
  for (const auto& [failure, outcome] : failures) {
    const auto waits = [&](int rank) {
      return [&, rank] {
        const auto joined = join_as(rank, 3);
        try {
          joined->exchange("segment", {}, soon());
        } catch (...) {
          joined->leave(soon());
          throw;
        }
      };
    };
    const auto outcomes = all_of({waits(0), waits(2), [&, &reason = failure] {
                                    const auto joined = join_as(1, 3);
                                    joined->fail(reason);
                                    joined->leave(soon());
                                  }});
    EXPECT_EQ(outcomes[0], outcome);
    EXPECT_EQ(outcomes[1], outcome);
  }
}

TEST_P(AnyStore, NamesARankThatDoesNotContribute) {
  std::unique_ptr<Rendezvous> silent;
  const auto outcomes =
      all_of({[&] { join_as(0, 2)->exchange("segment", {}, in(std::chrono::milliseconds(300))); },
              [&] { silent = join_as(1, 2); }});
  EXPECT_THAT(outcomes[0], ::testing::AllOf(::testing::HasSubstr("lost 1: "),
                                            ::testing::HasSubstr("not sent its segment")));
}

}  // namespace hvd::rendezvous
