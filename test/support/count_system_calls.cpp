#include "support/count_system_calls.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

namespace hvd::testing {
namespace {

constexpr std::size_t kThreads = 128;
constexpr std::size_t kNumbers = 512;

/// The counts of one thread. Only the counting thread writes them.
struct Counts {
  std::atomic<int> thread{0};
  std::array<std::atomic<std::uint64_t>, kNumbers> of{};
};
std::array<Counts, kThreads> counted;

void count(int thread, int number) {
  if (number < 0 || static_cast<std::size_t>(number) >= kNumbers) number = kNumbers - 1;
  for (Counts& counts : counted) {
    if (counts.thread.load() == 0) counts.thread = thread;
    if (counts.thread.load() != thread && &counts != &counted.back()) continue;
    counts.of[static_cast<std::size_t>(number)].fetch_add(1);
    return;
  }
}

constexpr int kNoneYet = -1;
constexpr int kFailed = -2;
std::atomic<int> listener{kNoneYet};
std::atomic<bool> counter_runs{false};

/// Counts each system call that the kernel has stopped, and lets it continue. This thread makes
/// only the two calls below, which pass the filter. Any other system call of this thread would wait
/// for the thread itself.
void let_go_on() {
  counter_runs = true;
  while (listener.load() == kNoneYet) {
  }
  while (listener.load() != kFailed) {
    seccomp_notif stopped = {};
    if (::ioctl(listener.load(), SECCOMP_IOCTL_NOTIF_RECV, &stopped) != 0) continue;
    count(static_cast<int>(stopped.pid), stopped.data.nr);
    seccomp_notif_resp answer = {};
    answer.id = stopped.id;
    answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    ::ioctl(listener.load(), SECCOMP_IOCTL_NOTIF_SEND, &answer);
  }
}

/// Installs the filter for all threads. Returns the listener, or -1 with errno.
int install_filter() {
  constexpr auto kNumber = static_cast<std::uint32_t>(offsetof(seccomp_data, nr));
  constexpr auto kRequest = static_cast<std::uint32_t>(offsetof(seccomp_data, args) + 8);
  std::array<sock_filter, 10> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kNumber),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 7, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 6, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 5, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kRequest),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(SECCOMP_IOCTL_NOTIF_RECV), 2,
               0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(SECCOMP_IOCTL_NOTIF_SEND), 1,
               0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  sock_fprog program = {.len = static_cast<unsigned short>(filter.size()), .filter = filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
  return static_cast<int>(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                                    SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_TSYNC |
                                        SECCOMP_FILTER_FLAG_TSYNC_ESRCH,
                                    &program));
}

const std::map<int, const char*>& names() {
  static const std::map<int, const char*> names = {{SYS_read, "read"},
                                                   {SYS_write, "write"},
                                                   {SYS_readv, "readv"},
                                                   {SYS_writev, "writev"},
                                                   {SYS_sendto, "sendto"},
                                                   {SYS_recvfrom, "recvfrom"},
                                                   {SYS_sendmsg, "sendmsg"},
                                                   {SYS_recvmsg, "recvmsg"},
                                                   {SYS_poll, "poll"},
                                                   {SYS_epoll_wait, "epoll_wait"},
                                                   {SYS_epoll_ctl, "epoll_ctl"},
                                                   {SYS_epoll_pwait, "epoll_pwait"},
                                                   {SYS_futex, "futex"},
                                                   {SYS_sched_yield, "sched_yield"},
                                                   {SYS_mmap, "mmap"},
                                                   {SYS_munmap, "munmap"},
                                                   {SYS_madvise, "madvise"},
                                                   {SYS_brk, "brk"},
                                                   {SYS_openat, "openat"},
                                                   {SYS_close, "close"},
                                                   {SYS_getpid, "getpid"},
                                                   {SYS_gettid, "gettid"},
                                                   {SYS_clock_nanosleep, "clock_nanosleep"}};
  return names;
}

}  // namespace

std::string begin_to_count_system_calls() {
  std::thread(let_go_on).detach();
  while (!counter_runs) std::this_thread::yield();
  const int made = install_filter();
  const int error = errno;
  listener = made < 0 ? kFailed : made;
  return made < 0 ? std::string("seccomp: ") + std::strerror(error) : std::string();
}

SystemCalls system_calls(int thread) {
  SystemCalls all;
  for (const Counts& counts : counted) {
    if (counts.thread.load() == 0 || (thread != 0 && counts.thread.load() != thread)) continue;
    for (std::size_t number = 0; number < kNumbers; ++number) {
      const std::uint64_t found = counts.of[number].load();
      if (found > 0) all[static_cast<int>(number)] += found;
    }
  }
  return all;
}

SystemCalls added(const SystemCalls& before, const SystemCalls& after) {
  SystemCalls more;
  for (const auto& [number, count] : after) {
    const auto known = before.find(number);
    const std::uint64_t first = known == before.end() ? 0 : known->second;
    if (count > first) more[number] = count - first;
  }
  return more;
}

std::string describe(const SystemCalls& calls) {
  std::string text;
  for (const auto& [number, count] : calls) {
    const auto name = names().find(number);
    text +=
        (text.empty() ? "" : ", ") +
        (name == names().end() ? "number " + std::to_string(number) : std::string(name->second)) +
        " " + std::to_string(count);
  }
  return text.empty() ? "none" : text;
}

}  // namespace hvd::testing
