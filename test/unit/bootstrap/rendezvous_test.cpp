// The protocol over a store in memory: ranks are objects that one thread steps, so each test
// chooses where a rank is killed.
#include "bootstrap/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/arrivals.h"
#include "unit/bootstrap/memory_store.h"
#include "unit/bootstrap/rendezvous_cases.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

OpenStore in_new_memory() {
  return [memory = std::make_shared<StoreMemory>()](const RankInfo&, Deadline) {
    return std::make_unique<MemoryStore>(memory);
  };
}
INSTANTIATE_TEST_SUITE_P(Memory, AnyStore, ::testing::Values(&in_new_memory));

Deadline now() { return std::chrono::steady_clock::now(); }

using Turn = Rendezvous::Turn;

/// Thrown in place of an access to the store: the rank has been killed there.
struct Killed : std::runtime_error {
  Killed() : std::runtime_error("killed") {}
};

class RendezvousTest : public ::testing::Test {
 protected:
  /// Begins to join. @param killed_at the number of the access to the store at which the rank is
  /// killed
  std::unique_ptr<Rendezvous> begin(const RankInfo& own, std::size_t killed_at = 0,
                                    Deadline deadline = soon()) {
    auto store = std::make_unique<MemoryStore>(memory_);
    store->before = [killed_at, accesses = std::size_t{0}](const std::string&) mutable {
      if (++accesses == killed_at) throw Killed();
    };
    return Rendezvous::begin(std::move(store), own, bytes_of(std::to_string(own.rank)), deadline);
  }
  std::unique_ptr<Rendezvous> begin(int rank, int size, std::size_t killed_at = 0) {
    return begin(info(rank, size), killed_at);
  }
  /// Steps the ranks until all have joined; returns false if that takes too long.
  static bool all_join(const std::vector<Rendezvous*>& ranks) {
    std::vector<bool> joined(ranks.size());
    for (int round = 0; round < 100; ++round) {
      bool all = true;
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        if (!joined[i]) joined[i] = ranks[i]->step(now());
        all = all && joined[i];
      }
      if (all) return true;
    }
    return false;
  }
  /// Makes a step, and ignores that the rank is killed in it.
  static void step_until_killed(Rendezvous& rank) {
    try {
      rank.step(now());
    } catch (const Killed&) {
    }
  }
  static std::string outcome_of_steps(Rendezvous& rank) {
    return outcome_of([&] {
      for (int i = 0; i < 10; ++i)
        if (rank.step(now())) return;
      throw Error("has not ended");
    });
  }
  std::string current_run() const {
    const auto notice = decode_notice(memory_->values.at("hvd/train/run"));
    return notice ? notice->run : "";
  }
  /// Stores an arrival as any process with access to the store can.
  std::int64_t store_arrival(const Bytes& arrival) {
    const std::string run = "hvd/train/" + current_run() + "/";
    const std::int64_t number = ++memory_->numbers[run + "arrivals"];
    memory_->values[run + "arrival." + std::to_string(number)] = arrival;
    return number;
  }
  std::string answer_to(std::int64_t number) const {
    const std::string run = "hvd/train/" + current_run() + "/";
    if (memory_->values.contains(run + "accepted." + std::to_string(number))) return "accepted";
    const auto refused = memory_->values.find(run + "refused." + std::to_string(number));
    return refused == memory_->values.end() ? "none" : decode_failure(refused->second).text;
  }
  static Arrival arrival(int rank, int size) {
    return {.rank = rank, .size = size, .build = "0.1.0", .process = this_process(), .nonce = "n"};
  }

  const std::shared_ptr<StoreMemory> memory_ = std::make_shared<StoreMemory>();
};

TEST_F(RendezvousTest, ARankWithoutAnAnswerFollowsTheNewestRun) {
  const auto first = begin(0, 2);
  const auto other = begin(1, 2);
  other->step(now());  // it has arrived, and rank 0 has not answered
  const auto second = begin(0, 2);
  EXPECT_TRUE(all_join({second.get(), other.get()}));
  EXPECT_THAT(outcome_of_steps(*first), AllOf(StartsWith("usage: "), HasSubstr("another process")));
}

