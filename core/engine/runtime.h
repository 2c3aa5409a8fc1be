#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "engine/progress_policy.h"

namespace hvd::runtime {

/// One rank: an engine, which thread owns its progress, and the coordinator thread that drives it
/// when no other thread does.
///
/// Thread-safe. A process normally has one (see process.h); tests have many. See docs/threading.md
/// for progress ownership.
class Runtime : public std::enable_shared_from_this<Runtime> {
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

  /// @throws UsageError; the cause of failure when the runtime has failed; ShutdownError after
  /// shutdown(). All or none are accepted.
  /// @param handles as many; what they held is let go of first
  void submit(std::span<const Submission>, std::span<Operation> handles, Progress);
  std::vector<Operation> submit(const std::vector<Submission>&, Progress);
  /// Until the operation is done. The calling thread drives the engine when nobody else does.
  /// @throws UsageError in a callback of an operation, which is run by the thread that drives
  void wait(const OperationState&);
  /// The same, for `timeout` at most. @return whether the operation is done
  bool wait_for(const OperationState&, Duration timeout);
  /// Collective: until every rank has called it, or the runtime has failed, or, with a warning,
  /// `patience` (default: stall_shutdown; 0 = forever) has passed. Idempotent. @return whether
  /// every rank has called it
  bool shutdown(std::optional<Duration> patience = std::nullopt);
  /// Before shutdown(), which the process has not called: it ends without. The others are told so.
  void note_ending() noexcept { engine_.front().note_ending(); }
  /// Fails the runtime with this cause on every rank. Returns once the others have been notified,
  /// as far as that is possible without waiting.
  void abort(const Status& cause);

  /// The same from a process that is about to end, whatever its threads are in: never longer than
  /// `patience`.
  void tell_before_dying(const Status& cause, Duration patience) noexcept;

  const Topology& topology() const noexcept { return engine_.topology(); }
  /// This rank's GPU, or null.
  const std::shared_ptr<device::Context>& device() const noexcept { return device_; }
  const ProgressPolicy& progress_policy() const noexcept { return progress_policy_; }
  bool failed() const noexcept { return engine_.front().failed(); }
  /// A thread waits for an operation, or for the others at shutdown.
  bool has_waiters() const noexcept { return waiters_.load() > 0; }
  Status failure() const { return engine_.front().failure(); }
  Metrics metrics() const { return counters_.snapshot(); }
  /// Prints what this rank is doing to stderr, soon. Async-signal-safe.
  void request_state_dump() noexcept {
    engine_.front().request_state_dump();
    engine_.doorbell().ring();
  }
  void start_timeline(const std::string& path);
  void stop_timeline();

  /// One round of the engine by the calling thread, for runtimes without a coordinator thread. True
  /// when something moved.
  bool step();

 private:
  Runtime(const RuntimeOptions&, std::unique_ptr<control::ControlPlane>,
          std::vector<std::shared_ptr<Backend>>, const Clock&, std::shared_ptr<SharedArena>,
          std::shared_ptr<device::Context>);
  void run(std::stop_token);
  /// Drives as the coordinator thread until there is nothing to do at once, a waiter wants to
  /// own progress, or stop is requested.
  void drive_standby(const std::stop_token&) HVD_RELEASE(engine_.progress());
  /// The time limit of a thread that waits, and its role in the detection of deadlocks.
  struct Patience {
    std::optional<TimePoint> until = {};  ///< when it is over, which nothing else wakes it for
    Engine::Waiting waiting = Engine::Waiting::kWithoutLimit;
  };
  template <class Done>
  void wait_until(const Done& done, const Patience& patience);
  template <class Done>
  void drive_until(const Done& done, const Patience&) HVD_RELEASE(engine_.progress());
  template <class Done>
  bool acquire_progress_as_waiter(const Done& done, std::optional<TimePoint> until)
      HVD_TRY_ACQUIRE(true, engine_.progress());
  bool acquire_progress_as_standby() HVD_TRY_ACQUIRE(true, engine_.progress());
  bool try_acquire_progress() HVD_TRY_ACQUIRE(true, engine_.progress());
  void acquire_progress() HVD_ACQUIRE(engine_.progress());
  void release_progress(int leaving = 0) HVD_RELEASE(engine_.progress());
  bool own_progress() HVD_REQUIRES(progress_mutex_);
  bool in_callback() const noexcept;
  [[noreturn]] void refuse_in_callback(const std::string& call) const;
  void notify_waiters(int driving);
  void move_on();
  void stop_thread();
  void close();

  const RuntimeOptions options_;
  const ProgressPolicy progress_policy_;
  const Clock& clock_;
  observe::Counters counters_;
  TimelineSlot timeline_;
  const std::shared_ptr<device::Context> device_;  // of this rank; null without a GPU

  Mutex progress_mutex_;
  Condition progress_changed_;  // nobody owns progress, or an operation has ended
  bool progress_owned_ HVD_GUARDED_BY(progress_mutex_) = false;
  std::atomic<std::thread::id> progress_owner_{};  // written under progress_mutex_
  std::atomic<int> waiters_{0};  // threads inside wait_until(); written under progress_mutex_
  std::atomic<int> program_waiters_{0};          // of them those that wait without a limit and
                                                 // are no BackgroundThread
  std::atomic<bool> standby_stood_back_{false};  // written under progress_mutex_; the coordinator
                                                 // thread has not looked at anything since
  std::atomic<bool> closing_{
      false};  // shutdown() is about to end what is left: nobody else drives any more
  bool closed_ HVD_GUARDED_BY(progress_mutex_) = false;  // it has

  Engine engine_;
  std::jthread thread_;  // last: it uses everything above
};

}  // namespace hvd::runtime
