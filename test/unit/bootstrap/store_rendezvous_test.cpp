

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

#include "unit/bootstrap/rendezvous_cases.h"

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

JoinPlace in_new_store() {
  return [store = std::make_shared<FakeStore>()](const RankInfo& own, Deadline deadline) {
    return join_in_store(store->functions(), own, deadline);
  };
}
INSTANTIATE_TEST_SUITE_P(Store, AnyRendezvous, ::testing::Values(&in_new_store));

class StoreRendezvousTest : public ::testing::Test {
 protected:
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

TEST_F(StoreRendezvousTest, AllKeysBeginWithTheJobsName) {
  EXPECT_THAT(all_of({[this] { EXPECT_EQ(join_as(0, 2)->place(), "store://fake"); },
                      [this] { join_as(1, 2)->put("a/b c", {}); }}),
              ::testing::Each("fine"));
  EXPECT_THAT(store_.keys(), ::testing::Each(StartsWith("hvd/train/")));
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

TEST_F(StoreRendezvousTest, AnExceptionOfTheStoreIsAnError) {
  store_.break_down();
  EXPECT_THAT(outcome_of(rank_that_joins(info(1, 2))),
              AllOf(StartsWith("error: "), HasSubstr("store://fake"), HasSubstr("reset")));
}

}  // namespace
}  // namespace hvd::rendezvous
