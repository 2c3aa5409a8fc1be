#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hvd {

/// Limits the time that exit(), and a return from main(), may take from now on. Meant for a process
/// whose exit handlers may never return, for example because a GPU hangs. After `limit` the process
/// ends with its exit code and a line on standard error that gives the reason. A later call
/// replaces the limit. Any thread may call it, exit handlers included.
void limit_exit(std::chrono::milliseconds limit, const std::string& why) noexcept;

/// Keeps memory that a transport may still touch until the process ends. Thread-safe.
///
/// Note [Memory after a failure]
/// When a failure cuts a collective off, the transport may still read its input and write its
/// output. MPI has no call that ends a message at once: a cancelled receive completes only with
/// MPI's progress, a send cannot be cancelled, and waiting for either may wait for a dead peer. The
/// same holds for NCCL's kernels. Therefore such memory (tensors, fusion buffers, receive buffers)
/// is kept here until the process ends, which is soon after the loss of a peer. The transport keeps
/// its request objects.
///
/// A worker of an elastic job outlives such failures. The worker takes and releases the kept
/// objects when the fence of the failed generation has passed. By then the survivors have left the
/// generation, and the lost processes do not run any more.
enum class Kept : std::uint8_t {
  kMemory,
  kTransport,  ///< may itself use kept memory, so transports are released first
};
void keep_until_exit(std::shared_ptr<const void> owner, Kept = Kept::kMemory);

/// Objects that were passed to keep_until_exit(). Move-only.
class KeptObjects {
 public:
  KeptObjects() = default;
  KeptObjects(KeptObjects&&) = default;
  KeptObjects& operator=(KeptObjects&& other) noexcept {
    release();
    memory_ = std::exchange(other.memory_, {});
    transports_ = std::exchange(other.transports_, {});
    return *this;
  }
  ~KeptObjects() { release(); }
  /// Ends transports, then frees memory.
  void release() noexcept;

 private:
  friend void keep_until_exit(std::shared_ptr<const void> owner, Kept);
  friend KeptObjects take_kept() noexcept;

  std::vector<std::shared_ptr<const void>> memory_;
  std::vector<std::shared_ptr<const void>> transports_;
};
/// Takes everything that is kept; any thread may release it at any time. Thread-safe. Only for
/// processes whose transports access memory only inside their calls, after all processes have left
/// the failed job.
KeptObjects take_kept() noexcept;

}  // namespace hvd
