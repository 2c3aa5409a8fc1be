#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/carrier.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::ucx {

constexpr Side in_of(message::Plane plane) noexcept {
  return plane == message::Plane::kControl ? Side::kControlIn : Side::kDataIn;
}
constexpr Side out_of(message::Plane plane) noexcept {
  return plane == message::Plane::kControl ? Side::kControlOut : Side::kDataOut;
}

/// The first message that each side sends on a connection. The rank that connected sends another
/// one, with `leaves` set, when it leaves in order.
struct Hello {
  std::int32_t rank = -1;
  std::int32_t leaves = 0;
  char proof[64] = {};  ///< proves that the sender has the job's key: Note [Proofs of Hellos]
};
/// The Hello of rank `from` of these members to a worker of rank `to`.
Hello make_hello(const JobMembers& members, int from, int to, Side to_side, bool leaves);

/// Owns messages under way, and drops them when their worker stops.
class MessageOwner {
 public:
  virtual ~MessageOwner() = default;
  /// Frees the requests under way on a side whose worker makes no more progress. Their messages
  /// have failed.
  virtual void drop(Side) noexcept = 0;
};

/// One message to be sent. Its address must not change until it is over or dropped.
struct Outgoing {
  enum class Stage : std::uint8_t {
    kWaiting,  ///< for the connection
    kSending,  ///< until UCX reports it complete
    kOver
  };
  std::span<const std::byte> bytes = {};
  message::Tag tag = 0;
  Stage stage = Stage::kOver;
  void* request = nullptr;  ///< null if UCX has no request for it
  Status status = kOk;      ///< once it is over
};

/// The workers of a rank, and their connections to other ranks: Note [Connections go one way].
///
/// Not thread-safe: only the thread that drives the engine calls it.
class Connections : public std::enable_shared_from_this<Connections> {
 public:
  Connections(Workers, JobMembers);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;
  ~Connections() { stop(); }

  int rank() const noexcept { return members_.rank; }
  std::uint32_t generation() const noexcept { return members_.generation; }

  /// Whether the worker has ended, and all its messages with it.
  bool ended(Side side) const noexcept { return at(side).worker == nullptr; }
  /// @throws hvd::Error when the worker has ended
  Worker& worker(Side);

  /// Sends the message once the connection is complete, and begins to connect if necessary. An
  /// error ends the message and is stored in it.
  /// @throws hvd::Error when the worker has ended
  void send(message::Plane, int peer, Outgoing&);
  /// Connects before the first message. The peer calls it for this rank at about the same time, so
  /// that both connections are made.
  void connect_ahead(message::Plane, int peer);
  /// Whether a connection begun by connect_ahead() is neither complete nor broken, or a Hello that
  /// a peer needs to complete its connection has not been sent.
  bool connecting() const noexcept;
  /// Updates a message that is not over.
  void advance(message::Plane, int peer, Outgoing&);
  /// Ends a message in any stage, and drops all references to it.
  void drop(message::Plane, int peer, Outgoing&) noexcept;

  /// The error that broke the connection on which this rank receives from the peer; kOk if it is
  /// intact or was never made.
  Status failure_of_receives(message::Plane plane, int peer) const noexcept {
    return links_of(plane)[index(peer)].in.failure;
  }
  /// @throws BrokenConnection if a connection of the control plane, in either direction, has broken
  /// without a farewell of the peer, and `concerns` returns true for the peer
  /// @throws hvd::Error if this process lacks descriptors for connections
  void require_all_connected(const std::function<bool(int)>& concerns);
  /// Throws BrokenConnection, as "ucx: sending to rank 3 failed: Connection reset by remote peer",
  /// or hvd::Error if this process lacks a resource, in which case the peer is not the cause.
  [[noreturn]] void raise(const char* what, int peer, Status) const;

  /// Makes progress on the plane's sending worker, and on its receiving worker if `receives`.
  /// Returns false if there was no work to do.
  bool progress(message::Plane, bool receives);
  /// Makes progress on one worker.
  bool run(Side);
  /// See Workers::only_workers_touch_memory.
  bool stopping_releases_memory() const noexcept { return stopping_releases_memory_; }

