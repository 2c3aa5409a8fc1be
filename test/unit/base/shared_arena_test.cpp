#include "base/shared_arena.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "support/contracts.h"

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
      for (std::size_t b = 0; b < blocks[victim].bytes; ++b)
        ASSERT_EQ(blocks[victim].memory[b], blocks[victim].mark);
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
  // All memory is one block again.
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

TEST(SharedArena, ReturnsNullWhenItIsFull) {
  const auto arena = SharedArena::create(kMiB);
  for (const std::size_t bytes : {2 * kMiB, kMiB + 1, std::numeric_limits<std::size_t>::max()})
    EXPECT_EQ(arena->allocate(bytes), nullptr) << bytes;
  std::byte* const most = arena->allocate(kMiB / 2);
  EXPECT_NE(most, nullptr);
  EXPECT_EQ(arena->allocate(kMiB / 2), nullptr);
  arena->deallocate(most, true);
  EXPECT_NE(arena->allocate(kMiB / 2), nullptr);
}

TEST(SharedArena, FindsTheOffsetsOfItsMemory) {
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

/// The bytes of the pages that the system has allocated for the arena.
std::size_t taken(const SharedArena& arena) {
  struct stat status {};
  EXPECT_EQ(::fstat(arena.address().descriptor, &status), 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

TEST(SharedArena, AllocatesPagesOnRequest) {
  const auto lazy = SharedArena::create(4 * kMiB);
  EXPECT_NE(lazy->allocate(kMiB), nullptr);
  EXPECT_LT(taken(*lazy), kMiB);
  const auto eager = SharedArena::create(4 * kMiB, SharedArena::Pages::kWhenAllocated);
  std::byte* const memory = eager->allocate(kMiB);
  ASSERT_NE(memory, nullptr);
  EXPECT_GE(taken(*eager), kMiB);
  eager->deallocate(memory, true);
  EXPECT_LT(taken(*eager), kMiB);
  EXPECT_EQ(eager->allocate(kMiB), memory);
  EXPECT_GE(taken(*eager), kMiB);
}

TEST(SharedArena, ReturnsThePagesOfFreeBlocksOnly) {
  const auto arena = SharedArena::create(4 * kMiB);
  std::byte* const freed = arena->allocate(kMiB);
  std::byte* const kept = arena->allocate(kMiB);
  std::memset(freed, 1, kMiB);
  std::memset(kept, 2, kMiB);
  arena->deallocate(freed, false);
  EXPECT_GE(taken(*arena), 2 * kMiB) << "free blocks keep their pages";
  arena->return_pages();
  EXPECT_GE(taken(*arena), kMiB);
  EXPECT_LT(taken(*arena), 2 * kMiB);
  EXPECT_EQ(kept[0], std::byte{2});
  EXPECT_EQ(kept[kMiB - 1], std::byte{2});
}

/// Some threads fill blocks, and others check and free them, as in a data loader.
TEST(SharedArena, ThreadsHandBlocksToEachOther) {
  const auto arena = SharedArena::create(256 * kMiB);
  struct Block {
    std::byte* memory;
    std::size_t bytes;
    std::byte mark;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Block> queue;
  int makers = 3;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int maker = 0; maker < 3; ++maker) {
    threads.emplace_back([&, maker] {
      std::mt19937 random(static_cast<unsigned>(maker));
      for (int i = 0; i < 1000; ++i) {
        const std::size_t bytes = 1 + random() % 20000;
        const auto mark = static_cast<std::byte>(random());
        std::byte* const memory = arena->allocate(bytes);
        if (memory == nullptr) {
          ++wrong;
          continue;
        }
        std::memset(memory, static_cast<int>(mark), bytes);
        const std::lock_guard lock(mutex);
        queue.push_back({memory, bytes, mark});
        changed.notify_one();
      }
      const std::lock_guard lock(mutex);
      if (--makers == 0) changed.notify_all();
    });
  }
  for (int user = 0; user < 3; ++user) {
    threads.emplace_back([&, user] {
      for (int i = 0;; ++i) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !queue.empty() || makers == 0; });
        if (queue.empty()) return;
        const Block block = queue.front();
        queue.pop_front();
        lock.unlock();
        for (std::size_t b = 0; b < block.bytes; ++b)
          wrong += block.memory[b] == block.mark ? 0 : 1;
        arena->deallocate(block.memory, (i + user) % 4 == 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(arena->used(), 0U);
}

/// The status of a child process that exits with the result of `run`.
int status_of_child(const std::function<int()>& run) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(run());
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

/// Runs `run` in a child, with the calls that hvd::init()'s fork handlers make. Returns 0 if the
/// result is true.
int in_child(SharedArena& arena, const std::function<bool()>& run) {
  arena.before_fork();
  const int status = status_of_child([&] {
    arena.after_fork_in_child();
    return run() ? 0 : 1;
  });
  arena.after_fork_in_parent();
  return status;
}

TEST(SharedArena, AChildHasACopy) {
  const auto arena = SharedArena::create(8 * kMiB);
  std::byte* const memory = arena->allocate(kMiB);
  std::memset(memory, 7, kMiB);
  const auto use = [&] {
    const bool reads = memory[5] == std::byte{7} && memory[kMiB - 1] == std::byte{7};
    std::memset(memory, 8, kMiB);
    const bool writes = memory[5] == std::byte{8};
    const bool returns_null = arena->inherited() && arena->allocate(64) == nullptr;
    // Its own child inherits the copy.
    const bool child_has_copy = in_child(*arena, [&] { return memory[5] == std::byte{8}; }) == 0;
    arena->deallocate(memory, true);
    return reads && writes && returns_null && child_has_copy;
  };
  EXPECT_EQ(in_child(*arena, use), 0);
  EXPECT_FALSE(arena->inherited());
  for (std::size_t b = 0; b < kMiB; ++b) ASSERT_EQ(memory[b], std::byte{7});
  std::byte* const other = arena->allocate(kMiB);
  EXPECT_NE(other, memory);
  arena->deallocate(memory, false);
  EXPECT_EQ(arena->used(), kMiB);
}

TEST(SharedArena, ForksWhileOtherThreadsAllocate) {
  const auto arena = SharedArena::create(64 * kMiB);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!stop) arena->deallocate(arena->allocate(10000), false);
    });
  }
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(in_child(*arena, [&] { return arena->allocate(64) == nullptr; }), 0);
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->used(), 0U);
}

