#include "base/shared_arena.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

namespace hvd {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(SharedArena, GivesAlignedMemoryThatDoesNotOverlap) {
  const auto arena = SharedArena::create(64 * kMiB);
  ASSERT_NE(arena, nullptr);
  std::mt19937 random(1);
  struct Block {
    std::byte* memory;
    std::size_t bytes;
    std::byte mark;
  };
  std::vector<Block> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (blocks.size() > 20 && random() % 2 == 0) {
      const std::size_t victim = random() % blocks.size();
      for (std::size_t b = 0; b < blocks[victim].bytes; ++b) ASSERT_EQ(blocks[victim].memory[b], blocks[victim].mark);
      arena->deallocate(blocks[victim].memory, i % 3 == 0);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(victim));
      continue;
    }
    const std::size_t bytes = random() % (i % 10 == 0 ? 300000 : 3000);
    std::byte* const memory = arena->allocate(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % (bytes < 4096 ? 64 : 4096), 0U);
    const auto mark = static_cast<std::byte>(i);
    std::memset(memory, i, bytes);
    blocks.push_back({memory, bytes, mark});
  }
  for (const Block& block : blocks) arena->deallocate(block.memory, false);
  EXPECT_EQ(arena->used(), 0U);
  // All is one block again.
  std::byte* const all = arena->allocate(60 * kMiB);
  EXPECT_NE(all, nullptr);
  arena->deallocate(all, false);
}

TEST(SharedArena, RepeatsAddresses) {
  const auto arena = SharedArena::create(16 * kMiB);
  std::set<std::byte*> seen;
  for (int step = 0; step < 5; ++step) {
    std::byte* const a = arena->allocate(kMiB);
    std::byte* const b = arena->allocate(2 * kMiB);
    seen.insert({a, b});
    arena->deallocate(a, false);
    arena->deallocate(b, false);
  }
  EXPECT_EQ(seen.size(), 2U);
}

TEST(SharedArena, SaysWhenItIsFull) {
  const auto arena = SharedArena::create(kMiB);
  EXPECT_EQ(arena->allocate(2 * kMiB), nullptr);
  std::byte* const most = arena->allocate(kMiB / 2);
  EXPECT_NE(most, nullptr);
  EXPECT_EQ(arena->allocate(kMiB / 2), nullptr);
  arena->deallocate(most, true);
  EXPECT_NE(arena->allocate(kMiB / 2), nullptr);
}

TEST(SharedArena, KnowsWhatLiesInIt) {
  const auto arena = SharedArena::create(kMiB);
  std::byte* const memory = arena->allocate(1000);
  const int elsewhere = 0;
  EXPECT_TRUE(arena->offset_of(memory, 1000).has_value());
  EXPECT_FALSE(arena->offset_of(memory, 2 * kMiB).has_value());
  EXPECT_FALSE(arena->offset_of(&elsewhere, sizeof(elsewhere)).has_value());
}

TEST(SharedArena, GivenBackPagesReadAsZeros) {
  const auto arena = SharedArena::create(4 * kMiB);
  std::byte* const memory = arena->allocate(kMiB);
  std::memset(memory, 1, kMiB);
  arena->deallocate(memory, true);
  ASSERT_EQ(arena->allocate(kMiB), memory);
  EXPECT_EQ(memory[kMiB / 2], std::byte{0});
}

TEST(PeerArena, AnotherProcessSeesAndChangesTheSameMemory) {
  const auto arena = SharedArena::create(4 * kMiB);
  std::byte* const memory = arena->allocate(kMiB);
  memory[5] = std::byte{42};
  const std::uint64_t offset = *arena->offset_of(memory, kMiB);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto peer = PeerArena::map(arena->address());
    const bool sees = peer && peer->at(offset)[5] == std::byte{42};
    if (sees) peer->at(offset)[6] = std::byte{43};
    ::_exit(sees ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory[6], std::byte{43});
}

TEST(PeerArena, RefusesWhatIsNotTheArena) {
  const auto arena = SharedArena::create(kMiB);
  ArenaAddress wrong = arena->address();
  ++wrong.identity;
  EXPECT_EQ(PeerArena::map(wrong), nullptr);
  wrong = arena->address();
  wrong.descriptor = 0;
  EXPECT_EQ(PeerArena::map(wrong), nullptr);
  wrong = arena->address();
  wrong.process = 1 << 22;
  EXPECT_EQ(PeerArena::map(wrong), nullptr);
  EXPECT_EQ(PeerArena::map({}), nullptr);
}

}  // namespace
}  // namespace hvd
