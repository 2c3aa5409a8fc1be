#include "transport/node/life_lock.h"

#include <dirent.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/text.h"
#include "base/thread.h"

namespace hvd::host {
namespace {

/// The longest single wait of the thread, because a wait for a mutex cannot be interrupted.
constexpr Duration kLongestWait = std::chrono::milliseconds(500);
/// Polling interval while a process has not taken its lock yet, or has released it and may be
/// ending.
constexpr Duration kShortestWait = std::chrono::milliseconds(1);
constexpr int kShortWaits = 200;
constexpr unsigned kExiting = 0x4;  // PF_EXITING of <linux/sched.h>

bool exists(std::int64_t pid) noexcept {
  return ::kill(static_cast<pid_t>(pid), 0) == 0 || errno != ESRCH;
}

/// Whether the thread has begun to exit; empty if there is no such thread.
std::optional<bool> exits(const std::string& stat_file) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(stat_file.c_str(), "re"),
                                                             std::fclose);
  if (!file) return std::nullopt;
  char text[1024];
  const std::size_t size = std::fread(text, 1, sizeof text - 1, file.get());
  text[size] = '\0';
  // The second field is the program's name in parentheses, which may itself contain them.
  const char* const end_of_name = std::strrchr(text, ')');
  char state = 0;
  unsigned flags = 0;
  if (end_of_name == nullptr ||
      std::sscanf(end_of_name + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
    return std::nullopt;
  return state == 'Z' || state == 'X' || (flags & kExiting) != 0;
}

timespec until(Duration from_now) noexcept {
  const std::chrono::nanoseconds at = SteadyClock().now() + from_now;
  return {static_cast<time_t>(at.count() / 1'000'000'000),
          static_cast<long>(at.count() % 1'000'000'000)};
}

/// @return whether the calling thread now holds the mutex
bool lock_within(pthread_mutex_t& mutex, Duration limit) noexcept {
  const timespec deadline = until(limit);
  const int result = ::pthread_mutex_clocklock(&mutex, CLOCK_MONOTONIC, &deadline);
  if (result == EOWNERDEAD) ::pthread_mutex_consistent(&mutex);
  return result == 0 || result == EOWNERDEAD;
}

}  // namespace

void LifeLock::initialize() noexcept {
  pthread_mutexattr_t how;
  ::pthread_mutexattr_init(&how);
  ::pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(&mutex, &how);
  ::pthread_mutexattr_destroy(&how);
}

bool has_exited(const ProcessIdentity& process) noexcept {
  try {
    if (!same_pid_namespace(process)) return false;
    const std::string folder = text("/proc/", process.pid, "/task");
    const std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir(folder.c_str()), ::closedir);
    if (!tasks) return !exists(process.pid);
    if (!still_names(process)) return true;
    bool seen = false;
    while (const dirent* const task = ::readdir(tasks.get())) {
      if (task->d_name[0] == '.') continue;
      const std::optional<bool> out = exits(folder + "/" + task->d_name + "/stat");
      if (!out) continue;
      if (!*out) return false;
      seen = true;
    }
    return seen || !exists(process.pid);
  } catch (const std::exception&) {  // out of memory: a later call detects the end
    return false;
  }
}

/// Outlives the LifeWatch by at most one wait.
class LifeWatch::Thread {
 public:
  Thread(std::vector<Member> members, std::size_t own, std::function<void()> notify_all,
         std::shared_ptr<void> memory)
      : members_(std::move(members)),
        own_(own),
        notify_all_(std::move(notify_all)),
        memory_(std::move(memory)),
        done_with_(members_.size()) {
    for (std::size_t i = 0; i < members_.size(); ++i)
      done_with_[i] = i == own_ || !same_pid_namespace(members_[i].process);
  }

  void stop() {
    const MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }

  void run() {
    LifeLock& own = *members_[own_].lock;
    while (!lock_within(own.mutex, kLongestWait)) {
      if (stopping()) return;
    }
    own.held.store(1, std::memory_order_release);
    while (!stopping()) {
      wait();
      check_suspects();
    }
    ::pthread_mutex_unlock(&own.mutex);
  }

 private:
  bool stopping() {
    const MutexLock lock(mutex_);
    return stopping_;
  }
  void sleep(Duration limit) {
    const TimePoint deadline = SteadyClock().now() + limit;
    const MutexLock lock(mutex_);
    while (!stopping_ && SteadyClock().now() < deadline) changed_.wait_until(mutex_, deadline);
  }

  /// Waits for the end of the next member, up to a limit.
  void wait() {
    const Duration limit = suspects_.empty() ? kLongestWait : suspects_wait();
    std::size_t next = own_;
    do {
      next = (next + 1) % members_.size();
    } while (done_with_[next] && next != own_);
    if (next == own_) return sleep(limit);
    LifeLock& lock = *members_[next].lock;
    if (!lock_within(lock.mutex, limit)) return;
    const bool held_before = lock.held.load(std::memory_order_acquire) != 0;
    ::pthread_mutex_unlock(&lock.mutex);
    // The process has not taken its lock yet, and may never do so.
    if (!held_before && lock.left.load(std::memory_order_seq_cst) == 0 &&
        !has_exited(members_[next].process))
      return sleep(not_begun_wait());
    done_with_[next] = true;
    suspects_.push_back(next);
    looks_ = 0;
  }

  Duration suspects_wait() noexcept { return wait_of(looks_); }
  Duration not_begun_wait() noexcept { return wait_of(not_begun_++); }
  /// Waits are short at first and longer later, because a process starts or ends either soon or not
  /// at all.
  static Duration wait_of(int times) noexcept {
    return times < kShortWaits ? kShortestWait
                               : std::min(kLongestWait, (times - kShortWaits + 1) * kShortestWait);
  }

  void check_suspects() {
    ++looks_;
    std::erase_if(suspects_, [this](std::size_t index) {
      const Member& member = members_[index];
      if (member.lock->left.load(std::memory_order_seq_cst) != 0 ||
          member.lock->ended.load(std::memory_order_acquire) != 0)
        return true;
      if (!has_exited(member.process)) return false;
      member.lock->ended.store(1, std::memory_order_seq_cst);
      notify_all_();
      return true;
    });
  }

  const std::vector<Member> members_;
  const std::size_t own_;
  const std::function<void()> notify_all_;
  const std::shared_ptr<void> memory_;
  std::vector<bool> done_with_;        // ended, or not observable
  std::vector<std::size_t> suspects_;  // lock is free, end not confirmed
  int looks_ = 0;
  int not_begun_ = 0;
  Mutex mutex_;
  Condition changed_;
  bool stopping_ HVD_GUARDED_BY(mutex_) = false;
};

LifeWatch::LifeWatch(std::vector<Member> members, std::size_t own, std::function<void()> notify_all,
                     std::shared_ptr<void> memory)
    : thread_(std::make_shared<Thread>(std::move(members), own, std::move(notify_all),
                                       std::move(memory))) {
  start_thread("hvd-life", [thread = thread_] { thread->run(); }).detach();
}

LifeWatch::~LifeWatch() { thread_->stop(); }

}  // namespace hvd::host
