#include "backend/nccl/launcher.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/expect.h"
#include "base/mutex.h"
#include "hvd/error.h"

namespace hvd::nccl {
namespace {

/// Limit of the destructor's wait for the thread.
constexpr Duration kThreadPatience = std::chrono::seconds(1);
/// Limit of an abort's wait for the running call, many times the duration of a launch.
constexpr Duration kCallPatience = std::chrono::milliseconds(100);
/// The same after the call's communicator has been revoked.
constexpr Duration kRevokedCallPatience = std::chrono::seconds(2);

/// A collective, send or receive, with its arguments.
struct Call {
  enum class Kind : std::uint8_t {
    kAllReduce,
    kBroadcast,
    kReduce,
    kAllGather,
    kReduceScatter,
    kSend,
    kReceive
  };
  Kind kind;
  const std::byte* in;
  std::byte* out;
  std::size_t count;
  DataType type;
  Reduction reduction;
  int peer;  ///< the root of a rooted collective
  device::Stream stream;
};

void execute(Library& library, const Call& call, Comm comm) {
  switch (call.kind) {
    case Call::Kind::kAllReduce:
      return library.all_reduce(call.in, call.out, call.count, call.type, call.reduction, comm,
                                call.stream);
    case Call::Kind::kBroadcast:
      return library.broadcast(call.in, call.out, call.count, call.type, call.peer, comm,
                               call.stream);
    case Call::Kind::kReduce:
      return library.reduce(call.in, call.out, call.count, call.type, call.reduction, call.peer,
                            comm, call.stream);
    case Call::Kind::kAllGather:
      return library.all_gather(call.in, call.out, call.count, call.type, comm, call.stream);
    case Call::Kind::kReduceScatter:
      return library.reduce_scatter(call.in, call.out, call.count, call.type, call.reduction, comm,
                                    call.stream);
    case Call::Kind::kSend:
      return library.send(call.in, call.count, call.type, call.peer, comm, call.stream);
    case Call::Kind::kReceive:
      return library.receive(call.out, call.count, call.type, call.peer, comm, call.stream);
  }
}

/// A communicator and its current task. The caller fills in a task and hands it to the thread,
/// which owns these fields until `state` is no longer kBusy.
struct Member {
  enum class Task : std::uint8_t { kInit, kCalls, kFinalize };
  enum class State : std::uint8_t { kIdle, kBusy, kFailed };

  Task task = Task::kInit;
  UniqueId id = {};
  int size = 0;
  int rank = 0;
  std::vector<Call> calls = {};  // keeps its capacity
  bool grouped = false;

  std::atomic<State> state = State::kIdle;
  Health failure = {};  // in kFailed

  // Guarded by the thread's mutex. The caller may read them while the state is kIdle.
  Comm comm = {};
  bool ended = false;  // aborted or destroyed, or about to be: begin no further task
};

/// The thread and its queue. Outlives the Launcher if a call of NCCL does not return.
class Thread {
 public:
  Thread(std::shared_ptr<Library> library, std::shared_ptr<device::Context> device)
      : library_(std::move(library)), device_(std::move(device)) {}

  static void start(const std::shared_ptr<Thread>& self) {
    std::thread([self] { self->serve(); }).detach();
  }

  void submit(const std::shared_ptr<Member>& member, Member::Task task) {
    member->task = task;
    member->state.store(Member::State::kBusy, std::memory_order_relaxed);
    const MutexLock lock(mutex_);
    queue_.push_back(member);
    changed_.notify_all();
  }

  /// Begins no further task of the member. @return its communicator, null if it does not exist yet
  Comm end(Member& member) {
    const MutexLock lock(mutex_);
    member.ended = true;
    return member.comm;
  }
  /// After end() of all members that will be aborted: waits until no call on one of them is under
  /// way, see Note [Aborting during a call]. Bounded unless revoking blocks.
  void finish_ended_call() {
    if (wait_for_ended_call(kCallPatience)) return;
    const Comm revoked = [this] {
      const MutexLock lock(mutex_);
      return running_ && running_->ended ? running_->comm : Comm{};
    }();
    if (revoked.handle == nullptr || !library_->revoke(revoked)) return;
    wait_for_ended_call(kRevokedCallPatience);
  }

  void stop() {
    const TimePoint deadline = SteadyClock().now() + kThreadPatience;
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    while (!over_ && SteadyClock().now() < deadline) changed_.wait_until(mutex_, deadline);
  }

