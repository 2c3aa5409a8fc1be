#include "base/process_watch.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "base/text.h"

namespace hvd {
namespace {

/// Field 22 of /proc/PID/stat; 0 when it cannot be read.
std::uint64_t start_time_of(std::int64_t pid) noexcept {
  try {
    std::ifstream file(text("/proc/", pid, "/stat"));
    std::string line;
    if (!std::getline(file, line)) return 0;
    // The second field is the program's name in parentheses, which may itself contain spaces and
    // parentheses.
    const auto end_of_name = line.rfind(')');
    if (end_of_name == std::string::npos) return 0;
    std::istringstream rest(line.substr(end_of_name + 1));
    std::string skipped;
    for (int field = 3; field < 22; ++field) rest >> skipped;
    std::uint64_t start = 0;
    return rest >> start ? start : 0;
  } catch (...) {
    return 0;
  }
}

std::uint64_t own_pid_namespace() noexcept {
  struct stat info = {};
  return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

int open_process(std::int64_t pid) noexcept {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0U));
#else
  static_cast<void>(pid);
  errno = ENOSYS;
  return -1;
#endif
}

}  // namespace

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  return std::getline(file, boot) ? boot : std::string();
}

ProcessIdentity current_process() noexcept {
  const auto pid = static_cast<std::int64_t>(getpid());
  return {pid, start_time_of(pid), own_pid_namespace()};
}

bool same_pid_namespace(const ProcessIdentity& identity) noexcept {
  return identity.pid > 0 && identity.pid_namespace != 0 &&
         identity.pid_namespace == own_pid_namespace();
}

bool still_names(const ProcessIdentity& identity) noexcept {
  const std::uint64_t start = start_time_of(identity.pid);
  return identity.start_time == 0 || start == 0 || start == identity.start_time;
}

ProcessWatch::ProcessWatch(const ProcessIdentity& identity) noexcept {
  if (!same_pid_namespace(identity)) return;
  descriptor_ = open_process(identity.pid);
  if (descriptor_ < 0) {
    ended_ = errno == ESRCH;
    return;
  }
  // Checked after opening, because from now on the descriptor refers to one process.
  if (!still_names(identity)) ended_ = true;
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), ended_(other.ended_) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(ended_, other.ended_);
  return *this;
}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool ProcessWatch::ended() noexcept {
  if (ended_ || descriptor_ < 0) return ended_;
  pollfd entry = {descriptor_, POLLIN, 0};
  ended_ = ::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLIN | POLLHUP)) != 0;
  return ended_;
}

}  // namespace hvd