// The leftover rank of a dead run must not take a rank's place in the next run.
TEST_F(RendezvousTest, ARankWithAnAnswerNeverJoinsAnotherRun) {
  auto first = begin(0, 3);
  const auto leftover = begin(1, 3);
  leftover->step(now());
  first->step(now());
  leftover->step(now());  // accepted
  first.reset();          // killed
  const auto second = begin(0, 3);
  const auto one = begin(1, 3);
  const auto two = begin(2, 3);
  EXPECT_TRUE(all_join({second.get(), one.get(), two.get()}));
  EXPECT_THAT(outcome_of_steps(*leftover), AllOf(StartsWith("lost 0: "), HasSubstr("replaced")));
}

// Rank 0 is killed at each of its accesses, restarts, and the job begins with the new rank 0. The
// other ranks either follow or end; those that have ended restart, too.
TEST_F(RendezvousTest, Rank0IsKilledAtAnyAccess) {
  bool ended_before_the_end = false;
  for (std::size_t access = 1; access < 60; ++access) {
    memory_->values.clear();
    memory_->numbers.clear();
    std::vector<std::unique_ptr<Rendezvous>> others;
    for (const int rank : {1, 2}) others.push_back(begin(rank, 3));
    bool killed = false;
    try {
      const auto first = begin(0, 3, access);
      for (int round = 0; round < 20; ++round) {
        if (first->step(now())) break;
        for (const auto& other : others) static_cast<void>(other->step(now()));
      }
    } catch (const Killed&) {
      killed = true;
    }
    if (!killed) {
      ended_before_the_end = true;
      break;
    }
    std::vector<bool> joined(2);
    const auto second = begin(0, 3);
    bool zero = false;
    for (int round = 0; round < 100 && !(zero && joined[0] && joined[1]); ++round) {
      if (!zero) zero = second->step(now());
      for (std::size_t i = 0; i < 2; ++i) {
        if (joined[i]) continue;
        try {
          joined[i] = others[i]->step(now());
        } catch (const PeerLostError& error) {
          EXPECT_EQ(error.rank(), 0);
          others[i] = begin(static_cast<int>(i) + 1, 3);
        }
      }
    }
    EXPECT_TRUE(zero && joined[0] && joined[1]) << "killed at access " << access;
    for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(text_of(others[i]->parts()[2]), "2");
  }
  EXPECT_TRUE(ended_before_the_end) << "rank 0 was killed at each of its accesses";
}

// A rank is killed at each of its accesses while it joins. Its successor takes its place, or is
// refused because rank 0 has accepted the first; nothing else happens.
TEST_F(RendezvousTest, AnotherRankIsKilledAtAnyAccess) {
  for (std::size_t access = 1; access < 12; ++access) {
    memory_->values.clear();
    memory_->numbers.clear();
    const auto zero = begin(0, 2);
    {
      const auto first = begin(1, 2, access);
      for (int round = 0; round < 3; ++round) step_until_killed(*first);
    }
    const auto second = begin(1, 2);
    bool joined = false;
    const std::string outcome = outcome_of([&] {
      for (int round = 0; round < 20 && !joined; ++round) {
        // Once it has begun with the first process, it answers the second in its next exchange.
        if (zero->step(now()) && round == 0) zero->contribute("segment", {}, soon());
        joined = second->step(now());
      }
    });
    EXPECT_TRUE(joined || outcome.find("twice") != std::string::npos) << access << outcome;
  }
}

// Rank 0 waits for some of the counted arrivals at a time, so all get their turn.
TEST_F(RendezvousTest, ArrivalsThatAreCountedAndNeverStoredHoldNoOther) {
  for (const int never_stored : {3, 100}) {
    const auto zero = begin(0, 2);
    memory_->numbers["hvd/train/" + current_run() + "/arrivals"] = never_stored;
    const auto one = begin(1, 2);
    one->step(now());  // it has arrived before rank 0 looks
    EXPECT_TRUE(all_join({zero.get(), one.get()})) << never_stored;
  }
}