 private:
  /// @return false: the call is still running
  bool wait_for_ended_call(Duration patience) {
    const TimePoint deadline = SteadyClock().now() + patience;
    const MutexLock lock(mutex_);
    while (running_ && running_->ended) {
      if (SteadyClock().now() >= deadline) return false;
      changed_.wait_until(mutex_, deadline);
    }
    return true;
  }

  void serve() {
    ::pthread_setname_np(::pthread_self(), "hvd-nccl");
    while (const auto member = next()) perform(*member);
    // After the notification the owner may destroy the objects that these depend on.
    device_.reset();
    library_.reset();
    const MutexLock lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

  std::shared_ptr<Member> next() {
    const MutexLock lock(mutex_);
    running_ = nullptr;
    changed_.notify_all();
    while (!stopping_) {
      if (queue_.empty()) {
        changed_.wait(mutex_);
        continue;
      }
      std::shared_ptr<Member> member = std::move(queue_.front());
      queue_.erase(queue_.begin());
      if (member->ended) continue;
      running_ = member.get();
      return member;
    }
    return nullptr;
  }

  void perform(Member& member) {
    try {
      const device::DeviceGuard guard(device_->api(), device_->device());
      switch (member.task) {
        case Member::Task::kInit:
          init(member);
          break;
        case Member::Task::kCalls:
          call(member);
          break;
        case Member::Task::kFinalize:
          library_->begin_finalize(member.comm);
          break;
      }
      member.state.store(Member::State::kIdle, std::memory_order_release);
    } catch (const std::exception& error) {
      fail(member, error);
    }
  }

  void init(Member& member) {
    const Comm created = library_->begin_init(member.id, member.size, member.rank, Blocking::kYes);
    const bool ended = [&] {
      const MutexLock lock(mutex_);
      if (!member.ended) member.comm = created;
      return member.ended;
    }();
    if (ended) library_->abort({&created, 1});
  }

  void call(const Member& member) {
    if (!member.grouped) return execute(*library_, member.calls.front(), member.comm);
    library_->begin_group();
    try {
      for (const Call& one : member.calls) execute(*library_, one, member.comm);
    } catch (...) {
      try {
        library_->end_group();
      } catch (const Error&) {  // the first error is rethrown
      }
      throw;
    }
    library_->end_group();
  }

  void fail(Member& member, const std::exception& error) {
    Health failure{Health::State::kFailed, false, error.what()};
    {
      const MutexLock lock(mutex_);
      if (!member.ended && member.comm.handle != nullptr) {  // else it may be freed already
        Health details = library_->health(member.comm);
        if (details.state == Health::State::kFailed) failure = std::move(details);
      }
    }
    member.failure = std::move(failure);
    member.state.store(Member::State::kFailed, std::memory_order_release);
  }

  std::shared_ptr<Library> library_;
  std::shared_ptr<device::Context> device_;
  Mutex mutex_;
  Condition changed_;
  std::vector<std::shared_ptr<Member>> queue_ HVD_GUARDED_BY(mutex_);
  const Member* running_ HVD_GUARDED_BY(mutex_) = nullptr;  // the member whose task runs
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
    if (!members_.empty()) thread_->stop();
  }

  int version() const noexcept override { return library_->version(); }
  UniqueId make_id() override { return library_->make_id(); }

  Comm begin_init(const UniqueId& id, int size, int rank, Blocking) override {
    if (members_.empty()) Thread::start(thread_);
    auto member = std::make_shared<Member>();
    member->id = id;
    member->size = size;
    member->rank = rank;
    members_.push_back(member);
    thread_->submit(member, Member::Task::kInit);
    return {member.get()};
  }

  Health health(Comm comm) override {
    const Member& member = member_of(comm);
    const Member::State state = member.state.load(std::memory_order_acquire);
    if (state == Member::State::kBusy) return {Health::State::kBusy};
    if (state == Member::State::kFailed) return member.failure;
    return library_->health(member.comm);
  }

