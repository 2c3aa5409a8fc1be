// Collectives whose inputs are filled before the members agree to run them. One thread steps all
// members.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "backend/shm/shm_backend.h"
#include "support/fakes.h"

namespace hvd::shm {
namespace {

class FillAheadTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kMembers = 3;
  static constexpr std::int64_t kMaxElements = 4096;  // elements of a tensor
  /// One round, in which every member reduces everything.
  static constexpr std::int64_t kSmall = 16;
  /// One round, in which each member reduces a slice, unless it is filled ahead.
  static constexpr std::int64_t kSliced = 24;
  /// One round, and too large to be filled ahead.
  static constexpr std::int64_t kLarge = 64;
  static constexpr std::int64_t kManyRounds = 1000;

  /// One collective that all members repeat.
  struct Repeated {
    std::int64_t count = 0;  ///< elements of each member's part
    OpKind kind = OpKind::kAllreduce;
    std::array<std::int64_t, kMembers> counts = {count, count, count};
    std::array<std::unique_ptr<Work>, kMembers> works = {};
    /// Gather, to rank 1, scatter, from rank 1, and alltoall: the elements of rank i for rank j,
    /// and those of rank j that rank i gets.
    std::array<std::array<std::int64_t, kMembers>, kMembers> sent = {}, received = {};

    bool exchanges() const {
      return kind == OpKind::kGather || kind == OpKind::kScatter || kind == OpKind::kAlltoall;
    }
    std::int64_t all() const {
      return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    }
    std::int64_t in(std::size_t rank) const {
      if (kind == OpKind::kGather) return counts[rank];
      if (kind == OpKind::kScatter) return rank == 1 ? all() : 0;
      return kind == OpKind::kReducescatter || kind == OpKind::kAlltoall ? 3 * count : count;
    }
    std::int64_t out(std::size_t rank) const {
      if (kind == OpKind::kReducescatter || kind == OpKind::kScatter) return counts[rank];
      if (kind == OpKind::kAlltoall) return 3 * count;
      if (kind == OpKind::kGather) return rank == 1 ? all() : 0;
      return kind == OpKind::kAllgather ? 3 * count : count;
    }
    /// The first element of this rank's share of a reducescatter or scatter.
    std::size_t begin(std::size_t rank) const {
      return static_cast<std::size_t>(std::accumulate(
          counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(rank), std::int64_t{0}));
    }
    std::int64_t elements(std::size_t from, std::size_t to) const {
      if (kind == OpKind::kGather) return to == 1 ? counts[from] : 0;
      if (kind == OpKind::kScatter) return from == 1 ? counts[to] : 0;
      return count;
    }
    Collective collective(std::size_t rank) {
      if (exchanges()) {
        for (std::size_t other = 0; other < kMembers; ++other) {
          sent[rank][other] = elements(rank, other);
          received[rank][other] = elements(other, rank);
        }
        return {.kind = OpKind::kAlltoall,
                .dtype = DataType::kInt64,
                .counts = received[rank],
                .send_counts = sent[rank]};
      }
      Collective collective{.kind = kind, .dtype = DataType::kInt64, .count = count, .root = 1};
      if (kind == OpKind::kReducescatter || kind == OpKind::kAllgather) {
        collective.count = 3 * count;
        collective.counts = counts;
      }
      return collective;
    }
  };

  FillAheadTest() {
    static int names = 0;
    const std::string name =
        "/hvd-test-" + std::to_string(::getpid()) + "-ahead-" + std::to_string(++names);
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      arenas_[rank] = SharedArena::create(std::size_t{1} << 20);
      backends_[rank] = std::make_unique<ShmBackend>(
          name, arenas_[rank],
          ShmTuning{.buffer_bytes = 512, .small_bytes = 128, .ahead_bytes = 400});
      channels_[rank] = backends_[rank]->open(
          {.ranks = {0, 1, 2}, .set_rank = static_cast<int>(rank)}, peers_[rank]);
    }
  }

  std::span<const std::byte> input(const Repeated& repeated, std::size_t rank) {
    return std::as_bytes(std::span(in_[rank]).first(static_cast<std::size_t>(repeated.in(rank))));
  }
  std::span<std::byte> output(const Repeated& repeated, std::size_t rank) {
    return std::as_writable_bytes(
        std::span(out_[rank]).first(static_cast<std::size_t>(repeated.out(rank))));
  }

  /// Draws new inputs, so that a stale buffer gives a wrong result.
  void draw() {
    for (std::size_t rank = 0; rank < kMembers; ++rank)
      for (std::int64_t& element : in_[rank]) element = static_cast<std::int64_t>(random_() % 1000);
  }

