#include "backend/segment/cache_distance.h"

#include <algorithm>

namespace hvd::segment {
namespace {

using namespace std::chrono_literals;

// A shorter load has found the line in the cache of this core and measures nothing.
constexpr auto kOwnCache = 20ns;
// A longer load has crossed to another chiplet or socket.
constexpr auto kOneChip = 140ns;
// After a longer load the thread was probably interrupted.
constexpr auto kInterrupted = 2us;
// The majority that changes the estimate.
constexpr int kDecisive = 6;
// A clock that takes longer to read (without the processor's counter) measures only itself.
constexpr auto kSlowClock = 100ns;

}  // namespace

CacheDistance::CacheDistance() noexcept : overhead_(Nanoseconds::max()) {
  for (int reading = 0; reading < 16; ++reading) {
    const auto begin = Clock::now();
    overhead_ = std::min<Nanoseconds>(overhead_, Clock::now() - begin);
  }
}

std::uint64_t CacheDistance::load(const std::atomic<std::uint64_t>& counter) noexcept {
  if (overhead_ > kSlowClock) return counter.load(std::memory_order_seq_cst);
  const auto begin = Clock::now();
  const std::uint64_t value = counter.load(std::memory_order_seq_cst);
  add(Clock::now() - begin - overhead_);
  return value;
}

void CacheDistance::add(Nanoseconds load) noexcept {
  if (load < kOwnCache || load > kInterrupted) return;
  balance_ = std::clamp(balance_ + (load > kOneChip ? 1 : -1), -kDecisive, kDecisive);
  if (balance_ == kDecisive) far_ = true;
  if (balance_ == -kDecisive) far_ = false;
}

}  // namespace hvd::segment
