// Detects the end of another process by the lock that one of its threads holds.
#include "transport/node/life_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace hvd::host {
namespace {

using namespace std::chrono_literals;

/// Polls for up to 20 s.
template <class Done>
bool soon(const Done& done) {
  const TimePoint limit = SteadyClock().now() + 20s;
  while (!done()) {
    if (SteadyClock().now() > limit) return false;
    std::this_thread::sleep_for(100us);
  }
  return true;
}

struct Shared {
  static constexpr std::size_t kMaxRanks = 4;
  LifeLock locks[kMaxRanks];
  ProcessIdentity processes[kMaxRanks];
  std::atomic<std::uint32_t> entered[kMaxRanks];
  std::atomic<std::uint32_t> told;
  std::atomic<std::uint32_t> all_here;
};

/// Processes that watch each other: this one, number 0, and children.
class Processes {
 public:
  /// The program of process i, once it watches the others.
  using Life = std::function<void(Shared&, std::optional<LifeWatch>&)>;

  explicit Processes(std::vector<Life> children, std::uint64_t namespace_of_first = 0)
      : shared_(new(::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{}),
        count_(children.size() + 1) {
    for (LifeLock& lock : shared_->locks) lock.initialize();
    for (std::size_t i = 1; i < count_; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        enter(i);
        while (shared_->all_here == 0) std::this_thread::sleep_for(100us);
        std::optional<LifeWatch> watch;
        begin(watch, i);
        children[i - 1](*shared_, watch);
        ::_exit(0);
      }
      children_.push_back(child);
    }
    enter(0);
    EXPECT_TRUE(soon([&] {
      for (std::size_t i = 0; i < count_; ++i) {
        if (shared_->entered[i] == 0) return false;
      }
      return true;
    }));
    if (namespace_of_first != 0) shared_->processes[1].pid_namespace = namespace_of_first;
    shared_->all_here = 1;
    begin(own_, 0);
  }
  ~Processes() {
    own_.reset();
    for (const pid_t child : children_) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
    // The memory stays mapped, because this process's thread releases its lock a little later.
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  Shared& shared() { return *shared_; }
  pid_t child(std::size_t number) const { return children_[number - 1]; }
  bool ended(std::size_t number) const { return shared_->locks[number].ended.load() != 0; }
  bool all_hold() const {
    return soon([&] {
      for (std::size_t i = 0; i < count_; ++i) {
        if (shared_->locks[i].held == 0) return false;
      }
      return true;
    });
  }

 private:
  void enter(std::size_t number) {
    shared_->processes[number] = current_process();
    shared_->entered[number] = 1;
  }
  void begin(std::optional<LifeWatch>& watch, std::size_t number) {
    std::vector<LifeWatch::Member> members;
    for (std::size_t i = 0; i < count_; ++i)
      members.push_back({&shared_->locks[i], shared_->processes[i]});
    watch.emplace(std::move(members), number, [shared = shared_] { ++shared->told; }, nullptr);
  }

  Shared* const shared_;
  const std::size_t count_;
  std::vector<pid_t> children_;
  std::optional<LifeWatch> own_;
};

void stay(Shared&, std::optional<LifeWatch>&) {
  for (;;) ::pause();
}

TEST(LifeLock, DetectsAKilledProcessThatIsAZombie) {
  Processes job({stay});
  ASSERT_TRUE(job.all_hold());
  EXPECT_FALSE(job.ended(1));
  ::kill(job.child(1), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(1); }));
  EXPECT_TRUE(soon([&] { return job.shared().told == 1; }));
}

// Each process watches the next one, and the one behind it once that has ended.
TEST(LifeLock, SeveralThatEndAtOnceAreSeenInAnyOrder) {
  for (const std::vector<std::size_t>& killed : std::vector<std::vector<std::size_t>>{
           {1, 2}, {2, 1}, {1, 3}, {3, 2}, {1, 2, 3}, {3, 2, 1}}) {
    Processes job({stay, stay, stay});
    ASSERT_TRUE(job.all_hold());
    for (const std::size_t number : killed) ::kill(job.child(number), SIGKILL);
    for (const std::size_t number : killed) EXPECT_TRUE(soon([&] { return job.ended(number); }));
    EXPECT_TRUE(soon([&] { return job.shared().told >= killed.size(); }));
    for (std::size_t number = 0; number < 4; ++number) {
      if (std::ranges::find(killed, number) == killed.end()) {
        EXPECT_FALSE(job.ended(number));
      }
    }
  }
}

// The thread reads /proc repeatedly, so that the same thread also detects the next end.
TEST(LifeLock, AThreadThatLetsGoOfTheLockIsNoEndOfItsProcess) {
  Processes job({[](Shared&, std::optional<LifeWatch>& watch) {
                   watch.reset();
                   for (;;) ::pause();
                 },
                 stay});
  ASSERT_TRUE(job.all_hold());
  ASSERT_TRUE(soon([&] {  // the thread has released its lock
    if (::pthread_mutex_trylock(&job.shared().locks[1].mutex) != 0) return false;
    ::pthread_mutex_unlock(&job.shared().locks[1].mutex);
    return true;
  }));
  ::kill(job.child(2), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(2); }));
  EXPECT_FALSE(job.ended(1));
  ::kill(job.child(1), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(1); }));
}

