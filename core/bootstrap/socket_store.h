#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "bootstrap/messages.h"
#include "bootstrap/store.h"

namespace hvd::rendezvous {

// The functions also throw UsageError when the server has another job's name or token, and the
// refusal when it refuses this process. Later calls of the store throw PeerLostError(0) (rank 0) or
// Error (hvdrun) once the connection is broken. A call may end up to 2 s after its deadline if the
// server does not reply, a wait up to 10 s.

/// Opens a store that rank 0 serves at a TCP port for as long as its object exists. The other ranks
/// retry until they reach it.
/// @param host a name, an address, or an address of IPv6 in brackets
/// @throws UsageError when rank 0 cannot serve the port; PeerLostError(0) when it is not reached in
/// time
std::unique_ptr<Store> open_tcp_store(const std::string& host, std::uint16_t port, const RankInfo&,
                                      Deadline);

/// Ends the use of a store from another thread: its calls throw soon. Thread-safe.
class Interruption {
 public:
  Interruption() = default;
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;
  ~Interruption();
  void interrupt() noexcept;
  bool interrupted() const;
  /// Makes the interruption end this connection too.
  void watch(int descriptor);

 private:
  mutable Mutex mutex_;
  bool interrupted_ HVD_GUARDED_BY(mutex_) = false;
  int descriptor_ HVD_GUARDED_BY(mutex_) = -1;  ///< a duplicate
};

/// Opens a store that a process already serves with a SocketServer.
/// @param hosts addresses of one host, to be tried in turn
/// @pre there is an address
/// @throws UsageError when the server refuses this process; PeerLostError(0) when it is not reached
/// in time
std::unique_ptr<Store> open_served_store(const std::vector<std::string>& hosts, std::uint16_t port,
                                         const RankInfo&, Deadline,
                                         const std::shared_ptr<Interruption>&);

/// Opens the store that hvdrun serves through its agent on this host.
/// @param socket the agent's, in the abstract namespace
/// @throws UsageError when no agent listens there
std::unique_ptr<Store> open_hvdrun_store(const std::string& socket, const RankInfo&, Deadline);

}  // namespace hvd::rendezvous
