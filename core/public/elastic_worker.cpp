#include "public/elastic_worker.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "base/text.h"

namespace hvd::elastic {
namespace {

bool is_stream_socket(int descriptor) noexcept {
  int type = 0;
  socklen_t size = sizeof type;
  return ::getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

std::optional<WorkerIdentity> take_identity() {
  const char* const socket = std::getenv("HVD_MEMBER_SOCKET");
  const char* const id = std::getenv("HVD_WORKER_ID");
  if (socket == nullptr || id == nullptr) return std::nullopt;
  const auto descriptor = parse_number<int>(socket);
  const auto worker = parse_number<member::WorkerId>(id);
  const bool valid = descriptor && worker && *worker > 0 && is_stream_socket(*descriptor);
  if (!valid) {
    HVD_LOG(kWarning) << "HVD_MEMBER_SOCKET=" << socket << ", HVD_WORKER_ID=" << id
                      << " are not those of hvdrun's agent, so this process is not a worker of "
                         "an elastic job; only a process that hvdrun starts can be one";
  } else {
    ::fcntl(*descriptor, F_SETFD, FD_CLOEXEC);
  }
  ::unsetenv("HVD_MEMBER_SOCKET");
  ::unsetenv("HVD_WORKER_ID");
  if (!valid) return std::nullopt;
  return WorkerIdentity{.id = *worker, .socket = *descriptor};
}

}  // namespace

const std::optional<WorkerIdentity>& worker_identity() noexcept {
  static const std::optional<WorkerIdentity> identity = take_identity();
  return identity;
}

bool claim_worker() noexcept {
  static std::atomic<bool> claimed{false};
  return !claimed.exchange(true);
}

std::optional<int> device_slot() {
  const char* const slot = std::getenv("LOCAL_RANK");
  const auto number = parse_number<int>(slot != nullptr ? slot : "");
  return number && *number >= 0 ? number : std::nullopt;
}

}  // namespace hvd::elastic
