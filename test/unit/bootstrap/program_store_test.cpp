#include "bootstrap/program_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
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
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

/// A store that all ranks of a test reach.
class FakeStore : public std::enable_shared_from_this<FakeStore> {
 public:
  KeyValueStore functions() {
    return {
        .name = "store://fake",
        .set =
            [self = shared_from_this()](const std::string& key, std::span<const std::byte> value) {
              self->work();
              const std::scoped_lock lock(self->mutex_);
              self->values_[key] = Bytes(value.begin(), value.end());
            },
        .get = [self = shared_from_this()](const std::string& key) -> std::optional<Bytes> {
          self->work();
          const std::scoped_lock lock(self->mutex_);
          const auto found = self->values_.find(key);
          return found == self->values_.end() ? std::nullopt : std::optional(found->second);
        },
        .add =
            [self = shared_from_this()](const std::string& key, std::int64_t amount) {
              self->work();
              const std::scoped_lock lock(self->mutex_);
              return self->numbers_[key] += amount;
            }};
  }
  void break_down() { broken_ = true; }
  /// From now on each call lasts until go_on(), like one to a server that is stopped.
  void stop() { stopped_ = true; }
  void go_on() {
    stopped_ = false;
    stopped_.notify_all();
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
    stopped_.wait(true);
    if (broken_) throw std::runtime_error("connection reset");
  }
  std::mutex mutex_;
  std::atomic<bool> broken_ = false;
  std::atomic<bool> stopped_ = false;
  std::map<std::string, Bytes> values_;
  std::map<std::string, std::int64_t> numbers_;
};

std::unique_ptr<Store> open(const std::shared_ptr<FakeStore>& store, Deadline deadline) {
  return open_program_store([store] { return store->functions(); }, "store://", deadline);
}

OpenStore in_new_store() {
  return [store = std::make_shared<FakeStore>()](const RankInfo&, Deadline deadline) {
    return open(store, deadline);
  };
}
INSTANTIATE_TEST_SUITE_P(Store, AnyStore, ::testing::Values(&in_new_store));

class ProgramStoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<Rendezvous> join_as(const RankInfo& own, Deadline deadline = soon()) {
    return Rendezvous::join(open(store_, deadline), own, {}, deadline);
  }
  std::function<void()> joins(const RankInfo& own, Deadline deadline = soon()) {
    return [this, own, deadline] { join_as(own, deadline)->leave(soon()); };
  }

  const std::shared_ptr<FakeStore> store_ = std::make_shared<FakeStore>();
};

TEST_F(ProgramStoreTest, AllKeysBeginWithTheJobsName) {
  EXPECT_THAT(all_of({[this] { EXPECT_EQ(join_as(info(0, 2))->url(), "store://fake"); },
                      [this] { join_as(info(1, 2)); }}),
              Each("fine"));
  EXPECT_THAT(store_->keys(), Each(StartsWith("hvd/train/")));
}

TEST_F(ProgramStoreTest, OneOfSeveralCreatesAValue) {
  const auto first = open(store_, soon());
  const auto second = open(store_, soon());
  EXPECT_TRUE(first->create("key", copy_of("1"), soon()));
  EXPECT_FALSE(second->create("key", copy_of("2"), soon()));
  EXPECT_EQ(shown(second->get("key", soon())), "1");
}

TEST_F(ProgramStoreTest, TheFirstOfTwoRanks0IsRefused) {
  const auto outcomes = all_of({joins(info(0, 2), in(500ms)), joins(info(0, 2), in(500ms))});
  EXPECT_THAT(outcomes,
              ::testing::Contains(AllOf(StartsWith("usage: "), HasSubstr("another process"))));
}

TEST_F(ProgramStoreTest, NamesARefusedProcessForAMissingRank) {
  auto stranger = info(1, 2);
  stranger.token = "guess";
  const auto outcomes = all_of({joins(info(0, 2), in(2s)), joins(stranger)});
  EXPECT_THAT(outcomes[0], HasSubstr("that joined as rank 1 was refused: it has another token"));
}

TEST_F(ProgramStoreTest, AnExceptionOfTheStoreIsAnError) {
  store_->break_down();
  EXPECT_THAT(outcome_of(joins(info(1, 2))),
              AllOf(StartsWith("error: "), HasSubstr("store://fake"), HasSubstr("reset")));
}

TEST_F(ProgramStoreTest, AnExceptionThatExplainsWhyItCannotBeOpenedIsKept) {
  const auto outcome = [](const std::function<KeyValueStore()>& opens) {
    return outcome_of([&] { open_program_store(opens, "store://x", soon()); });
  };
  EXPECT_EQ(outcome([]() -> KeyValueStore { throw Error("no agent"); }), "error: no agent");
  EXPECT_THAT(outcome([]() -> KeyValueStore { throw std::runtime_error("reset"); }),
              "error: hvd::init: the store store://x has failed: reset");
  EXPECT_THAT(outcome([]() -> KeyValueStore { throw 5; }),
              "error: hvd::init: the store store://x has failed");
}

// A call that does not return must not hold the rank past its deadline, nor the destructor.
TEST_F(ProgramStoreTest, AStoppedStoreEndsTheWaitAtTheDeadline) {
  const auto begin = std::chrono::steady_clock::now();
  const auto outcomes = all_of({joins(info(0, 3), in(700ms)), joins(info(1, 3), in(700ms)), [this] {
                                  std::this_thread::sleep_for(100ms);
                                  store_->stop();
                                }});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)],
                AllOf(StartsWith("error: "), HasSubstr("store://fake"),
                      HasSubstr("has not replied within")));
  }
  store_->go_on();
}

TEST_F(ProgramStoreTest, AStoreThatIsStoppedForAWhileGoesOn) {
  EXPECT_THAT(all_of({joins(info(0, 2)), joins(info(1, 2)),
                      [this] {
                        store_->stop();
                        std::this_thread::sleep_for(500ms);
                        store_->go_on();
                      }}),
              Each("fine"));
}

TEST_F(ProgramStoreTest, AStoreThatCannotBeOpenedInTimeIsAnError) {
  const auto release = std::make_shared<std::promise<void>>();
  EXPECT_THAT(outcome_of([&] {
                open_program_store(
                    [release]() -> KeyValueStore {
                      release->get_future().wait();
                      return {};
                    },
                    "store://node7:29500", short_time());
              }),
              AllOf(StartsWith("error: "), HasSubstr("store://node7:29500 has not been opened")));
  release->set_value();
}

}  // namespace
}  // namespace hvd::rendezvous