TEST(LifeLock, AProcessThatBecomesAnotherProgramHasNotEnded) {
  Processes job({[](Shared&, std::optional<LifeWatch>&) {
                   std::this_thread::sleep_for(20ms);
                   ::execl("/bin/sleep", "sleep", "100", nullptr);
                 },
                 stay});
  ASSERT_TRUE(job.all_hold());
  ASSERT_TRUE(soon([&] {
    const int result = ::pthread_mutex_trylock(&job.shared().locks[1].mutex);
    if (result == EBUSY) return false;
    if (result == EOWNERDEAD) ::pthread_mutex_consistent(&job.shared().locks[1].mutex);
    ::pthread_mutex_unlock(&job.shared().locks[1].mutex);
    return true;
  })) << "its threads have ended";
  ::kill(job.child(2), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(2); }));
  EXPECT_FALSE(job.ended(1));
}

TEST(LifeLock, AProcessThatLeftIsNoLossAndAnotherTakesOverItsWatch) {
  Processes job(
      {[](Shared& shared, std::optional<LifeWatch>&) { shared.locks[1].left = 1; }, stay});
  ASSERT_TRUE(soon([&] { return job.shared().locks[2].held != 0; }));
  int status = 0;
  ::waitpid(job.child(1), &status, 0);
  ::kill(job.child(2), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(2); }));
  EXPECT_FALSE(job.ended(1));
}

// Otherwise the thread would wait for it, and miss the processes behind it.
TEST(LifeLock, DetectsAProcessThatEndsBeforeItTakesItsLock) {
  Processes job({[](Shared& shared, std::optional<LifeWatch>& watch) {
                   watch.reset();
                   shared.locks[1].held = 0;
                   std::this_thread::sleep_for(20ms);
                 },
                 stay});
  ASSERT_TRUE(soon([&] { return job.shared().locks[2].held != 0; }));
  EXPECT_TRUE(soon([&] { return job.ended(1); }));
  ::kill(job.child(2), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(2); }));
}

// Only missing heartbeats reveal its end.
TEST(LifeLock, AProcessOfAnotherPidNamespaceIsLeftOut) {
  Processes job({stay, stay}, current_process().pid_namespace + 1);
  ASSERT_TRUE(job.all_hold());
  ::kill(job.child(1), SIGKILL);
  ::kill(job.child(2), SIGKILL);
  EXPECT_TRUE(soon([&] { return job.ended(2); }))
      << "it is the next process after the one that is left out";
  EXPECT_FALSE(job.ended(1));
}

/// Whether the end of a process with much memory is detected before its pidfd reports it.
bool seen_before_the_memory_is_free() {
  constexpr std::size_t kBytes = std::size_t{512} << 20;
  Processes job({[](Shared& shared, std::optional<LifeWatch>&) {
    void* const memory =
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ::madvise(memory, kBytes, MADV_NOHUGEPAGE);
    for (std::size_t at = 0; at < kBytes; at += 4096) static_cast<volatile char*>(memory)[at] = 1;
    shared.told = 100;
    for (;;) ::pause();
  }});
  EXPECT_TRUE(job.all_hold());
  EXPECT_TRUE(soon([&] { return job.shared().told == 100; }));
  ProcessWatch pidfd(job.shared().processes[1]);
  bool pidfd_was_first = false;
  ::kill(job.child(1), SIGKILL);
  EXPECT_TRUE(soon([&] {
    if (job.ended(1)) return true;
    pidfd_was_first = pidfd_was_first || pidfd.ended();
    return false;
  }));
  return !pidfd_was_first;
}

// On busy cores the detecting thread may be late, but not in every attempt.
TEST(LifeLock, TheEndIsSeenBeforeTheMemoryIsFree) {
  EXPECT_TRUE(seen_before_the_memory_is_free() || seen_before_the_memory_is_free() ||
              seen_before_the_memory_is_free());
}

TEST(RunsNoMore, IsTrueOfEndedProcessesOnly) {
  ProcessIdentity own = current_process();
  EXPECT_FALSE(has_exited(own));
  own.start_time += 1;
  EXPECT_TRUE(has_exited(own)) << "another process has the pid now";
  own = current_process();
  own.pid_namespace += 1;
  EXPECT_FALSE(has_exited(own)) << "its end cannot be determined";
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const ProcessIdentity mine = current_process();
    ::_exit(::write(pipe[1], &mine, sizeof mine) == sizeof mine ? 0 : 1);
  }
  ProcessIdentity other;
  ASSERT_EQ(::read(pipe[0], &other, sizeof other), static_cast<ssize_t>(sizeof other));
  EXPECT_TRUE(soon([&] { return has_exited(other); })) << "a zombie";
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(has_exited(other));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

}  // namespace
}  // namespace hvd::host