  void begin_finalize(Comm comm) override { thread_->submit(idle(comm), Member::Task::kFinalize); }
  void destroy(Comm comm) noexcept override {
    const Comm created = thread_->end(member_of(comm));
    if (created.handle != nullptr) library_->destroy(created);
  }
  void abort(std::span<const Comm> comms) noexcept override {
    std::vector<Comm> created;
    for (const Comm comm : comms) {
      created.push_back(thread_->end(member_of(comm)));
      if (created.back().handle == nullptr) created.pop_back();
    }
    thread_->finish_ended_call();
    if (!created.empty()) library_->abort(created);
  }
  bool revoke(Comm comm) noexcept override { return library_->revoke(member_of(comm).comm); }

  void begin_group() override { ++depth_; }
  void end_group() override {
    if (--depth_ > 0 || !group_) return;
    thread_->submit(std::exchange(group_, nullptr), Member::Task::kCalls);
  }

  void all_reduce(const std::byte* in, std::byte* out, std::size_t count, DataType type,
                  Reduction reduction, Comm comm, device::Stream stream) override {
    add({Call::Kind::kAllReduce, in, out, count, type, reduction, -1, stream}, comm);
  }
  void broadcast(const std::byte* in, std::byte* out, std::size_t count, DataType type, int root,
                 Comm comm, device::Stream stream) override {
    add({Call::Kind::kBroadcast, in, out, count, type, {}, root, stream}, comm);
  }
  void reduce(const std::byte* in, std::byte* out, std::size_t count, DataType type,
              Reduction reduction, int root, Comm comm, device::Stream stream) override {
    add({Call::Kind::kReduce, in, out, count, type, reduction, root, stream}, comm);
  }
  void all_gather(const std::byte* in, std::byte* out, std::size_t in_count, DataType type,
                  Comm comm, device::Stream stream) override {
    add({Call::Kind::kAllGather, in, out, in_count, type, {}, -1, stream}, comm);
  }
  void reduce_scatter(const std::byte* in, std::byte* out, std::size_t out_count, DataType type,
                      Reduction reduction, Comm comm, device::Stream stream) override {
    add({Call::Kind::kReduceScatter, in, out, out_count, type, reduction, -1, stream}, comm);
  }
  void send(const std::byte* in, std::size_t count, DataType type, int peer, Comm comm,
            device::Stream stream) override {
    add({Call::Kind::kSend, in, nullptr, count, type, {}, peer, stream}, comm);
  }
  void receive(std::byte* out, std::size_t count, DataType type, int peer, Comm comm,
               device::Stream stream) override {
    add({Call::Kind::kReceive, nullptr, out, count, type, {}, peer, stream}, comm);
  }

  bool has_registration() const noexcept override { return library_->has_registration(); }
  std::byte* allocate(std::size_t bytes) override { return library_->allocate(bytes); }
  void release(std::byte* memory) noexcept override { library_->release(memory); }
  void* register_buffer(Comm comm, std::byte* memory, std::size_t bytes) override {
    return library_->register_buffer(idle(comm)->comm, memory, bytes);
  }
  void deregister_buffer(Comm comm, void* registration) noexcept override {
    library_->deregister_buffer(member_of(comm).comm, registration);
  }

 private:
  static Member& member_of(Comm comm) noexcept { return *static_cast<Member*>(comm.handle); }
  std::shared_ptr<Member> idle(Comm comm) const {
    for (const auto& member : members_) {
      if (member.get() != comm.handle) continue;
      HVD_EXPECT(member->state.load(std::memory_order_acquire) == Member::State::kIdle,
                 "health() has reported that the last call is complete");
      return member;
    }
    throw Error("NCCL: this library has not created the communicator");
  }
  void add(const Call& call, Comm comm) {
    auto member = idle(comm);
    if (group_ != member) member->calls.clear();
    member->calls.push_back(call);
    member->grouped = depth_ > 0;
    if (member->grouped) {
      HVD_EXPECT(!group_ || group_ == member, "all calls of a group are on one communicator");
      group_ = std::move(member);
    } else {
      thread_->submit(member, Member::Task::kCalls);
    }
  }

  const std::shared_ptr<Library> library_;
  const std::shared_ptr<Thread> thread_;
  std::vector<std::shared_ptr<Member>> members_;  // all that were created, ended ones included
  int depth_ = 0;
  std::shared_ptr<Member> group_;
};

}  // namespace

std::shared_ptr<Library> make_launcher(std::shared_ptr<Library> library,
                                       std::shared_ptr<device::Context> device) {
  return std::make_shared<Launcher>(std::move(library), device);
}

}  // namespace hvd::nccl
