#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/shm/shm_backend.h"
#include "conformance/thread_ranks.h"
#include "support/seeds.h"

// The ranks are threads, each with its own mapping of the segment. The backend does not depend on
// whether its peers are threads or processes.

namespace hvd::conformance {
namespace {

enum class Where { kHeap, kArena, kMixed };

struct Setting {
  const char* name = "";
  int ranks = 2;
  shm::ShmTuning tuning = {};
  Where tensors = Where::kHeap;
};
// With small buffers every tensor takes many rounds, and the last rounds are ragged.
constexpr shm::ShmTuning kSmallBuffers{.buffer_bytes = 1024, .small_bytes = 128};
// A call moves fewer bytes than a phase of a round.
constexpr shm::ShmTuning kSmallCalls{.buffer_bytes = 4096, .small_bytes = 128, .call_bytes = 512};
constexpr shm::ShmTuning kStreams{.buffer_bytes = 4096, .small_bytes = 128, .always_streams = true};
constexpr Setting kSettings[] = {{"Default", 2},
                                 {"Default", 4},
                                 {"SmallBuffers", 3, kSmallBuffers},
                                 {"InArena", 3, {.small_bytes = 0}, Where::kArena},
                                 {"Mixed", 3, kSmallBuffers, Where::kMixed},
                                 {"Mixed", 2, {}, Where::kMixed},
                                 {"SmallCalls", 3, kSmallCalls, Where::kMixed},
                                 {"Streams", 3, kStreams, Where::kMixed},
                                 {"StreamsInArena", 2, kStreams, Where::kArena}};

/// Takes every `every`-th allocation from an arena, and the others from the heap.
class ArenaMemory final : public std::pmr::memory_resource {
 public:
  ArenaMemory(std::shared_ptr<SharedArena> arena, int every)
      : arena_(std::move(arena)), every_(every) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (allocations_++ % every_ != 0)
      return std::pmr::new_delete_resource()->allocate(bytes, alignment);
    std::byte* const memory = arena_->allocate(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    if (!arena_->offset_of(memory, bytes))
      return std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    arena_->deallocate(static_cast<std::byte*>(memory), false);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  const std::shared_ptr<SharedArena> arena_;
  const int every_;
  int allocations_ = 0;
};

MakeParts shm_ranks(const Setting& setting) {
  static std::atomic<int> jobs{0};
  const std::string name = "/hvd-test-" + std::to_string(::getpid()) + "-" + std::to_string(++jobs);
  const auto ranks = std::make_shared<std::atomic<int>>(0);
  return [name, setting, ranks](int) -> RankParts {
    if (setting.tensors == Where::kHeap)
      return {std::make_unique<ShmBackend>(name, nullptr, setting.tuning)};
    std::shared_ptr<SharedArena> arena = SharedArena::create(std::size_t{1} << 30);
    const int every = setting.tensors == Where::kArena ? 1 : 1 + ranks->fetch_add(1) % 3;
    auto memory = std::make_unique<ArenaMemory>(arena, every);
    return {std::make_unique<ShmBackend>(name, arena, setting.tuning), std::move(memory)};
  };
}

class ShmConformance : public ::testing::TestWithParam<std::tuple<Setting, OpKind>> {};

TEST_P(ShmConformance, RanksAsThreads) {
  const auto& [setting, kind] = GetParam();
  run_threads(setting.ranks, shm_ranks(setting), [kind = kind](Harness& harness) {
    run_cases(harness, cases_of(kind, harness.size()));
  });
}

INSTANTIATE_TEST_SUITE_P(Every, ShmConformance,
                         ::testing::Combine(::testing::ValuesIn(kSettings),
                                            ::testing::ValuesIn(kKinds)),
                         [](const auto& test) {
                           const Setting& setting = std::get<0>(test.param);
                           return std::string(setting.name) + std::to_string(setting.ranks) + "_" +
                                  std::string(to_string(std::get<1>(test.param)));
                         });

class ShmConformanceMixed : public ::testing::TestWithParam<Setting> {};

TEST_P(ShmConformanceMixed, BackToBack) {
  run_threads(GetParam().ranks, shm_ranks(GetParam()),
              [](Harness& harness) { run_back_to_back(harness, mixed_cases(harness.size())); });
}

/// One thread steps all ranks in random order. Each rank runs its cases at its own pace. A rank
/// that cannot go on sleeps until its doorbell is rung.
/// @param alternates whether every other case has its tensors on the heap
class SteppedRanks {
 public:
  SteppedRanks(const Setting& setting, const std::vector<Case>& cases, std::uint64_t seed,
               bool alternates = false)
      : cases_(cases),
        alternates_(alternates),
        random_(seed),
        doorbells_(static_cast<std::size_t>(setting.ranks)) {
    const MakeParts make_parts = shm_ranks(setting);
    for (int number = 0; number < setting.ranks; ++number) {
      Rank& rank = ranks_.emplace_back(number, doorbells_, make_parts(number));
      rank.channel = rank.parts.backend->open(
          {.ranks = all_ranks(setting.ranks), .set_rank = number}, rank.peers);
    }
  }