  std::int64_t sum(std::size_t element) const {
    return in_[0][element] + in_[1][element] + in_[2][element];
  }
  std::int64_t expected(const Repeated& repeated, std::size_t rank, std::size_t element) const {
    const auto count = static_cast<std::size_t>(repeated.count);
    switch (repeated.kind) {
      case OpKind::kBroadcast:
        return in_[1][element];
      case OpKind::kAllgather:
        return in_[element / count][element % count];
      case OpKind::kReducescatter:
        return sum(repeated.begin(rank) + element);
      case OpKind::kScatter:
        return in_[1][repeated.begin(rank) + element];
      case OpKind::kAlltoall:
        return in_[element / count][rank * count + element % count];
      case OpKind::kGather: {
        std::size_t from = kMembers - 1;
        while (element < repeated.begin(from)) --from;
        return in_[from][element - repeated.begin(from)];
      }
      default:
        return sum(element);
    }
  }
  void check(const Repeated& repeated) {
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(repeated.out(rank)); ++i)
        ASSERT_EQ(out_[rank][i], expected(repeated, rank, i))
            << to_string(repeated.kind) << ", element " << i << " of rank " << rank;
    }
  }

  void run(Repeated& repeated) {
    draw();
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      std::unique_ptr<Work>& work = repeated.works[rank];
      if (work) {
        ASSERT_TRUE(work->again(input(repeated, rank), output(repeated, rank)));
      } else {
        work = channels_[rank]->launch(repeated.collective(rank), input(repeated, rank),
                                       output(repeated, rank));
      }
    }
    std::array<bool, kMembers> done = {};
    for (int calls = 0; !std::ranges::all_of(done, std::identity()) && calls < 10000; ++calls) {
      const std::size_t rank = random_() % kMembers;
      done[rank] = done[rank] || repeated.works[rank]->progress();
    }
    check(repeated);
  }

  bool fills_ahead(const Repeated& repeated) {
    const bool first = repeated.works[0]->fills_ahead();
    for (const auto& work : repeated.works) EXPECT_EQ(work->fills_ahead(), first);
    return first;
  }
  void fill(Repeated& repeated, std::size_t rank) {
    repeated.works[rank]->fill_ahead(input(repeated, rank));
  }
  void run_member(Repeated& repeated, std::size_t rank) {
    repeated.works[rank]->run_filled(output(repeated, rank));
  }

  /// Runs it as the ranks of a replay do. @param members that fill before one leaves the replay
  /// instead; kMembers: all ranks stay
  void run_filled(Repeated& repeated, std::size_t members = kMembers) {
    draw();
    for (std::size_t rank = 0; rank < members; ++rank) fill(repeated, rank);
    if (members < kMembers) return;
    for (std::size_t rank = 0; rank < kMembers; ++rank) run_member(repeated, rank);
    check(repeated);
  }

  std::mt19937 random_{4};
  std::array<testing::FakePeers, kMembers> peers_;
  std::array<std::shared_ptr<SharedArena>, kMembers> arenas_;
  std::array<std::unique_ptr<ShmBackend>, kMembers> backends_;
  std::array<std::unique_ptr<Channel>, kMembers> channels_;
  std::array<std::vector<std::int64_t>, kMembers> in_ = zeros();
  std::array<std::vector<std::int64_t>, kMembers> out_ = zeros();

 private:
  static std::array<std::vector<std::int64_t>, kMembers> zeros() {
    std::array<std::vector<std::int64_t>, kMembers> tensors;
    tensors.fill(std::vector<std::int64_t>(kMaxElements));
    return tensors;
  }
};

TEST_F(FillAheadTest, ASmallCollectiveIsFilledAheadOnceItHasRun) {
  for (const OpKind kind :
       {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kAllgather, OpKind::kReducescatter,
        OpKind::kAlltoall, OpKind::kGather, OpKind::kScatter}) {
    Repeated small{.count = kSmall, .kind = kind};
    run(small);
    for (int step = 0; step < 5; ++step) {
      ASSERT_TRUE(fills_ahead(small)) << to_string(kind);
      run_filled(small);
    }
  }
}

TEST_F(FillAheadTest, UpToABound) {
  Repeated sliced{.count = kSliced};
  run(sliced);
  ASSERT_TRUE(fills_ahead(sliced));
  run_filled(sliced);
  Repeated large{.count = kLarge};
  run(large);
  EXPECT_FALSE(fills_ahead(large));
}

TEST_F(FillAheadTest, MembersWithoutATensorOfferNone) {
  Repeated root_only{.count = kSliced, .kind = OpKind::kBroadcast};
  run(root_only);
  ASSERT_TRUE(fills_ahead(root_only)) << "it had one round, as the root's tensor is in no arena";
  run_filled(root_only);
}

TEST_F(FillAheadTest, TheBoundCountsTheLargestShare) {
  Repeated large{.count = 10, .kind = OpKind::kReducescatter, .counts = {2, 28, 0}};
  run(large);
  EXPECT_FALSE(fills_ahead(large)) << "28 elements of two other members have 448 bytes";
  Repeated small{.count = 10, .kind = OpKind::kReducescatter, .counts = {2, 24, 4}};
  run(small);
  ASSERT_TRUE(fills_ahead(small));
  run_filled(small);
}