  // No message can be sent or received after leave() or stop(). Further calls have no effect.
  /// Sends the messages under way, closes all connections and destroys the workers. Waits for a
  /// bounded time.
  void leave() noexcept;
  /// Stops progress on a worker permanently: Note [A worker that is not ended].
  void stop(Side) noexcept;
  void stop() noexcept;

  void add(MessageOwner& owner) { owners_.push_back(&owner); }
  void remove(MessageOwner& owner) noexcept;

 private:
  struct OneWayConnection {
    Endpoint endpoint = {};
    Status failure = kOk;  ///< written by the worker, so its address must not change
  };
  /// The connections between this rank and another in one plane.
  struct Link {
    OneWayConnection in;    ///< from this rank's receiving worker to the peer's sending one
    OneWayConnection out;   ///< from this rank's sending worker to the peer's receiving one
    bool answered = false;  ///< `out` is complete
    bool left = false;      ///< the peer has sent a farewell, so a break of `in` is no loss
    std::vector<Outgoing*> waiting{};  ///< messages to send once `out` is complete, in order
  };
  static bool lost(const Link& link) noexcept {
    const bool unanswered = !link.answered && link.out.failure != kOk;
    return !link.left && (link.in.failure != kOk || unanswered);
  }
  struct WorkerState {
    std::unique_ptr<Worker> worker = {};
    std::vector<void*> closing = {};      ///< requests of endpoints that are being closed
    std::vector<void*> hello_sends = {};  ///< requests of Hellos that are being sent
    Hello hello = {};                     ///< received from another rank
    void* hello_receive = nullptr;        ///< request of the receive into `hello`
  };

  static std::size_t index(int peer) noexcept { return static_cast<std::size_t>(peer); }
  WorkerState& at(Side side) noexcept { return workers_[static_cast<std::size_t>(side)]; }
  const WorkerState& at(Side side) const noexcept {
    return workers_[static_cast<std::size_t>(side)];
  }
  std::vector<Link>& links_of(message::Plane plane) noexcept {
    return links_[static_cast<std::size_t>(plane)];
  }
  const std::vector<Link>& links_of(message::Plane plane) const noexcept {
    return links_[static_cast<std::size_t>(plane)];
  }
  message::Tag hello_tag() const noexcept;
  message::Tag primer_tag() const noexcept;

  void require_resources(Status error) const;
  void receive_hello(Side);
  void handle_hellos(Side);
  void free_sent_hellos(Side);
  bool proves_itself(const Hello&, Side own);
  void complete_connection(message::Plane, int peer);
  void accept_connection(message::Plane, int peer);
  void connect(Side own, Side of_peer, int peer, OneWayConnection&);
  void send_primers(const OneWayConnection&);
  void drop_primers();
  void send_farewells() noexcept;
  void start(message::Plane, Link&, Outgoing&);
  void end(message::Plane, Outgoing&, Status) noexcept;
  void close(Side, OneWayConnection&, CloseMode) noexcept;
  bool close_sends() noexcept;
  void close_receives() noexcept;
  std::vector<Endpoint> endpoints(Side) const;
  bool closed(Side) noexcept;
  bool all_closed() noexcept;
  void drop_side(Side) noexcept;

  const JobMembers members_;
  std::deque<Hello> sent_hellos_;  ///< a send may read its Hello until the worker ends
  bool stranger_logged_ = false;
  const std::vector<std::byte> primer_;  ///< as long as the longest primer; its contents are unused
  std::vector<std::byte> dropped_primer_;
  const bool stopping_releases_memory_;
  const std::string interface_;  ///< Workers::interface
  std::vector<Link> links_[2];   ///< by plane and rank; outlive the workers, which write to them
  WorkerState workers_[kSides];  ///< by Side
  std::vector<int> connected_;   ///< ranks with a connection in the control plane, either way
  int sending_[2] = {};          ///< messages that are not over, by plane
  unsigned idle_calls_[2] = {};  ///< calls of progress() while no message was being sent, by plane
  std::vector<MessageOwner*> owners_;
  std::vector<std::pair<message::Plane, int>> ahead_;  ///< arguments of connect_ahead()
};

}  // namespace hvd::ucx
