#include "backend/nccl/launcher.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/expect.h"
#include "base/mutex.h"
#include "base/thread.h"
#include "hvd/error.h"

namespace hvd::nccl {
namespace {

/// Limit of the destructor's wait for the thread.
constexpr Duration kThreadTimeout = std::chrono::seconds(1);
/// Limit of an abort's wait for the running call. Many times as long as a launch takes.
constexpr Duration kCallTimeout = std::chrono::milliseconds(100);
/// Limit of a further wait after the call's communicator has been revoked.
constexpr Duration kRevokedCallTimeout = std::chrono::seconds(2);

/// A communicator and its current task. The caller fills in a task and hands it to the thread,
/// which owns these fields until `state` is no longer kBusy.
struct LaunchedComm {
  enum class Task : std::uint8_t { kInit, kCalls, kFinalize };

  Task task = Task::kInit;
  UniqueId id = {};
  int size = 0;
  int rank = 0;
  std::vector<Call> calls = {};  // keeps its capacity
  device::Stream stream = {};
  bool grouped = false;

  std::atomic<CommState> state = CommState::kSettled;
  Health failure = {};  // in kFailed

  // Guarded by the thread's mutex. The caller may read these fields while the state is kSettled.
  Comm comm = {};
  bool ended = false;  // aborted or destroyed, or soon will be: begin no further task
};

/// The thread and its queue. Outlives the Launcher if a call of NCCL does not return.
class Thread {
 public:
  Thread(std::shared_ptr<Library> library, std::shared_ptr<device::Context> device)
      : library_(std::move(library)), device_(std::move(device)) {}

  static void start(const std::shared_ptr<Thread>& self) {
    start_thread("hvd-nccl", [self] { self->serve(); }).detach();
  }

  void submit(const std::shared_ptr<LaunchedComm>& target, LaunchedComm::Task task) {
    target->task = task;
    target->state.store(CommState::kBusy, std::memory_order_relaxed);
    const MutexLock lock(mutex_);
    queue_.push_back(target);
    changed_.notify_all();
  }

  /// Prevents further tasks of this communicator. @return its handle, null if it does not exist yet
  Comm end(LaunchedComm& target) {
    const MutexLock lock(mutex_);
    target.ended = true;
    return target.comm;
  }
  /// Waits until no call is under way on an ended communicator. Call it after end() of all
  /// communicators that will be aborted. See Note [Aborting during a call]. The wait is bounded
  /// unless revoke() blocks.
  void finish_ended_call() {
    if (wait_for_ended_call(kCallTimeout)) return;
    const Comm revoked = [this] {
      const MutexLock lock(mutex_);
      return running_ && running_->ended ? running_->comm : Comm{};
    }();
    if (revoked.handle == nullptr || !library_->revoke(revoked)) return;
    wait_for_ended_call(kRevokedCallTimeout);
  }

  void stop() {
    const TimePoint deadline = SteadyClock().now() + kThreadTimeout;
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    while (!over_ && SteadyClock().now() < deadline) changed_.wait_until(mutex_, deadline);
  }

 private:
  /// @return false: the call is still running
  bool wait_for_ended_call(Duration timeout) {
    const TimePoint deadline = SteadyClock().now() + timeout;
    const MutexLock lock(mutex_);
    while (running_ && running_->ended) {
      if (SteadyClock().now() >= deadline) return false;
      changed_.wait_until(mutex_, deadline);
    }
    return true;
  }

  void serve() {
    while (const auto target = next()) perform(*target);
    // Release both before the notification: after it the owner may destroy the objects that they
    // depend on.
    device_.reset();
    library_.reset();
    const MutexLock lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

  std::shared_ptr<LaunchedComm> next() {
    const MutexLock lock(mutex_);
    running_ = nullptr;
    changed_.notify_all();
    while (!stopping_) {
      if (queue_.empty()) {
        changed_.wait(mutex_);
        continue;
      }
      std::shared_ptr<LaunchedComm> target = std::move(queue_.front());
      queue_.erase(queue_.begin());
      if (target->ended) continue;
      running_ = target.get();
      return target;
    }
    return nullptr;
  }

  void perform(LaunchedComm& target) {
    try {
      const device::DeviceGuard guard(device_->api(), device_->device());
      switch (target.task) {
        case LaunchedComm::Task::kInit:
          init(target);
          break;
        case LaunchedComm::Task::kCalls:
          call(target);
          break;
        case LaunchedComm::Task::kFinalize:
          library_->begin_finalize(target.comm);
          break;
      }
      target.state.store(CommState::kSettled, std::memory_order_release);
    } catch (const std::exception& error) {
      fail(target, error);
    }
  }

  void init(LaunchedComm& target) {
    const Comm created = library_->begin_init(target.id, target.size, target.rank, Blocking::kYes);
    const bool ended = [&] {
      const MutexLock lock(mutex_);
      if (!target.ended) target.comm = created;
      return target.ended;
    }();
    if (ended) library_->abort({&created, 1});
  }

  void call(const LaunchedComm& target) {
    const auto launch_all = [&] {
      for (const Call& one : target.calls) library_->launch(one, target.comm, target.stream);
    };
    target.grouped ? launch_as_group(*library_, launch_all) : launch_all();
  }

  void fail(LaunchedComm& target, const std::exception& error) {
    Health failure{CommState::kFailed, false, error.what()};
    {
      const MutexLock lock(mutex_);
      if (!target.ended && target.comm.handle != nullptr) {  // else it may be freed already
        Health details = library_->health(target.comm);
        if (details.state == CommState::kFailed) failure = std::move(details);
      }
    }
    target.failure = std::move(failure);
    target.state.store(CommState::kFailed, std::memory_order_release);
  }

  std::shared_ptr<Library> library_;
  std::shared_ptr<device::Context> device_;
  Mutex mutex_;
  Condition changed_;
  std::vector<std::shared_ptr<LaunchedComm>> queue_ HVD_GUARDED_BY(mutex_);
  const LaunchedComm* running_ HVD_GUARDED_BY(mutex_) = nullptr;  // the one whose task runs
  bool stopping_ HVD_GUARDED_BY(mutex_) = false;
  bool over_ HVD_GUARDED_BY(mutex_) = false;
};

class Launcher final : public Library {
 public:
  Launcher(std::shared_ptr<Library> library, const std::shared_ptr<device::Context>& device)
      : library_(std::move(library)), thread_(std::make_shared<Thread>(library_, device)) {}
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  ~Launcher() override {
    if (!comms_.empty()) thread_->stop();
  }

