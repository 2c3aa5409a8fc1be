#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "transport/control_plane.h"

namespace hvd::testing {

struct NetworkOptions {
  int size = 1;
  /// Each message arrives after a random delay of at most this; messages between a pair of ranks
  /// stay in order.
  Duration longest_delay{};
  std::uint64_t seed = 0;
  std::vector<std::string> host_per_rank = {};  ///< default: all on "localhost"
  /// What ControlPlane::shared_memory_prefix() of each rank returns; default: no shared memory.
  std::vector<std::string> shared_memory_prefixes = {};
  bool rings_across_hosts = true;  ///< false: as over a real network, a message from another host
                                   ///< does not wake the receiver
};

/// Control messages between the ranks of one process, which are threads or stepped by one thread,
/// with seeded delays and injected deaths. Thread-safe. The planes that it makes share it, and may
/// outlive the variable that made it.
class LocalNetwork : public std::enable_shared_from_this<LocalNetwork> {
 public:
  static std::shared_ptr<LocalNetwork> create(NetworkOptions options, const Clock& clock);
  ~LocalNetwork();

  /// The rank's end. Call it once per rank.
  std::unique_ptr<control::ControlPlane> plane(int rank);

  /// Simulates that the rank's process is killed: its messages in flight are lost, and
  /// check_peers() reports the loss to its peers.
  void kill(int rank);
  /// Overwrites one byte of the next message to `rank`.
  void corrupt_next_message_to(int rank);
  /// Lets the next call that sends a message to `rank` throw hvd::Error.
  void refuse_next_message_to(int rank);

 private:
  friend class LocalControlPlane;
  struct Envelope {
    control::Message message;
    TimePoint arrives{};
  };
  struct Mailbox {
    Mutex mutex;
    std::deque<Envelope> queue HVD_GUARDED_BY(mutex);
    std::vector<TimePoint> last_from HVD_GUARDED_BY(mutex);  // per sender
    std::mt19937_64 random HVD_GUARDED_BY(mutex);
    bool corrupt_next HVD_GUARDED_BY(mutex) = false;
    bool refuse_next HVD_GUARDED_BY(mutex) = false;
    std::atomic<bool> dead{false};
    std::atomic<bool> left{false};
    std::atomic<TimePoint::rep> heartbeat{0};  // 0: no heartbeat yet
    Doorbell doorbell;
    std::array<ArrivalFlags, kArrivalFlags> arrival_flags{};
    ArrivalFlags remote{};  // of the host, if this is its first rank
  };

  LocalNetwork(NetworkOptions options, const Clock& clock);
  void deliver(int from, int to, std::span<const std::byte> bytes);

  const NetworkOptions options_;
  const Clock& clock_;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;
};

}  // namespace hvd::testing
