#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "engine/progress_policy.h"

namespace hvd::runtime {

/// One rank: an engine, the thread that owns its progress, and the engine thread, which drives it
/// when no other thread does.
///
/// Thread-safe. A process normally has one (see process.h); tests have many. See docs/threading.md
/// for progress ownership.
class Runtime {
 public:
  static std::shared_ptr<Runtime> create(const RuntimeOptions&,
                                         std::unique_ptr<control::ControlPlane>,
                                         std::vector<std::shared_ptr<Backend>>, const Clock&,
                                         std::shared_ptr<SharedArena> = nullptr,
                                         std::shared_ptr<device::Context> = nullptr);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  /// Not collective. Operations still outstanding end with ShutdownError.
  ~Runtime();

  /// Submits the operations. If it throws, no operation was submitted.
  /// @param handles one per submission; handles that they held are released first
  /// @throws UsageError; the cause of failure when the runtime has failed; ShutdownError after
  /// shutdown()
  void submit(std::span<const Submission>, std::span<Operation> handles, Progress);
  std::vector<Operation> submit(const std::vector<Submission>&, Progress);
  /// The same for sends and recvs.
  std::vector<Operation> submit(std::span<const Message>, Progress);
  /// Passes a small message between ranks of one host, if the other rank's thread waits for it now
  /// or within some microseconds, and no other work is under way on this rank. @return the other
  /// rank; empty: the call had no effect, and the caller has to submit() the message
  std::optional<int> pass_quickly(const Message&);
  /// Returns when the operation is done. The calling thread drives the engine when no other thread
  /// does.
  /// @throws UsageError in the callback of an operation, which runs on the thread that drives
  void wait(const OperationState&);
  /// Like wait(), and calls `check` about every `interval`.
  void wait(const OperationState&, Duration interval, void (*check)());
  /// Like wait(), but for at most `timeout`. @return whether the operation is done
  bool wait_for(const OperationState&, Duration timeout);
  /// Requests a text about what the operation waits for. The engine writes it when all ranks that
  /// it has asked have replied, or after `limit`. @pre the handle is not empty
  std::shared_ptr<const WaitDescription> request_description(const Operation&, Duration limit);
  /// Like request_description(), and waits for the text. Empty if the operation is done.
  std::string describe_wait(const Operation&, Duration limit);
  /// Collective. Returns when every rank has called it, or the runtime has failed, or, with a
  /// warning, after `timeout` (default: stall_shutdown; 0: no limit). Idempotent. @return whether
  /// every rank has called it
  bool shutdown(std::optional<Duration> timeout = std::nullopt);
  /// A process that ends without having called shutdown() calls this before shutdown(). The other
  /// ranks are notified.
  void mark_ending() noexcept { engine_.submission_queue().mark_ending(); }
  /// Fails the runtime with this cause on every rank. Returns once the others have been notified,
  /// as far as that is possible without waiting.
  void abort(const Status& cause);

  /// Like abort(), but returns at once.
  void fail_soon(const Status& cause);

  /// Like abort(), for a process that is about to end. Takes at most `timeout`, even if the
  /// process's other threads are blocked.
  void notify_before_exit(const Status& cause, Duration timeout) noexcept;

  const Topology& topology() const noexcept { return engine_.topology(); }
  /// This rank's GPU, or null.
  const std::shared_ptr<device::Context>& device() const noexcept { return device_; }
  const ProgressPolicy& progress_policy() const noexcept { return progress_policy_; }
  /// Whether the calling thread drives the engine, as in a callback of an operation.
  bool in_callback() const noexcept;
  bool failed() const noexcept { return engine_.submission_queue().failed(); }
  /// Whether a thread waits for an operation or in shutdown().
  bool has_waiters() const noexcept { return waiters_in(claims_.load()) > 0; }
  Status failure() const { return engine_.submission_queue().failure(); }
  Metrics metrics() const { return counters_.snapshot(); }
  /// Prints the state of this rank to stderr, soon. Async-signal-safe.
  void request_state_dump() noexcept {
    engine_.submission_queue().request_state_dump();
    engine_.doorbell().ring();
  }
  void start_timeline(const std::string& path);
  void stop_timeline();

