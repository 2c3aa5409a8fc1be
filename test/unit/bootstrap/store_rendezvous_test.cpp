

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

/// A store that all ranks of a test reach.
class FakeStore {
 public:
  KeyValueStore functions() {
    return {.name = "store://fake",
            .set =
                [this](const std::string& key, std::span<const std::byte> value) {
                  const std::scoped_lock lock(mutex_);
                  work();
                  values_[key] = Bytes(value.begin(), value.end());
                },
            .get = [this](const std::string& key) -> std::optional<Bytes> {
              const std::scoped_lock lock(mutex_);
              work();
              const auto found = values_.find(key);
              return found == values_.end() ? std::nullopt : std::optional(found->second);
            },
            .add =
                [this](const std::string& key, std::int64_t amount) {
                  const std::scoped_lock lock(mutex_);
                  work();
                  return numbers_[key] += amount;
                }};
  }
  void break_down() {
    const std::scoped_lock lock(mutex_);
    broken_ = true;
  }
  std::vector<std::string> keys() {
    const std::scoped_lock lock(mutex_);
    std::vector<std::string> all;
    for (const auto& [key, value] : values_) all.push_back(key);
    for (const auto& [key, value] : numbers_) all.push_back(key);
    return all;
  }

 private:
  void work() const {
    if (broken_) throw std::runtime_error("connection reset");
  }
  std::mutex mutex_;
  bool broken_ = false;
  std::map<std::string, Bytes> values_;
  std::map<std::string, std::int64_t> numbers_;
};

class StoreRendezvousTest : public ::testing::Test {
 protected:
  static RankInfo info(int rank, int size) {
    return {.job = "train", .token = "secret", .build = "0.1.0", .rank = rank, .size = size};
  }
  std::unique_ptr<Rendezvous> join_as(const RankInfo& own, Deadline deadline = soon()) {
    return join_in_store(store_.functions(), own, deadline);
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) {
    return join_as(info(rank, size), deadline);
  }
  std::function<void()> rank_that_joins(const RankInfo& own, Deadline deadline = soon()) {
    return [this, own, deadline] { join_as(own, deadline); };
  }

  FakeStore store_;
};

TEST_F(StoreRendezvousTest, RanksJoinExchangeAndJoinAgain) {
  const auto rank = [this](int own) {
    return [this, own] {
      for (int job = 0; job < 3; ++job) {
        const auto place = join_as(own, 3);
        EXPECT_EQ(place->place(), "store://fake");
        const std::string mine = std::to_string(job) + " of " + std::to_string(own);
        const auto all = place->exchange("a/b c", bytes_of(mine), soon());
        for (std::size_t other = 0; other < all.size(); ++other)
          EXPECT_EQ(text_of(all[other]), std::to_string(job) + " of " + std::to_string(other));
        place->leave(soon());
      }
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1), rank(2)}), ::testing::Each("fine"));
  EXPECT_THAT(store_.keys(), ::testing::Each(StartsWith("hvd/train/")));
}

TEST_F(StoreRendezvousTest, AValueIsPutOnce) {
  const auto place = join_as(0, 1);
  EXPECT_EQ(shown(place->get("k")), "nothing");
  place->put("k", bytes_of("v"));
  EXPECT_EQ(shown(place->get("k")), "v");
  EXPECT_EQ(shown(place->wait("other", 0, short_time())), "nothing");
  EXPECT_THAT(outcome_of([&] { place->put("k", bytes_of("w")); }), HasSubstr("twice"));
}

TEST_F(StoreRendezvousTest, NamesAMissingRankOnAll) {
  const auto outcomes =
      all_of({rank_that_joins(info(0, 3), in(500ms)), rank_that_joins(info(2, 3))});
  for (const auto& outcome : outcomes)
    EXPECT_THAT(outcome, AllOf(StartsWith("lost 1: "), HasSubstr("store://fake")));
}

TEST_F(StoreRendezvousTest, NamesItWhenRank0HasMoreTime) {
  const auto outcomes = all_of({rank_that_joins(info(0, 3)), rank_that_joins(info(2, 3), in(2s))});
  EXPECT_THAT(outcomes, ::testing::Each(StartsWith("lost 1: ")));
}

