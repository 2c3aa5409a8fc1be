// Collectives whose inputs are filled before the members agree to run them. One thread steps all
// members.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
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
  static constexpr std::int64_t kMost = 1024;  // elements of a tensor
  /// One round, in which every member reduces everything.
  static constexpr std::int64_t kSmall = 16;
  /// One round, in which each member reduces a slice.
  static constexpr std::int64_t kOneRound = 64;
  static constexpr std::int64_t kManyRounds = 1000;

  /// One collective that all members repeat.
  struct Repeated {
    std::int64_t count = 0;
    std::array<std::unique_ptr<Work>, kMembers> works = {};
  };

  FillAheadTest() {
    static int names = 0;
    const std::string name =
        "/hvd-test-" + std::to_string(::getpid()) + "-ahead-" + std::to_string(++names);
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      backends_[rank] = std::make_unique<ShmBackend>(
          name, nullptr, ShmTuning{.buffer_bytes = 512, .small_bytes = 128});
      channels_[rank] = backends_[rank]->open(
          {.ranks = {0, 1, 2}, .set_rank = static_cast<int>(rank)}, peers_[rank]);
    }
  }

  static std::span<const std::byte> input(std::vector<std::int64_t>& tensor, std::int64_t count) {
    return std::as_bytes(std::span(tensor).first(static_cast<std::size_t>(count)));
  }
  std::span<std::byte> output(std::size_t rank, std::int64_t count) {
    return std::as_writable_bytes(std::span(out_[rank]).first(static_cast<std::size_t>(count)));
  }

  /// Draws new inputs, so that a stale buffer gives a wrong sum.
  void draw() {
    for (std::size_t rank = 0; rank < kMembers; ++rank)
      for (std::int64_t& element : in_[rank]) element = static_cast<std::int64_t>(random_() % 1000);
  }

  void check(std::int64_t count) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const std::int64_t expected = in_[0][i] + in_[1][i] + in_[2][i];
      for (std::size_t rank = 0; rank < kMembers; ++rank)
        ASSERT_EQ(out_[rank][i], expected) << "element " << i << " of rank " << rank;
    }
  }

  void run(Repeated& repeated) {
    draw();
    const std::int64_t count = repeated.count;
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      std::unique_ptr<Work>& work = repeated.works[rank];
      if (work) {
        ASSERT_TRUE(work->again(input(in_[rank], count), output(rank, count)));
      } else {
        work = channels_[rank]->launch({.dtype = DataType::kInt64, .count = count},
                                       input(in_[rank], count), output(rank, count));
      }
    }
    std::array<bool, kMembers> done = {};
    for (int calls = 0; !std::ranges::all_of(done, std::identity()) && calls < 10000; ++calls) {
      const std::size_t rank = random_() % kMembers;
      done[rank] = done[rank] || repeated.works[rank]->progress();
    }
    check(count);
  }

  bool fills_ahead(const Repeated& repeated) {
    const bool first = repeated.works[0]->fills_ahead();
    for (const auto& work : repeated.works) EXPECT_EQ(work->fills_ahead(), first);
    return first;
  }

  void fill(Repeated& repeated, std::size_t rank) {
    repeated.works[rank]->fill_ahead(input(in_[rank], repeated.count),
                                     output(rank, repeated.count));
  }

  /// Runs it as the ranks of a replay do. @param members that fill before one leaves the replay
  /// instead; kMembers: all ranks stay
  void run_filled(Repeated& repeated, std::size_t members = kMembers) {
    draw();
    for (std::size_t rank = 0; rank < members; ++rank) fill(repeated, rank);
    if (members < kMembers) return;
    for (std::size_t rank = 0; rank < kMembers; ++rank) repeated.works[rank]->run_filled();
    check(repeated.count);
  }

  std::mt19937 random_{4};
  std::array<testing::FakePeers, kMembers> peers_;
  std::array<std::unique_ptr<ShmBackend>, kMembers> backends_;
  std::array<std::unique_ptr<Channel>, kMembers> channels_;
  std::array<std::vector<std::int64_t>, kMembers> in_ = filled_with_zeros();
  std::array<std::vector<std::int64_t>, kMembers> out_ = filled_with_zeros();

 private:
  static std::array<std::vector<std::int64_t>, kMembers> filled_with_zeros() {
    std::array<std::vector<std::int64_t>, kMembers> tensors;
    tensors.fill(std::vector<std::int64_t>(kMost));
    return tensors;
  }
};

TEST_F(FillAheadTest, ASmallCollectiveIsFilledAheadOnceItHasRun) {
  Repeated small{.count = kSmall};
  run(small);
  for (int step = 0; step < 5; ++step) {
    ASSERT_TRUE(fills_ahead(small));
    run_filled(small);
  }
}

TEST_F(FillAheadTest, ACollectiveInSlicesIsNot) {
  Repeated sliced{.count = kOneRound};
  run(sliced);
  EXPECT_FALSE(fills_ahead(sliced));
}

TEST_F(FillAheadTest, AfterSeveralRoundsOnlyTheSecondCollectiveIs) {
  Repeated small{.count = kSmall};
  Repeated large{.count = kManyRounds};
  run(small);
  run(large);
  EXPECT_FALSE(fills_ahead(small));
  run(small);
  EXPECT_TRUE(fills_ahead(small));
}

TEST_F(FillAheadTest, AMemberThatIsAheadDoesNotDisturbTheOthers) {
  Repeated small{.count = kSmall};
  run(small);
  run_filled(small);
  draw();
  const auto first_inputs = in_;
  for (std::size_t rank = 0; rank < kMembers; ++rank) fill(small, rank);
  small.works[0]->run_filled();
  for (std::int64_t& element : in_[0]) element = -1;
  fill(small, 0);  // the others have not read its first input yet
  for (std::size_t rank = 1; rank < kMembers; ++rank) small.works[rank]->run_filled();
  for (std::size_t rank = 0; rank < kMembers; ++rank)
    EXPECT_EQ(out_[rank][0], first_inputs[0][0] + first_inputs[1][0] + first_inputs[2][0]);
  for (std::size_t rank = 1; rank < kMembers; ++rank) fill(small, rank);
  for (std::size_t rank = 0; rank < kMembers; ++rank) small.works[rank]->run_filled();
  check(kSmall);
}

TEST_F(FillAheadTest, MixedWithOtherCollectivesAndDroppedFills) {
  std::array<Repeated, 4> programs = {Repeated{kSmall}, Repeated{kSmall / 2}, Repeated{kOneRound},
                                      Repeated{kManyRounds}};
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