  int version() const noexcept override { return library_->version(); }
  UniqueId make_id() override { return library_->make_id(); }

  Comm begin_init(const UniqueId& id, int size, int rank, Blocking) override {
    if (comms_.empty()) Thread::start(thread_);
    auto target = std::make_shared<LaunchedComm>();
    target->id = id;
    target->size = size;
    target->rank = rank;
    comms_.push_back(target);
    thread_->submit(target, LaunchedComm::Task::kInit);
    return {target.get()};
  }

  Health health(Comm comm) override {
    const LaunchedComm& target = target_of(comm);
    const CommState state = target.state.load(std::memory_order_acquire);
    if (state == CommState::kBusy) return {CommState::kBusy};
    if (state == CommState::kFailed) return target.failure;
    return library_->health(target.comm);
  }

  void begin_finalize(Comm comm) override {
    thread_->submit(idle(comm), LaunchedComm::Task::kFinalize);
  }
  void destroy(Comm comm) noexcept override {
    const Comm created = thread_->end(target_of(comm));
    if (created.handle != nullptr) library_->destroy(created);
  }
  void abort(std::span<const Comm> comms) noexcept override {
    std::vector<Comm> created;
    for (const Comm comm : comms) {
      created.push_back(thread_->end(target_of(comm)));
      if (created.back().handle == nullptr) created.pop_back();
    }
    thread_->finish_ended_call();
    if (!created.empty()) library_->abort(created);
  }
  bool revoke(Comm comm) noexcept override { return library_->revoke(target_of(comm).comm); }

  void begin_group() override { ++depth_; }
  void end_group() override {
    if (--depth_ > 0 || !group_) return;
    thread_->submit(std::exchange(group_, nullptr), LaunchedComm::Task::kCalls);
  }

  void launch(const Call& call, Comm comm, device::Stream stream) override {
    auto target = idle(comm);
    if (group_ != target) target->calls.clear();
    target->calls.push_back(call);
    target->stream = stream;
    target->grouped = depth_ > 0;
    if (target->grouped) {
      HVD_EXPECT(!group_ || group_ == target, "all calls of a group are on one communicator");
      group_ = std::move(target);
    } else {
      thread_->submit(target, LaunchedComm::Task::kCalls);
    }
  }

  bool has_registration() const noexcept override { return library_->has_registration(); }
  std::byte* allocate(std::size_t bytes) override { return library_->allocate(bytes); }
  void release(std::byte* memory) noexcept override { library_->release(memory); }
  void* register_buffer(Comm comm, std::byte* memory, std::size_t bytes) override {
    return library_->register_buffer(idle(comm)->comm, memory, bytes);
  }
  void deregister_buffer(Comm comm, void* registration) noexcept override {
    library_->deregister_buffer(target_of(comm).comm, registration);
  }

 private:
  static LaunchedComm& target_of(Comm comm) noexcept {
    return *static_cast<LaunchedComm*>(comm.handle);
  }
  std::shared_ptr<LaunchedComm> idle(Comm comm) const {
    for (const auto& target : comms_) {
      if (target.get() != comm.handle) continue;
      HVD_EXPECT(target->state.load(std::memory_order_acquire) == CommState::kSettled,
                 "health() has reported that the last call is complete");
      return target;
    }
    throw Error("NCCL: this library has not created the communicator");
  }

  const std::shared_ptr<Library> library_;
  const std::shared_ptr<Thread> thread_;
  std::vector<std::shared_ptr<LaunchedComm>> comms_;  // all that were created, even if ended
  int depth_ = 0;
  std::shared_ptr<LaunchedComm> group_;
};

}  // namespace

std::shared_ptr<Library> make_launcher(std::shared_ptr<Library> library,
                                       std::shared_ptr<device::Context> device) {
  return std::make_shared<Launcher>(std::move(library), device);
}

}  // namespace hvd::nccl
