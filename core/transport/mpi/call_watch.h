#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"

namespace hvd::mpi {

inline constexpr int kNoPeer = -1;

/// Text of an MPI return code, for example "MPI_ERR_TRUNCATE: message truncated".
std::string error_text(int code);

/// Throws hvd::Error unless `code` is MPI_SUCCESS. The text names the call, the peer and the cause.
/// All communicators of hvd return errors; MPI's default handler would end the process instead.
void check(int code, std::string_view call, int peer = kNoPeer);

/// The MPI call that this process is in. hvd makes one call at a time (docs/threading.md). The
/// watch reads this from its own thread.
struct CallState {
  std::atomic<std::uint64_t> moves{0};  ///< calls entered plus calls left: odd while inside one
  std::atomic<const char*> call{nullptr};
  std::atomic<int> peer{kNoPeer};
};
inline CallState call_state;

/// Marks the scope of an MPI call, or of a few non-blocking calls. Costs three stores on entry and
/// one on exit, and no system call. Not for MPI_Finalize, which waits for other ranks without a
/// limit.
class WatchedCall {
 public:
  /// @param call a string literal
  explicit WatchedCall(const char* call, int peer = kNoPeer) noexcept
      : moves_(call_state.moves.load(std::memory_order_relaxed)) {
    if (!outermost()) return;
    call_state.call.store(call, std::memory_order_relaxed);
    call_state.peer.store(peer, std::memory_order_relaxed);
    call_state.moves.store(moves_ + 1, std::memory_order_release);
  }
  WatchedCall(const WatchedCall&) = delete;
  WatchedCall& operator=(const WatchedCall&) = delete;
  ~WatchedCall() {
    if (outermost()) call_state.moves.store(moves_ + 2, std::memory_order_release);
  }

 private:
  bool outermost() const noexcept { return moves_ % 2 == 0; }
  const std::uint64_t moves_;
};

/// Measures by regular samples for how long the same call has lasted. Pure; not thread-safe.
///
/// A late sample counts as if it had been nearly on time: this process was then stopped or had no
/// core, so its call did not progress either.
class CallTimer {
 public:
  CallTimer(Duration interval, TimePoint now, std::uint64_t moves)
      : interval_(interval), last_sample_(now), moves_(moves) {}
  void sample(TimePoint now, std::uint64_t moves) noexcept;
  /// Duration of the current call as sampled; zero outside of a call.
  Duration in_call() const noexcept { return in_call_; }
  /// Time since the first sample.
  Duration total() const noexcept { return total_; }
  Duration interval() const noexcept { return interval_; }

 private:
  Duration interval_;
  TimePoint last_sample_;
  std::uint64_t moves_;
  Duration in_call_{};
  Duration total_{};
};

/// A thread that samples whether MPI calls return. After the loss of a connection some never do,
/// and only another thread can then report the cause and end the process.
///
/// Thread-safe. The handler runs on the watch's thread, at most once.
class CallWatch {
 public:
  struct Hang {
    std::string call;
    int peer = kNoPeer;
    Duration lasted = {};
  };
  using OnHang = std::function<void(const Hang&)>;
  using LossIsKnown = std::function<bool()>;

  /// Watches the start of a job, which may take `limit` as a whole. After that, a call that does
  /// not return is a hang.
  CallWatch(Duration limit, OnHang);
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;
  /// Ends the start phase: from now on each call may take `limit`. Once a loss is known, a call may
  /// take no more than the sampling interval (an eighth of `limit`), because the call is then the
  /// likely reason why this process has not ended. `loss_is_known` runs on the watch's thread.
  void watch_calls(Duration limit, OnHang, LossIsKnown loss_is_known = {});
  ~CallWatch();

 private:
  struct WatchSettings {
    Duration limit;
    bool starting;
    OnHang on_hang;
    LossIsKnown loss_is_known;
  };
  void run(const std::stop_token&);
  std::optional<Hang> watch(const std::stop_token&, std::optional<WatchSettings>& settings);

  Mutex mutex_;
  Condition changed_;
  std::optional<WatchSettings> next_ HVD_GUARDED_BY(mutex_);
  std::jthread thread_;  // last: it uses the members above
};

}  // namespace hvd::mpi