TEST(SharedArena, KeepsWithinTheLimitsOfTheProcess) {
  const auto with_limit = [](__rlimit_resource_t resource, rlim_t most) {
    return status_of_child([=] {
      const rlimit limit{most, most};
      if (::setrlimit(resource, &limit) != 0) return 2;
      const auto arena = SharedArena::create();
      if (!arena) return 10;
      std::byte* const memory = arena->allocate(kMiB);
      if (memory != nullptr) std::memset(memory, 1, kMiB);
      return memory != nullptr && arena->address().capacity <= most ? 0 : 1;
    });
  };
  EXPECT_EQ(with_limit(RLIMIT_FSIZE, 64 * kMiB), 0);
  EXPECT_EQ(WEXITSTATUS(with_limit(RLIMIT_FSIZE, 1024)), 10) << "there is none";
  // A sanitizer needs much address space itself, and UBSan needs a descriptor to inspect an object.
#if !defined(HVD_SANITIZED)
  EXPECT_EQ(WEXITSTATUS(with_limit(RLIMIT_NOFILE, 3)), 10) << "there is none";
  EXPECT_EQ(with_limit(RLIMIT_AS, rlim_t{4} << 30), 0);
#endif
}

TEST(PeerArena, AnotherProcessSeesAndChangesTheSameMemory) {
  const auto arena = SharedArena::create(4 * kMiB);
  std::byte* const memory = arena->allocate(kMiB);
  memory[5] = std::byte{42};
  const std::uint64_t offset = *arena->offset_of(memory, kMiB);
  const int status = status_of_child([&] {
    const auto peer = PeerArena::map(arena->address());
    const bool sees = peer && peer->at(offset)[5] == std::byte{42};
    if (sees) peer->at(offset)[6] = std::byte{43};
    return sees ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory[6], std::byte{43});
}

TEST(PeerArena, RefusesAnyOtherFile) {
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

TEST(SharedArenaDeathTest, FreesOnlyItsOwnBlocks) {
  const auto arena = SharedArena::create(kMiB);
  std::byte* const memory = arena->allocate(100);
  EXPECT_BROKEN_CONTRACT(arena->deallocate(memory + 1, false), "the memory is from allocate.*");
  arena->deallocate(memory, false);
  EXPECT_BROKEN_CONTRACT(arena->deallocate(memory, false), "the memory is from allocate.*");
}

}  // namespace
}  // namespace hvd