  /// Returns false if all ranks sleep although not all of them are done.
  bool run() {
    for (;;) {
      std::vector<std::size_t> awake;
      for (std::size_t number = 0; number < ranks_.size(); ++number) {
        const bool rung = doorbells_[number].ticket() != ranks_[number].asleep_since;
        if (rung && !done(ranks_[number])) awake.push_back(number);
      }
      if (awake.empty()) break;
      step(awake[random_() % awake.size()]);
    }
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return done(rank); });
  }

 private:
  struct Rank {
    Rank(int number, Doorbells& doorbells, RankParts made)
        : parts(std::move(made)), peers(peers_of(number, doorbells)) {}
    RankParts parts;  // first, because the others use its memory
    testing::FakePeers peers;
    std::unique_ptr<Channel> channel = {};
    std::optional<Run> run = {};
    std::unique_ptr<Work> work = {};
    std::size_t ended = 0;
    std::optional<std::uint32_t> asleep_since = {};
  };

  bool done(const Rank& rank) const { return rank.ended == cases_.size(); }

  void step(std::size_t number) {
    Rank& rank = ranks_[number];
    rank.asleep_since.reset();
    const std::uint32_t ticket = doorbells_[number].ticket();
    if (!rank.work) {
      const bool on_heap = !rank.parts.memory || (alternates_ && rank.ended % 2 == 0);
      std::pmr::memory_resource& memory =
          on_heap ? *std::pmr::get_default_resource() : *rank.parts.memory;
      rank.run.emplace(cases_[rank.ended], rank.peers.rank(), rank.peers.size(), rank.ended + 1,
                       memory);
      rank.work = rank.run->launch(*rank.channel);
    }
    if (rank.work->progress()) {
      rank.run->check();
      rank.work.reset();
      rank.run.reset();  // the next Run reuses its memory
      ++rank.ended;
    } else if (!rank.work->moved()) {
      rank.asleep_since = ticket;
    }
  }

  const std::vector<Case> cases_;
  const bool alternates_;
  std::mt19937_64 random_;
  Doorbells doorbells_;
  std::deque<Rank> ranks_;
};

TEST_P(ShmConformanceMixed, SteppedInRandomOrder) {
  const std::vector<Case> cases = mixed_cases(GetParam().ranks);
  const std::uint64_t seeds = testing::seeds(3, 200);
  for (std::uint64_t seed = 0; seed < seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SteppedRanks ranks(GetParam(), cases, seed);
    ASSERT_TRUE(ranks.run()) << "all ranks sleep";
  }
}

// A member that has finished a collective publishes the offsets of its next tensors while others
// still read the previous offsets.
TEST_P(ShmConformanceMixed, OffsetsThatChange) {
  std::vector<Case> cases;
  for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllgather}) {
    for (const Case& one : cases_of(kind, GetParam().ranks)) cases.insert(cases.end(), 2, one);
  }
  for (std::uint64_t seed = 0; seed < testing::seeds(2, 50) && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SteppedRanks ranks(GetParam(), cases, seed, /*alternates=*/true);
    ASSERT_TRUE(ranks.run()) << "all ranks sleep";
  }
}

INSTANTIATE_TEST_SUITE_P(Every, ShmConformanceMixed, ::testing::ValuesIn(kSettings),
                         [](const auto& test) {
                           return std::string(test.param.name) + std::to_string(test.param.ranks);
                         });

}  // namespace
}  // namespace hvd::conformance
