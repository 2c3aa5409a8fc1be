#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace hvd::testing {

/// Memory that the campaign shares with its workers.
struct Board {
  static constexpr int kMaxGenerations = 1 << 16;
  static constexpr int kMaxWorkers = 1 << 14;

  std::atomic<std::int64_t> finish;     ///< 1: the workers end after their next step
  std::atomic<std::int64_t> steps;      ///< completed, by any worker
  std::atomic<std::int64_t> undone;     ///< workers that have seen a commit undone
  std::atomic<std::int64_t> wrong;      ///< workers that have found a wrong sum
  std::atomic<std::int64_t> last_step;  ///< nanoseconds of the steady clock
  /// When the first step of a generation was completed; 0: not yet.
  std::atomic<std::int64_t> first_step[kMaxGenerations];
  struct Usage {
    std::atomic<std::int64_t> resident;   ///< bytes
    std::atomic<std::int64_t> allocated;  ///< bytes of the heap in use; 0: unknown
    std::atomic<std::int64_t> descriptors;
    std::atomic<std::int64_t> generation;
  };
  Usage usage[kMaxWorkers];
  std::atomic<std::int64_t> rank[kMaxWorkers];  ///< in the last generation of the worker
  /// The place at which the next worker that gets there kills itself (kill_point.h); 0: none.
  std::atomic<std::int64_t> point;
  std::atomic<std::int64_t> delay;   ///< microseconds until it does
  std::atomic<std::int64_t> victim;  ///< the worker that did; 0: not yet

  /// @param descriptor -1: memory of this process alone
  static Board* map(int descriptor) {
    const int flags = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* const memory =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, flags, descriptor, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<Board*>(memory);
  }
  static std::int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
};

}  // namespace hvd::testing