TEST_F(RendezvousTest, ForgedArrivalsAreRefusedAlone) {
  const auto zero = begin(0, 2);
  const auto forged = [&](Arrival content, const std::string& token = "secret") {
    return store_arrival(encode(std::move(content), current_run(), token));
  };
  const auto outside = forged(arrival(7, 2));
  const auto negative = forged(arrival(-3, 2));
  const auto huge = forged(arrival(2'000'000'000, 2));
  const auto as_zero = forged(arrival(0, 2));
  const auto guess = forged(arrival(1, 2), "guess");
  const auto no_token = forged(arrival(1, 2), "");
  const auto junk = store_arrival(copy_of("hello"));
  const auto empty = store_arrival({});
  const auto one = begin(1, 2);
  EXPECT_TRUE(all_join({zero.get(), one.get()}));
  for (const auto number : {outside, negative, huge})
    EXPECT_THAT(answer_to(number), HasSubstr("expected a rank from 0 to 1")) << number;
  EXPECT_THAT(answer_to(as_zero), HasSubstr("rank 0 has joined at memory:// twice"));
  for (const auto number : {guess, no_token})
    EXPECT_THAT(answer_to(number), HasSubstr("another token")) << number;
  for (const auto number : {junk, empty})
    EXPECT_THAT(answer_to(number), HasSubstr("another version of hvd")) << number;
}

TEST_F(RendezvousTest, AReplayedArrivalIsRefused) {
  const auto first = begin(0, 2);
  const auto one = begin(1, 2);
  one->step(now());
  const Bytes recorded = memory_->values.at("hvd/train/" + current_run() + "/arrival.1");
  const auto again = store_arrival(recorded);
  EXPECT_TRUE(all_join({first.get(), one.get()}));
  first->step(now());
  EXPECT_THAT(answer_to(again), ::testing::AnyOf("none", HasSubstr("twice")));
  // The next run draws another id, so the proof is not valid there.
  const auto second = begin(0, 2);
  const auto replayed = store_arrival(recorded);
  const auto next = begin(1, 2);
  EXPECT_TRUE(all_join({second.get(), next.get()}));
  EXPECT_THAT(answer_to(replayed), HasSubstr("another token"));
}

TEST_F(RendezvousTest, ARankIgnoresARank0WithoutTheToken) {
  auto forger = info(0, 2);
  forger.token = "guess";
  const auto stranger = begin(forger);
  const auto one = begin(info(1, 2), 0, in(200ms));
  one->step(now());
  // The stranger answers "accepted" without a valid proof.
  memory_->values["hvd/train/" + current_run() + "/accepted.1"] = copy_of(std::string(64, '0'));
  EXPECT_THAT(outcome_of([&] {
                while (!one->step(in(10ms))) {
                }
              }),
              AllOf(StartsWith("lost 0: "), HasSubstr("does not know the job's token")));
}

TEST_F(RendezvousTest, ARankIgnoresPartsThatRank0HasNotProven) {
  const auto zero = begin(0, 2);
  const auto one = begin(1, 2);
  one->step(now());
  zero->step(now());
  zero->step(now());
  one->step(now());
  auto& parts = memory_->values.at("hvd/train/" + current_run() + "/all.1");
  parts.back() ^= std::byte{1};
  EXPECT_THAT(outcome_of_steps(*one), AllOf(StartsWith("error: "), HasSubstr("was changed")));
}

TEST_F(RendezvousTest, TheTokenIsNowhereInTheStore) {
  const auto zero = begin(0, 2);
  const auto one = begin(1, 2);
  EXPECT_TRUE(all_join({zero.get(), one.get()}));
  for (const auto& [key, value] : memory_->values)
    EXPECT_THAT(key + text_of(value), ::testing::Not(HasSubstr("secret"))) << key;
}

TEST_F(RendezvousTest, ANoticeOfADeadProcessIsIgnored) {
  ProcessInfo dead = this_process();
  dead.start_time += 1;  // the pid belongs to another process now
  memory_->values["hvd/train/run"] =
      encode(RunNotice{.run = std::string(32, 'a'), .process = dead});
  const auto one = begin(1, 2);
  one->step(now());
  EXPECT_EQ(memory_->values.size(), 1U) << "it has not arrived there";
  const auto zero = begin(0, 2);
  EXPECT_TRUE(all_join({zero.get(), one.get()}));
}

TEST_F(RendezvousTest, AnotherVersionsNoticeIsNamed) {
  memory_->values["hvd/train/run"] = copy_of("something else");
  EXPECT_THAT(outcome_of([&] {
                const auto one = begin(info(1, 2), 0, in(100ms));
                while (!one->step(in(10ms))) {
                }
              }),
              AllOf(StartsWith("lost 0: "), HasSubstr("another version of hvd")));
}

TEST_F(RendezvousTest, AnExchangeDoesNotWaitForAnOldPart) {
  const auto zero = begin(0, 2);
  const auto one = begin(1, 2);
  EXPECT_TRUE(all_join({zero.get(), one.get()}));
  for (const std::string what : {"segment", "mapped"}) {
    const auto turn = what == "mapped" ? Turn::kLast : Turn::kInner;
    zero->contribute(what, bytes_of("0" + what), soon(), turn);
    one->contribute(what, bytes_of("1" + what), soon(), turn);
    EXPECT_TRUE(all_join({zero.get(), one.get()}));
    EXPECT_EQ(text_of(one->parts()[0]), "0" + what);
    EXPECT_EQ(text_of(zero->parts()[1]), "1" + what);
  }
  one->leave(soon());
  zero->leave(soon());
  EXPECT_TRUE(memory_->values.empty());
}

// A rank ends after its last part, and a server reports that before rank 0 has read the part. The
// ranks that wait for the parts of all fail, so rank 0 must not begin the job.
TEST_F(RendezvousTest, Rank0DoesNotBeginAJobThatHasFailed) {
  for (const Turn turn : {Turn::kInner, Turn::kLast}) {
    const auto zero = begin(0, 2);
    const auto one = begin(1, 2);
    EXPECT_TRUE(all_join({zero.get(), one.get()}));
    zero->contribute("mapped", bytes_of("0"), soon(), turn);
    one->contribute("mapped", bytes_of("1"), soon(), turn);
    memory_->values["hvd/train/" + current_run() + "/outcome"] =
        encode(Refusal::lost(1, "rank 1 has ended"));
    EXPECT_EQ(outcome_of_steps(*zero), "lost 1: rank 1 has ended");
    EXPECT_EQ(outcome_of_steps(*one), "lost 1: rank 1 has ended");
  }
}

/// Stores a failure immediately before rank 0 creates the outcome of the run.
class LateFailureStore final : public MemoryStore {
 public:
  explicit LateFailureStore(std::shared_ptr<StoreMemory> memory)
      : MemoryStore(memory), memory_(std::move(memory)) {}
  bool create(const std::string& key, std::span<const std::byte> value,
              Deadline deadline) override {
    memory_->values.try_emplace(key, encode(Refusal::lost(1, "rank 1 has ended")));
    return MemoryStore::create(key, value, deadline);
  }

 private:
  const std::shared_ptr<StoreMemory> memory_;
};

// Another rank may already have read the failure.
TEST_F(RendezvousTest, AFailureBeforeTheOutcomeEndsRank0Too) {
  const auto zero = Rendezvous::begin(std::make_unique<LateFailureStore>(memory_), info(0, 2),
                                      bytes_of("0"), soon());
  const auto one = begin(1, 2);
  EXPECT_TRUE(all_join({zero.get(), one.get()}));
  zero->contribute("mapped", bytes_of("0"), soon(), Turn::kLast);
  one->contribute("mapped", bytes_of("1"), soon(), Turn::kLast);
  EXPECT_EQ(outcome_of_steps(*zero), "lost 1: rank 1 has ended");
  EXPECT_EQ(outcome_of_steps(*one), "lost 1: rank 1 has ended");
}

TEST_F(RendezvousTest, AFailureAfterTheOutcomeChangesNothing) {
  const auto zero = begin(0, 3);
  const auto one = begin(1, 3);
  const auto two = begin(2, 3);
  EXPECT_TRUE(all_join({zero.get(), one.get(), two.get()}));
  zero->contribute("mapped", bytes_of("0"), soon(), Turn::kLast);
  one->contribute("mapped", bytes_of("1"), soon(), Turn::kLast);
  two->contribute("mapped", bytes_of("2"), soon(), Turn::kLast);
  EXPECT_EQ(outcome_of_steps(*zero), "fine");
  two->fail(Refusal::lost(2, "rank 2 has ended"));
  EXPECT_EQ(outcome_of_steps(*one), "fine");
  EXPECT_EQ(text_of(one->parts()[2]), "2");
}

/// A store that detects the end of processes, as a server does.
class ServedStore final : public MemoryStore {
 public:
  using MemoryStore::MemoryStore;
  bool notices_loss() const noexcept override { return true; }
};

#if defined(__OPTIMIZE__) && !defined(HVD_SANITIZED)
constexpr bool kOptimised = true;
#else
constexpr bool kOptimised = false;
#endif
#if defined(HVD_SANITIZED)
constexpr int kRanks = 1'000;  // every rank reads the parts of all ranks
#else
constexpr int kRanks = 10'000;
#endif

// Many ranks begin, exchange and leave on one core. Rank 0 makes O(N) requests.
TEST(RendezvousAtScale, ManyRanksBegin) {
  const auto memory = std::make_shared<StoreMemory>();
  std::vector<std::unique_ptr<Rendezvous>> ranks;
  MemoryStore* of_rank_0 = nullptr;
  const std::clock_t begin = std::clock();
  const Deadline deadline = in(10min);
  for (int rank = 0; rank < kRanks; ++rank) {
    auto store = std::make_unique<ServedStore>(memory);
    if (rank == 0) of_rank_0 = store.get();
    const RankInfo own{.job = "big", .build = "0.1.0", .rank = rank, .size = kRanks};
    ranks.push_back(
        Rendezvous::begin(std::move(store), own, bytes_of("r" + std::to_string(rank)), deadline));
  }
  const auto complete = [&](const char* what) {
    std::vector<bool> done(kRanks);
    int left = kRanks;
    for (int round = 0; left > 0; ++round) {
      ASSERT_LT(round, 10) << what;
      for (int rank = kRanks - 1; rank > 0; --rank) {
        const auto at = static_cast<std::size_t>(rank);
        if (done[at] || !ranks[at]->step(now())) continue;
        done[at] = true;
        --left;
        ASSERT_EQ(ranks[at]->parts().size(), static_cast<std::size_t>(kRanks));
        EXPECT_EQ(text_of(ranks[at]->parts()[at]), what + std::to_string(rank));
      }
      while (!done[0] && of_rank_0->calls < 100 * kRanks) {
        const std::size_t before = of_rank_0->calls;
        done[0] = ranks[0]->step(now());
        if (done[0]) --left;
        if (of_rank_0->calls - before > 20) break;  // it waits for the others
      }
    }
  };
  complete("r");
  for (const std::string what : {"s", "t"}) {
    for (int rank = 0; rank < kRanks; ++rank)
      ranks[static_cast<std::size_t>(rank)]->contribute(what, bytes_of(what + std::to_string(rank)),
                                                        deadline);
    complete(what.c_str());
  }
  for (int rank = kRanks - 1; rank >= 0; --rank)
    ranks[static_cast<std::size_t>(rank)]->leave(deadline);
  EXPECT_TRUE(memory->values.empty());
  EXPECT_LT(of_rank_0->calls, 20U * kRanks);
  // Processor time, which other processes do not prolong.
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  RecordProperty("processor_seconds", std::to_string(seconds));
  std::printf("%d ranks: %.1f s of one core, %zu requests of rank 0\n", kRanks, seconds,
              of_rank_0->calls);
  EXPECT_LT(seconds, kOptimised ? 10 : 60);
}

}  // namespace
}  // namespace hvd::rendezvous
