#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/cache_line.h"
#include "base/clock.h"
#include "base/doorbell.h"
#include "base/topology.h"
#include "hvd/error.h"

namespace hvd {

/// The transport has lost its connection to a rank, mostly because the rank's process or host has
/// ended. Other ranks may know the cause. The engine converts it to a PeerLostError.
class BrokenConnection : public Error {
 public:
  BrokenConnection(const std::string& message, int rank) : Error(message), rank_(rank) {}
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

}  // namespace hvd

namespace hvd::host {
class Node;
}

namespace hvd::control {

struct Message {
  int source = 0;
  std::vector<std::byte> bytes = {};
};

struct PeerLoss {
  int rank = 0;
  std::string cause = {};  ///< "process 4711 ended", "no sign of life for 3.0 s"
  bool known = false;  ///< another rank noticed it first, and `cause` is the whole of what it says
};

/// Carries control messages between ranks, and wakes engines. A rank sends none to itself.
///
/// Used by the thread that drives the engine, except ring() and doorbell().ring(), which any thread
/// may call. Nothing blocks. Messages between a pair of ranks arrive in order, whole and once.
/// Errors of the transport are thrown as hvd::Error.
class ControlPlane : public Peers {
 public:
  virtual const Topology& topology() const noexcept = 0;

  /// Sends to one other rank. @throws hvd::Error when there is no such other rank
  virtual void send(int rank, std::span<const std::byte> message) = 0;
  /// Sends to each of these other ranks, even if one of them cannot be reached.
  virtual void send(std::span<const int> ranks, std::span<const std::byte> message) = 0;
  /// The next message that has arrived, if any.
  virtual std::optional<Message> poll() = 0;
  /// To be asked when poll() finds nothing: see message::Carrier::check_connections().
  /// @throws BrokenConnection
  virtual void check_connections() {}

  /// Once, when the job begins: this rank will exchange messages with these, who say the same of
  /// it. Waits, for a bounded time, until they are connected, so that the first negotiation need
  /// not.
  virtual void expect_messages(std::span<const int> /*ranks*/) {}

  /// A transfer is in flight that advances only in poll(): do not sleep for long.
  virtual bool busy() const noexcept = 0;
  /// Every message to this rank rings its doorbell. When false the engine has to poll (other hosts
  /// cannot ring).
  virtual bool rung_by_all() const noexcept = 0;
  /// A message may be on its way of which nobody will ring any more: poll() finds it in the end.
  virtual bool needs_polling() const noexcept { return !rung_by_all(); }
  /// A message to a rank whose process may have ended does no harm.
  virtual bool may_send_to_lost() const noexcept { return true; }
  /// poll() would certainly find nothing, so the steady state makes no call to the transport.
  virtual bool quiet() const noexcept = 0;
  /// This rank's doorbell.
  virtual Doorbell& doorbell() noexcept = 0;

  /// A rank's flags for schedule replay, in memory shared by the ranks of its host. Null for
  /// ranks of other hosts, and for all when there is a host whose ranks share none.
  virtual ArrivalFlags* arrival_flags(int rank) noexcept = 0;
  /// The flags of this host for all other hosts together, written by its first rank. Null when
  /// there are none.
  virtual ArrivalFlags* remote_arrival_flags() noexcept = 0;

  /// Publishes this rank's heartbeat to the ranks of its host.
  virtual void heartbeat(TimePoint now) noexcept = 0;
  /// A rank of this host whose process has ended, or that has not beaten for `timeout`. Ranks that
  /// said farewell are not lost.
  virtual std::optional<PeerLoss> check_peers(TimePoint now, Duration timeout) = 0;
  /// How many processes of this host have been seen to end, by whichever rank: when it changes,
  /// this one has been rung, and check_peers() has something to say.
  virtual std::uint32_t endings() const noexcept { return 0; }
  /// A rank of this host that has said farewell: it sends nothing new.
  struct Departure {
    int rank = 0;
    bool ended = false;  ///< its process, so that all it has ever sent is on this host, or lost
  };
  virtual std::vector<Departure> departures() { return {}; }
  /// The transport has failed: the death of a rank of this host that may be the reason, which may
  /// show a little later. Waits for that, up to `patience`; the job is at its end.
  virtual std::optional<PeerLoss> find_loss_behind_error(Duration /*patience*/) {
    return std::nullopt;
  }
  /// This rank fails because it has lost `rank`: the ranks on this host learn that from
  /// check_peers(), rather than take the end of this process for the loss, with what it says of it.
  virtual void accuse(int rank, std::string_view cause) noexcept = 0;
  /// This rank exits in an orderly way: its silence from now on is no loss.
  virtual void farewell() noexcept = 0;
};

/// The control plane of a job that has one rank, which has no rank to send messages to.
std::unique_ptr<ControlPlane> make_self_control_plane();

}  // namespace hvd::control

namespace hvd::message {

class Carrier;

/// A control plane over a carrier, between the ranks of `node`'s job. Signals within a host use the
/// node's shared memory instead of messages. Threading: see control::ControlPlane. A message has at
/// most 256 MiB.
/// @param time_to_connect for how long the start of a job waits for connections, which take some
/// ms. Later connections are established when they are first used. Zero if one thread drives all
/// ranks.
std::unique_ptr<control::ControlPlane> make_control_plane(
    std::shared_ptr<Carrier>, std::shared_ptr<host::Node> node,
    Duration time_to_connect = std::chrono::milliseconds(500));

}  // namespace hvd::message
