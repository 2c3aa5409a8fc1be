#pragma once

#include <cstdint>
#include <string>

namespace hvd {

/// Identifies one process of a host permanently, because a pid may be reused by another process.
struct ProcessIdentity {
  std::int64_t pid = 0;
  /// Start time in the kernel's clock ticks; 0 if it could not be read.
  std::uint64_t start_time = 0;
  /// The pid namespace of `pid`; 0 if it could not be read.
  std::uint64_t pid_namespace = 0;
};

/// Identifies this boot of this host; empty if it could not be read.
std::string boot_id();
ProcessIdentity current_process() noexcept;
/// Whether the process is in this process's pid namespace, in which its pid is valid.
bool same_pid_namespace(const ProcessIdentity&) noexcept;
/// False if the pid now belongs to another process.
bool still_names(const ProcessIdentity&) noexcept;

/// Detects the end of another process. A zombie, which has ended and was not waited for, counts as
/// ended; kill(pid, 0) would report it as alive. Move-only; one thread at a time.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(const ProcessIdentity&) noexcept;
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  ~ProcessWatch();

  /// False if the process cannot be observed (another pid namespace, an old kernel). Heartbeats are
  /// then the only evidence.
  bool works() const noexcept { return descriptor_ >= 0 || ended_; }
  bool ended() noexcept;

 private:
  int descriptor_ = -1;
  bool ended_ = false;
};

}  // namespace hvd
