#include "base/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace hvd {
namespace {

// Note [No ring is lost]
//
// A sleeper S and a ringer R run (every atomic access is sequentially consistent, so they have one
// total order):
//
//   S0  t = rings_                              R1  rings_ += 1
//       look for work                           R2  n = sleepers_ (and drivers_)
//   S1  sleepers_ += 1                          R3  if n > 0: FUTEX_WAKE_BITSET
//   S2  FUTEX_WAIT_BITSET: enqueue if rings_ == t
//   S3  sleepers_ -= 1
//
// Suppose R1 comes after S0. If S2 sees the new value of rings_, S does not sleep. Otherwise S2's
// load precedes R1, hence S1 < S2 < R1 < R2, so R2 counts S (S3 comes only after S has woken), and
// R3 wakes it. The kernel loads the word and enqueues under the lock that the wake takes, and R1
// precedes R3, so the wake cannot fall between the load and the enqueueing. The kernel's load is
// not a C++ seq_cst access, but a full barrier stands before it (in S1, and again in futex_wait),
// which is all that the argument uses.
//
// S counts itself in and out; the ringer clears no state. (A "sleeping" bit that the ringer clears
// would save system calls when rings come in bursts. But a slow R whose R1 preceded S0 could clear
// the bit between S1 and S2 without waking S, and the next ringer would not see that S sleeps.) A
// process killed in its sleep leaves its count behind, and rings then make a needless system call.
//
// Drivers: a ringer that finds drivers_ > 0 leaves the standby sleeper asleep. The last driver does
// the following:
//
//       release progress ownership
//   D1  drivers_ -= 1
//   D2  if rings_ != handled: ring()
//
// If R2 read drivers_ > 0 because it came before D1, then R1 < R2 < D1 < D2: D2 sees that ring.
// Unless the driver has handled it, D2 rings again, now with drivers_ at 0. It must ring and not
// merely wake: a standby thread may have taken its ticket after R1, found that the driver owns
// progress, and be about to sleep. It would miss a wake, but not a changed rings_.
//
// The counter wraps after 2^32 rings. A ring would be lost only if a sleeper were suspended between
// S0 and S2 for exactly that many rings.

constexpr std::uint32_t kStandbyUnit = 1;
constexpr std::uint32_t kDriverUnit = 1u << 16;
constexpr std::uint32_t kStandbyMask = kDriverUnit - 1;

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t),
              "the futex system call takes a 32-bit word");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free,
              "a lock would not work between processes");

// Without FUTEX_PRIVATE_FLAG, because the doorbell may be in memory shared between processes.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* deadline, std::uint32_t bits) noexcept {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, deadline,
                 nullptr, bits);
}

}  // namespace

void Doorbell::ring() noexcept {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t sleepers = sleepers_.load(std::memory_order_seq_cst);
  if (sleepers == 0) {
    return;
  }
  std::uint32_t bits = 0;
  if ((sleepers & ~kStandbyMask) != 0) {
    bits |= static_cast<std::uint32_t>(Sleeper::kDriver);
  }
  if ((sleepers & kStandbyMask) != 0 && drivers_.load(std::memory_order_seq_cst) == 0) {
    bits |= static_cast<std::uint32_t>(Sleeper::kStandby);
  }
  if (bits != 0) {
    futex(rings_, FUTEX_WAKE_BITSET, INT_MAX, nullptr, bits);
  }
}

void Doorbell::sleep(std::uint32_t ticket, Sleeper who, Duration timeout) noexcept {
  if (timeout <= Duration::zero()) {
    return;
  }
  // FUTEX_WAIT_BITSET takes an absolute CLOCK_MONOTONIC time, unlike FUTEX_WAIT.
  timespec deadline{};
  const bool limited =
      timeout < std::chrono::hours(24 * 365);  // beyond that the sum below could overflow
  if (limited) {
    const TimePoint end = SteadyClock().now() + timeout;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(end);
    deadline.tv_sec = static_cast<std::time_t>(seconds.count());
    deadline.tv_nsec = static_cast<long>((end - seconds).count());
  }
  const std::uint32_t unit = who == Sleeper::kDriver ? kDriverUnit : kStandbyUnit;
  sleepers_.fetch_add(unit, std::memory_order_seq_cst);
  // After EAGAIN (already rung), EINTR and ETIMEDOUT the caller looks for work again.
  futex(rings_, FUTEX_WAIT_BITSET, ticket, limited ? &deadline : nullptr,
        static_cast<std::uint32_t>(who));
  sleepers_.fetch_sub(unit, std::memory_order_seq_cst);
}

void Doorbell::add_driver() noexcept { drivers_.fetch_add(1, std::memory_order_seq_cst); }

void Doorbell::remove_driver(std::uint32_t handled) noexcept {
  drivers_.fetch_sub(1, std::memory_order_seq_cst);
  if (rings_.load(std::memory_order_seq_cst) != handled) {
    ring();
  }
}

}  // namespace hvd
