#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/carrier.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"
#include "transport/ucx/workers.h"

namespace hvd::ucx {

constexpr Side in_of(message::Plane plane) noexcept {
  return plane == message::Plane::kControl ? Side::kControlIn : Side::kDataIn;
}
constexpr Side out_of(message::Plane plane) noexcept {
  return plane == message::Plane::kControl ? Side::kControlOut : Side::kDataOut;
}

/// What has messages under way, and has to forget them when there is no worker any more.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Frees the requests of what is under way on a side, which has failed: nothing lets its worker
  /// work any more.
  virtual void forget(Side) noexcept = 0;
};

/// One message that is sent. Stays where it is until it is over, or forgotten.
struct Outgoing {
  enum class Stage : std::uint8_t {
    kWaiting,  ///< for the connection
    kSending,  ///< until UCX calls it complete
    kOver
  };
  std::span<const std::byte> bytes = {};
  message::Tag tag = 0;
  Stage stage = Stage::kOver;
  void* request = nullptr;  ///< null where UCX has nothing under way
  Status status = kOk;      ///< of one that is over
};

/// The workers of a rank, and what connects them to those of others: Note [Connections go one way].
///
/// Not thread-safe: the thread that drives the engine.
class Connections {
 public:
  Connections(Workers, Membership);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;
  ~Connections() { silence(); }

  int rank() const noexcept { return members_.rank; }
  std::uint32_t generation() const noexcept { return members_.generation; }

  /// The worker has ended, and with it all its messages.
  bool ended(Side side) const noexcept { return at(side).worker == nullptr; }
  /// @throws hvd::Error when it has ended
  Worker& worker(Side);

  /// Sends, at once or when there is a connection; begins to connect. An error is in the message,
  /// which is over then. @throws hvd::Error when messages have ended
  void send(message::Plane, int peer, Outgoing&);
  /// Makes both connections of two ranks that do the same at about this time, before they need
  /// them.
  void connect_ahead(message::Plane, int peer);
  /// One of them is neither complete nor broken.
  bool connecting() const noexcept;
  /// Goes on with what is not over.
  void advance(message::Plane, int peer, Outgoing&);
  /// Whatever its stage: it is over, and nothing here remembers it.
  void forget(message::Plane, int peer, Outgoing&) noexcept;

  /// The error by which the connection broke, on which this rank receives from the peer. kOk also
  /// where there has been none.
  Status failure_of_receives(message::Plane plane, int peer) const noexcept {
    return links_of(plane)[index(peer)].in.failure;
  }
  /// @throws BrokenConnection if a rank that has connected to this one in the control plane, or
  /// that this one connects to, has ended without a farewell, and `concerns` says yes of it
  void require_all_there(const std::function<bool(int)>& concerns);
  /// "ucx: sending to rank 3 failed: Connection reset by remote peer"
  [[noreturn]] void raise(const char* what, int peer, Status) const;

  /// Lets the plane's workers work: that which receives if there is something to receive, and that
  /// which sends. False: there was nothing to do.
  bool progress(message::Plane, bool receives);
  /// Lets one of them work.
  bool run(Side);
  /// See Workers::touch_nothing_by_themselves.
  bool memory_is_ours_when_silent() const noexcept { return memory_is_ours_; }

  // In each case messages are impossible from then on. Once only: further calls do nothing.
  /// Closes all connections when what was sent has left, and ends the workers. Waits for that, for
  /// a bounded time.
  void leave() noexcept;
  /// Nothing lets the worker work any more: Note [A worker that is not ended].
  void silence(Side) noexcept;
  void silence() noexcept;

  void add(Pending& table) { tables_.push_back(&table); }
  void remove(Pending& table) noexcept;

 private:
  /// What two ranks say first to each other on a connection, and whoever has connected once more
  /// when it leaves in order.
  struct Hello {
    std::int32_t rank = -1;
    std::int32_t leaves = 0;
  };
  struct End {
    Endpoint endpoint = {};
    Status failure = kOk;  ///< written by the worker: stays where it is
  };
  /// Between this rank and another, in one plane.
  struct Link {
    End in;                 ///< of this rank's worker that receives, to the other's that sends
    End out;                ///< the other way round
    bool answered = false;  ///< `out` may be used
    bool left = false;      ///< the other one says so: that `in` breaks is no loss
    std::vector<Outgoing*> waiting{};  ///< for that, in order
  };
  static bool lost(const Link& link) noexcept {
    const bool unanswered = !link.answered && link.out.failure != kOk;
    return !link.left && (link.in.failure != kOk || unanswered);
  }
  struct Place {
    std::unique_ptr<Worker> worker = {};
    std::vector<void*> closing = {};  ///< requests
    Hello said = {};                  ///< by another rank
    void* listening = nullptr;        ///< the receive of it
  };

  static std::size_t index(int peer) noexcept { return static_cast<std::size_t>(peer); }
  Place& at(Side side) noexcept { return places_[static_cast<std::size_t>(side)]; }
  const Place& at(Side side) const noexcept { return places_[static_cast<std::size_t>(side)]; }
  std::vector<Link>& links_of(message::Plane plane) noexcept {
    return links_[static_cast<std::size_t>(plane)];
  }
  const std::vector<Link>& links_of(message::Plane plane) const noexcept {
    return links_[static_cast<std::size_t>(plane)];
  }
  message::Tag hello_tag() const noexcept;
  message::Tag primer_tag() const noexcept;

  void listen(Side);
  void hear(Side);
  void be_answered(message::Plane, int peer);
  void answer(message::Plane, int peer);
  void connect(Side own, Side of_peer, int peer, End&);
  void send_primers(const End&);
  void drop_primers();
  void say_farewell() noexcept;
  void start(message::Plane, Link&, Outgoing&);
  void end(message::Plane, Outgoing&, Status) noexcept;
  void close(Side, End&, CloseMode) noexcept;
  bool close_sends() noexcept;
  void close_receives() noexcept;
  bool closed(Side) noexcept;
  bool all_closed() noexcept;
  void forget_side(Side) noexcept;

  const Membership members_;
  const Hello hello_;     ///< lives as long as what is sent
  const Hello farewell_;  ///< too
  /// As long as the longest primer, of which nobody reads what it says.
  const std::vector<std::byte> primer_;
  std::vector<std::byte> dropped_primer_;
  const bool memory_is_ours_;
  std::vector<Link> links_[2];  ///< by plane and rank; before the workers, which write to them
  Place places_[kSides];        ///< by Side
  std::vector<int> known_;      ///< ranks with a connection in the control plane, either way
  int sending_[2] = {};         ///< messages that are not over, by plane
  unsigned looks_[2] = {};      ///< while there were none
  std::vector<Pending*> tables_;
  std::vector<std::pair<message::Plane, int>> ahead_;  ///< given to connect_ahead()
};

}  // namespace hvd::ucx