TEST_F(StoreRendezvousTest, NamesRank0IfItIsMissing) {
  EXPECT_THAT(outcome_of(rank_that_joins(info(1, 2), short_time())), StartsWith("lost 0: "));
}

TEST_F(StoreRendezvousTest, RefusesARankStartedTwiceAlone) {
  const auto outcomes = all_of({rank_that_joins(info(0, 3), in(1s)), rank_that_joins(info(1, 3)),
                                rank_that_joins(info(1, 3))});
  EXPECT_THAT(outcomes[0], StartsWith("lost 2: "));
  EXPECT_THAT(outcomes, ::testing::Contains(AllOf(StartsWith("usage: "), HasSubstr("twice"))));
}

TEST_F(StoreRendezvousTest, ASecondRankZeroIsRefused) {
  const auto outcomes =
      all_of({rank_that_joins(info(0, 2), in(500ms)), rank_that_joins(info(0, 2), in(500ms))});
  EXPECT_THAT(outcomes,
              ::testing::Contains(AllOf(StartsWith("usage: "), HasSubstr("another process"))));
}

TEST_F(StoreRendezvousTest, AContradictionIsAnErrorOnAllRanks) {
  auto other_build = info(1, 2);
  other_build.build = "0.2.0";
  for (const RankInfo& other : {info(1, 3), other_build}) {
    const auto outcomes = all_of({rank_that_joins(info(0, 2)), rank_that_joins(other)});
    EXPECT_THAT(outcomes, ::testing::Each(StartsWith("usage: ")));
  }
}

// Rank 0 has refused the others by then, and stays for late ranks.
TEST_F(StoreRendezvousTest, ALateRankReceivesTheReason) {
  auto other_build = info(1, 3);
  other_build.build = "0.2.0";
  EXPECT_THAT(all_of({rank_that_joins(info(0, 3)), rank_that_joins(other_build),
                      [&] {
                        std::this_thread::sleep_for(300ms);
                        join_as(2, 3);
                      }}),
              ::testing::Each(AllOf(StartsWith("usage: "), HasSubstr("has hvd 0.2.0"))));
}

TEST_F(StoreRendezvousTest, AnotherTokenIsRefusedAlone) {
  auto stranger = info(1, 2);
  stranger.token = "guess";
  const auto outcomes =
      all_of({rank_that_joins(info(0, 2)), [&] {
                EXPECT_THAT(outcome_of(rank_that_joins(stranger)), HasSubstr("another token"));
                join_as(1, 2);
              }});
  EXPECT_THAT(outcomes, ::testing::Each("fine"));
}

TEST_F(StoreRendezvousTest, NamesARefusedProcessForAMissingRank) {
  auto stranger = info(1, 2);
  stranger.token = "guess";
  const auto outcomes =
      all_of({[&] { join_as(0, 2, in(std::chrono::seconds(2))); }, rank_that_joins(stranger)});
  EXPECT_THAT(outcomes[0], HasSubstr("that joined as rank 1 was refused: it has another token"));
}

TEST_F(StoreRendezvousTest, AWaitEndsWithTheFailureOfARank) {
  const auto outcomes = all_of({[this] {
                                  const auto place = join_as(0, 2);
                                  place->wait("k", 0, soon());
                                },
                                [this] { join_as(1, 2)->fail({"no UCX here"}); }});
  EXPECT_EQ(outcomes[0], "error: no UCX here");
}

TEST_F(StoreRendezvousTest, AWaitEndsWithTheLossOfARank) {
  const auto outcomes = all_of({[this] { join_as(0, 2)->wait("never", 0, soon()); },
                                [this] { join_as(1, 2)->fail({"rank 7 has ended", 7}); }});
  EXPECT_EQ(outcomes[0], "lost 7: rank 7 has ended");
}

TEST_F(StoreRendezvousTest, AnExceptionOfTheStoreIsAnError) {
  store_.break_down();
  EXPECT_THAT(outcome_of(rank_that_joins(info(1, 2))),
              AllOf(StartsWith("error: "), HasSubstr("store://fake"), HasSubstr("reset")));
}

}  // namespace
}  // namespace hvd::rendezvous
