#pragma once

#include <cstdint>
#include <string>

namespace hvd {

/// Names one process of a host for good: a pid alone may be given to another process.
struct ProcessIdentity {
  std::int64_t pid = 0;
  /// When it started, in the kernel's unit; 0: could not be read.
  std::uint64_t start_time = 0;
  /// The pid namespace in which `pid` holds; 0: could not be read.
  std::uint64_t pid_namespace = 0;
};

/// Tells this run of this host's kernel from all others. Empty: could not be read.
std::string boot_id();
ProcessIdentity current_process() noexcept;
/// Its pid means here what it means there.
bool same_pid_namespace(const ProcessIdentity&) noexcept;
/// False when the pid is another process's now.
bool still_names(const ProcessIdentity&) noexcept;

/// Sees when another process ends. A process that has ended but was not waited for (a zombie)
/// counts as ended, which kill(pid, 0) would not see. Move-only; one thread at a time.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(const ProcessIdentity&) noexcept;
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;
  ~ProcessWatch();

  /// False when the process cannot be seen from here (another pid namespace, an old kernel): then
  /// only its beats tell.
  bool works() const noexcept { return descriptor_ >= 0 || ended_; }
  bool ended() noexcept;

 private:
  int descriptor_ = -1;
  bool ended_ = false;
};

}  // namespace hvd