  /// One step of the engine on the calling thread, for runtimes without an engine thread. @return
  /// whether there was any progress
  bool step();

 private:
  Runtime(const RuntimeOptions&, std::unique_ptr<control::ControlPlane>,
          std::vector<std::shared_ptr<Backend>>, const Clock&, std::shared_ptr<SharedArena>,
          std::shared_ptr<device::Context>);
  /// A bit for progress ownership, and counts of waiters in 21 bits each.
  using Claims = std::uint64_t;
  static constexpr Claims kOwned = 1;
  static constexpr Claims kWaiter = 1 << 1;
  /// Waiters without a time limit, except threads with a BackgroundThread object and waiters for a
  /// send or recv.
  static constexpr Claims kProgramWaiter = kWaiter << 21;
  static constexpr Claims kMessageWaiter = kProgramWaiter << 21;  ///< for a send or recv
  static constexpr Claims kWaiters = kProgramWaiter - kWaiter;
  static constexpr Claims waiters_in(Claims claims) noexcept { return claims & kWaiters; }

  void run(std::stop_token);
  /// Drives as the engine thread until there is no more work, a thread waits for progress
  /// ownership, or stop is requested.
  void drive_standby(const std::stop_token&) HVD_RELEASE(engine_.progress());
  /// The time limit of a waiting thread, and its role in the detection of deadlocks.
  struct WaitLimit {
    std::optional<TimePoint> until = {};  ///< the waiter wakes by itself at this time
    Engine::Waiting waiting = Engine::Waiting::kWithoutLimit;
  };
  template <class Done>
  void wait_until(const Done& done, const WaitLimit& limit);
  template <class Done>
  void drive_until(const Done& done, const WaitLimit&, Claims) HVD_RELEASE(engine_.progress());
  template <class Done>
  bool acquire_progress_as_waiter(const Done& done, std::optional<TimePoint> until, Claims)
      HVD_TRY_ACQUIRE(true, engine_.progress());
  bool acquire_progress_as_standby() HVD_TRY_ACQUIRE(true, engine_.progress());
  bool try_acquire_progress() HVD_TRY_ACQUIRE(true, engine_.progress());
  void acquire_progress() HVD_ACQUIRE(engine_.progress());
  void release_progress(Claims leaving = 0) HVD_RELEASE(engine_.progress());
  bool own_progress(Claims in_the_way, Claims own) noexcept;
  [[noreturn]] void throw_in_callback(const std::string& call) const;
  void notify_waiters(Claims driving);
  void progress_after_submit();
  Engine::Waiting kind_of_waiting() const noexcept;
  void stop_thread();
  void close();

  std::weak_ptr<Runtime> self_;  // written once, in create()
  const RuntimeOptions options_;
  const ProgressPolicy progress_policy_;
  const Clock& clock_;
  observe::Counters counters_;
  CurrentTimeline timeline_;
  const std::shared_ptr<device::Context> device_;  // of this rank; null without a GPU

  Mutex progress_mutex_;
  Condition progress_changed_;  // progress is free, or an operation has ended
  // Whether progress is owned, and the threads inside wait_until(). A thread sleeps on
  // progress_changed_ only while it is counted here. See Note [Progress without a lock].
  std::atomic<Claims> claims_{0};
  std::atomic<std::thread::id> progress_owner_{};  // written by this thread
  // The engine thread has yielded to another thread and has not driven since.
  std::atomic<bool> standby_yielded_{false};
  // shutdown() is about to end the remaining operations: no other thread drives any more.
  std::atomic<bool> closing_{false};
  bool closed_ HVD_GUARDED_BY(progress_mutex_) = false;  // it has ended them

  Engine engine_;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace hvd::runtime
