#include "observe/supervisor_notice.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/mutex.h"

namespace hvd::observe {
namespace {

// The address that hvdrun's supervisor listens at: the name of a socket in the abstract namespace,
// which needs no file, is not visible on other machines, and survives programs that close
// descriptors that they did not open.
constexpr const char* kAddressVariable = "HVD_LAUNCHER_NOTICES";
constexpr std::size_t kMaxText = 1500;

constexpr std::array kNames = {"init", "throw", "exit", "loss", "left", "over"};

std::array<std::atomic<bool>, kNames.size()> sent{};
std::atomic<bool> ranks_of_supervisor{true};

int connect_to_supervisor() {
  const char* const name = std::getenv(kAddressVariable);
  sockaddr_un address{};
  if (name == nullptr || *name == '\0' || std::strlen(name) + 1 >= sizeof address.sun_path)
    return -1;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name, std::strlen(name));
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(name));
  const int made = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (made < 0) return -1;
  const timeval limit = {.tv_sec = 0, .tv_usec = 100'000};
  ::setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (::connect(made, reinterpret_cast<const sockaddr*>(&address), length) == 0) return made;
  ::close(made);
  return -1;
}

/// A connected socket, or -1. The socket stays open, because a process that ends for lack of memory
/// or descriptors may not get another.
int connection() {
  static Mutex mutex;
  static int socket HVD_GUARDED_BY(mutex) = -1;
  const MutexLock lock(mutex);
  if (socket < 0) socket = connect_to_supervisor();
  return socket;
}

}  // namespace

void notify_supervisor(NoticeKind kind, int code, std::string_view text, int about) noexcept {
  const auto index = static_cast<std::size_t>(kind);
  if (kind == NoticeKind::kInitialised) {
    for (auto& each : sent) each.store(false);
  }
  if (sent[index].exchange(true)) return;
  const int socket = connection();
  if (socket < 0) return;
  if (!ranks_of_supervisor.load()) about = -1;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  std::array<char, kMaxText + 128> message{};
  const int length =
      std::snprintf(message.data(), message.size(), "%s %lld %d %d\n%.*s", kNames[index],
                    static_cast<long long>(now.tv_sec) * 1'000'000'000 + now.tv_nsec, code, about,
                    static_cast<int>(std::min(text.size(), kMaxText)), text.data());
  if (length > 0)
    ::send(socket, message.data(), std::min(static_cast<std::size_t>(length), message.size() - 1),
           MSG_NOSIGNAL);
}

void set_ranks_of_supervisor(bool known) noexcept { ranks_of_supervisor.store(known); }

std::string_view without_backtrace(std::string_view what) {
  for (const std::string_view start :
       {"\nException raised from ", "\nC++ CapturedTraceback:", "\nframe #"}) {
    what = what.substr(0, what.find(start));
  }
  what = what.substr(0, kMaxText);
  while (!what.empty() && (what.back() == '\n' || what.back() == ' ')) what.remove_suffix(1);
  return what;
}

}  // namespace hvd::observe