TEST_F(FillAheadTest, AnExchangeIsIfNoMemberReadsTooMuch) {
  Repeated own_block{.count = 51, .kind = OpKind::kGather, .counts = {0, 51, 0}};
  run(own_block);
  EXPECT_FALSE(fills_ahead(own_block)) << "rank 1, which alone knows it, has 408 bytes";
  Repeated fits{.count = 50, .kind = OpKind::kGather, .counts = {8, 34, 8}};
  run(fits);
  ASSERT_TRUE(fills_ahead(fits));
  run_filled(fits);
  Repeated rounds{.count = 40, .kind = OpKind::kGather, .counts = {40, 1, 2}};
  run(rounds);
  EXPECT_FALSE(fills_ahead(rounds)) << "rank 0 sends 320 bytes in two rounds";
}

TEST_F(FillAheadTest, AfterSeveralRoundsOnlyTheSecondCollectiveIs) {
  Repeated small{.count = kSmall};
  Repeated many{.count = kManyRounds};
  run(small);
  run(many);
  EXPECT_FALSE(fills_ahead(small));
  run(small);
  EXPECT_TRUE(fills_ahead(small));
}

TEST_F(FillAheadTest, TensorsThatAllReachAreNot) {
  std::array<std::unique_ptr<Work>, kMembers> works;
  std::array<std::shared_ptr<std::byte>, kMembers> tensors;
  constexpr std::size_t kTensorBytes = kSliced * 8;
  for (std::size_t rank = 0; rank < kMembers; ++rank) {
    tensors[rank] = allocate_shared(arenas_[rank], kTensorBytes, true);
    works[rank] = channels_[rank]->launch({.dtype = DataType::kInt64, .count = kSliced},
                                          {tensors[rank].get(), kTensorBytes},
                                          {tensors[rank].get(), kTensorBytes});
  }
  std::array<bool, kMembers> done = {};
  for (int calls = 0; !std::ranges::all_of(done, std::identity()) && calls < 10000; ++calls)
    for (std::size_t rank = 0; rank < kMembers; ++rank)
      done[rank] = done[rank] || works[rank]->progress();
  for (const auto& work : works) EXPECT_FALSE(work->fills_ahead()) << "work in place is faster";
}

TEST_F(FillAheadTest, AMemberThatIsAheadDoesNotDisturbTheOthers) {
  Repeated small{.count = kSmall};
  run(small);
  run_filled(small);
  draw();
  const std::int64_t first_sum = sum(0);
  for (std::size_t rank = 0; rank < kMembers; ++rank) fill(small, rank);
  run_member(small, 0);
  for (std::int64_t& element : in_[0]) element = -1;
  fill(small, 0);  // the others have not read its first input yet
  for (std::size_t rank = 1; rank < kMembers; ++rank) run_member(small, rank);
  for (std::size_t rank = 0; rank < kMembers; ++rank) EXPECT_EQ(out_[rank][0], first_sum);
  for (std::size_t rank = 1; rank < kMembers; ++rank) fill(small, rank);
  for (std::size_t rank = 0; rank < kMembers; ++rank) run_member(small, rank);
  check(small);
}

TEST_F(FillAheadTest, MixedWithOtherCollectivesAndDroppedFills) {
  std::array<Repeated, 13> programs = {Repeated{kSmall},
                                       Repeated{kSmall / 2},
                                       Repeated{kSliced},
                                       Repeated{kLarge},
                                       Repeated{kManyRounds},
                                       Repeated{kSmall, OpKind::kBroadcast},
                                       Repeated{kSmall, OpKind::kAllgather},
                                       Repeated{kSmall, OpKind::kReducescatter},
                                       Repeated{kSmall, OpKind::kAlltoall},
                                       Repeated{kSmall, OpKind::kGather, {3, 0, 7}},
                                       Repeated{kSmall, OpKind::kScatter, {3, 0, 7}},
                                       Repeated{kSliced, OpKind::kBroadcast},
                                       Repeated{kManyRounds, OpKind::kAlltoall}};
  for (Repeated& repeated : programs) run(repeated);
  int filled = 0;
  for (int step = 0; step < 3000 && !HasFatalFailure(); ++step) {
    Repeated& repeated = programs[random_() % programs.size()];
    const std::size_t members = random_() % 4 == 0 ? random_() % kMembers : kMembers;
    const bool ahead = fills_ahead(repeated);
    if (ahead) run_filled(repeated, members);
    if (!ahead || members < kMembers) run(repeated);
    filled += ahead && members == kMembers ? 1 : 0;
  }
  EXPECT_GT(filled, 500);
}

}  // namespace
}  // namespace hvd::shm
