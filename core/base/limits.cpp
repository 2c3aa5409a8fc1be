#include "base/limits.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/expect.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd {
namespace {

constexpr rlim_t kMaxDescriptors = rlim_t{1} << 20;
/// Enough for UCX to end its connections, and for messages to ranks without a connection.
constexpr std::size_t kReserved = 16;

struct Reserve {
  Mutex mutex;
  std::array<int, kReserved> descriptors HVD_GUARDED_BY(mutex) = {};
  std::size_t open HVD_GUARDED_BY(mutex) = 0;
  bool ran_out HVD_GUARDED_BY(mutex) = false;
};

int open_one() noexcept { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

Reserve& reserve() {
  static Reserve* const instance = new Reserve;  // never destroyed: exit handlers use it
  return *instance;
}

}  // namespace

void raise_descriptor_limit() noexcept {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min(limit.rlim_max, kMaxDescriptors);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    HVD_LOG(kInfo) << "the limit of file descriptors stays: " << std::strerror(errno);
  }
}

void reserve_descriptors() noexcept {
  Reserve& all = reserve();
  const MutexLock lock(all.mutex);
  all.ran_out = false;
  while (all.open < kReserved) {
    const int descriptor = open_one();
    if (descriptor < 0) {
      all.ran_out = all.open == 0;
      return;
    }
    all.descriptors[all.open++] = descriptor;
  }
}

void release_descriptors() noexcept {
  Reserve& all = reserve();
  const MutexLock lock(all.mutex);
  if (all.open == 0) return;
  const int further = open_one();
  all.ran_out = further < 0 && errno == EMFILE;
  if (further >= 0) ::close(further);
  while (all.open > 0) ::close(all.descriptors[--all.open]);
}

bool ran_out_of_descriptors() noexcept {
  Reserve& all = reserve();
  const MutexLock lock(all.mutex);
  return all.ran_out;
}

void require_descriptors(std::size_t count) {
  std::vector<int> opened;
  opened.reserve(count);
  int error = 0;
  while (opened.size() < count && error == 0) {
    const int descriptor = open_one();
    if (descriptor >= 0) {
      opened.push_back(descriptor);
    } else {
      error = errno;
    }
  }
  for (const int descriptor : opened) ::close(descriptor);
  if (!is_shortage(error)) return;
  throw Error(text("a rank needs ", count, " file descriptors to start, and ", opened.size(),
                   " are left: ", describe_shortage(error)));
}

bool is_shortage(int error) noexcept {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS;
}

int shortage_in(std::string_view text) noexcept {
  for (const int error : {EMFILE, ENFILE, ENOBUFS, ENOMEM})
    if (text.find(std::strerror(error)) != std::string_view::npos) return error;
  return 0;
}

std::string describe_shortage(int error) {
  HVD_EXPECT(is_shortage(error), "the value of errno is that of a shortage");
  rlimit limit = {};
  ::getrlimit(error == EMFILE ? RLIMIT_NOFILE : RLIMIT_MEMLOCK, &limit);
  switch (error) {
    case EMFILE:
      return text("this process has no file descriptor left; its limit is ", limit.rlim_cur,
                  " (ulimit -n), the hard limit is ", limit.rlim_max,
                  " (ulimit -Hn); close files, or raise the limit");
    case ENFILE:
      return "this host has no file descriptor left (sysctl fs.file-max)";
    case ENOBUFS:
      return "this host's kernel has no memory left for connections (sysctl net.ipv4.tcp_mem)";
    default:
      return text(
          "this process gets no more memory; see ulimit -v, the limit of its cgroup and, "
          "for memory that a network adapter uses, ulimit -l (",
          limit.rlim_cur == RLIM_INFINITY ? std::string("unlimited")
                                          : text(limit.rlim_cur / 1024, " KiB"),
          ")");
  }
}

}  // namespace hvd
