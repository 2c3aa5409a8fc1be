#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"
#include "mpi/mpi_error.h"

namespace hvd::mpi {

/// The call of MPI that this process is in. hvd makes one at a time (docs/threading.md); the watch
/// reads it meanwhile.
struct CallState {
  std::atomic<std::uint64_t> moves{0};  ///< calls entered plus calls left: odd while inside one
  std::atomic<const char*> call{nullptr};
  std::atomic<int> peer{kNoPeer};
};
inline CallState call_state;

/// Around a call of MPI, or a few that belong together and none of which waits: three stores to
/// enter and one to leave, no system call. Not for MPI_Finalize, which waits for other ranks for as
/// long as they work.
class WatchedCall {
 public:
  /// @param call a literal
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

/// Measures from regular looks how long the same call has been going on. Pure; not thread-safe.
///
/// A look that comes late counts as if it had come nearly in time: then this process was stopped,
/// or had no core, and so was its call.
class CallTimer {
 public:
  CallTimer(Duration interval, TimePoint now, std::uint64_t moves)
      : interval_(interval), last_look_(now), moves_(moves) {}
  void look(TimePoint now, std::uint64_t moves) noexcept;
  /// How long the call that was seen last has been seen; zero outside of one.
  Duration in_call() const noexcept { return in_call_; }
  /// Since the first look.
  Duration total() const noexcept { return total_; }
  Duration interval() const noexcept { return interval_; }

 private:
  Duration interval_;
  TimePoint last_look_;
  std::uint64_t moves_;
  Duration in_call_{};
  Duration total_{};
};

/// A thread that looks now and then whether a call of MPI still moves: after the loss of a
/// connection some never return, and then nobody else could end this process, or say why.
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

  /// While a job begins: all of it together may take `limit`; after that, a call that does not
  /// return is a hang.
  CallWatch(Duration limit, OnHang);
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;
  /// The job has begun: each call may take `limit`, and no more than the time between two looks (an
  /// eighth of it) once a loss is known, since then the call that does not return is the likely
  /// reason why this process has not ended. `loss_is_known` runs on the watch's thread.
  void watch_calls(Duration limit, OnHang, LossIsKnown loss_is_known = {});
  ~CallWatch();

 private:
  struct Task {
    Duration limit;
    bool starting;
    OnHang on_hang;
    LossIsKnown loss_is_known;
  };
  void run(const std::stop_token&);
  std::optional<Hang> watch(const std::stop_token&, std::optional<Task>& task);

  Mutex mutex_;
  Condition changed_;
  std::optional<Task> next_ HVD_GUARDED_BY(mutex_);
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace hvd::mpi
