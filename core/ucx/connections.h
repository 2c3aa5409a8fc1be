#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "message/carrier.h"
#include "ucx/ucx_carrier.h"
#include "ucx/worker.h"

namespace hvd::ucx {

/// What has messages under way, and has to forget them when there is no worker any more.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Frees what is under way: nothing lets the worker work any more.
  virtual void forget() noexcept = 0;
};

/// A worker and its endpoints: one for each plane and peer, as the end of collectives closes
/// endpoints that control messages still need.
///
/// Not thread-safe: the thread that drives the engine.
class Connections {
 public:
  Connections(std::unique_ptr<Worker>, Membership);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;
  ~Connections() { abandon(); }

  int rank() const noexcept { return members_.rank; }
  std::uint32_t generation() const noexcept { return members_.generation; }

  /// The worker has ended, and with it all messages.
  bool ended() const noexcept { return worker_ == nullptr; }
  /// @throws hvd::Error when it has ended
  Worker& worker();

  /// Connects, if there is neither a connection nor a failure. What may come of it is an error at
  /// connecting, no failure: the next call tries again. @throws hvd::Error when the worker has
  /// ended
  Status connect(message::Plane, int peer);
  /// @throws hvd::Error, which names the peer, when there is no connection and none can be made
  Endpoint endpoint(message::Plane, int peer);
  /// The error by which the connection broke. kOk also where there is none.
  Status failure(message::Plane plane, int peer) const noexcept {
    return link(plane, peer).failure;
  }
  /// "ucx: sending to rank 3 failed: Connection reset by remote peer"
  [[noreturn]] void raise(const char* what, int peer, Status);

  /// What is under way on the connection ends soon. The next message makes a new one.
  void close_by_force(message::Plane, int peer) noexcept;
  // Either way messages are impossible from then on, and no memory is touched. Once only: further
  // calls do nothing.
  /// Closes all connections when what was sent has left, and ends the worker. Waits for that, for a
  /// bounded time.
  void leave() noexcept;
  /// Closes all connections by force. See Note [A worker that is not ended].
  void abandon() noexcept;

  void add(Pending& table) { tables_.push_back(&table); }
  void remove(Pending& table) noexcept;

 private:
  struct Link {
    Endpoint endpoint = {};
    Status failure = kOk;  ///< written by the worker: stays where it is
  };
  Link& link(message::Plane plane, int peer) noexcept {
    return links_[static_cast<std::size_t>(plane)][static_cast<std::size_t>(peer)];
  }
  const Link& link(message::Plane plane, int peer) const noexcept {
    return links_[static_cast<std::size_t>(plane)][static_cast<std::size_t>(peer)];
  }
  void close(Link&, CloseMode) noexcept;
  bool close_all(CloseMode, std::chrono::milliseconds limit) noexcept;
  void forget_all() noexcept;

  const Membership members_;
  std::vector<Link> links_[2];  ///< by plane and rank; before the worker, which writes to them
  std::unique_ptr<Worker> worker_;
  std::vector<void*> closing_;  ///< requests
  std::vector<Pending*> tables_;
};

}  // namespace hvd::ucx
