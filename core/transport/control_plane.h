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
#include "base/message_box.h"
#include "base/topology.h"
#include "hvd/error.h"

namespace hvd {

/// The transport has lost its connection to a rank, mostly because the rank's process or host has
/// ended. Other ranks may report the cause. The engine converts it to a PeerLostError.
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
  bool known = false;      ///< another rank reported the loss, and `cause` is its whole text
};

/// Carries control messages between ranks, and wakes engines. A rank sends no message to itself.
///
/// Only the thread that drives the engine calls it, except ring() and doorbell().ring(), which any
/// thread may call. No call blocks. Messages between a pair of ranks arrive in order, whole and
/// once. Errors of the transport are thrown as hvd::Error.
class ControlPlane : public Peers {
 public:
  virtual const Topology& topology() const noexcept = 0;

  /// Sends to one other rank. @throws hvd::Error when there is no such other rank
  virtual void send(int rank, std::span<const std::byte> message) = 0;
  /// Sends to each of these other ranks, even if one of them cannot be reached.
  virtual void send(std::span<const int> ranks, std::span<const std::byte> message) = 0;
  /// Like send(), but the receiver is woken only while it awaits such messages. Otherwise it gets
  /// the message when it polls for another reason.
  virtual void send_lazily(int rank, std::span<const std::byte> message) { send(rank, message); }
  /// Sets whether this rank awaits lazy messages from now on; initially it does not. Call poll()
  /// after await_lazy_messages(true) and before a sleep.
  virtual void await_lazy_messages(bool /*awaits*/) noexcept {}
  /// Whether that rank awaits lazy messages now. False for ranks of other hosts.
  virtual bool awaits_lazy_messages(int /*rank*/) noexcept { return false; }
  /// The boxes of this rank and another rank of its host. Empty if it has no boxes.
  virtual std::optional<MessageBoxes> message_boxes(int /*rank*/) noexcept { return std::nullopt; }
  /// Whether a rank of this host has sent a message that poll() has not returned yet, as far as one
  /// read of memory shows.
  virtual bool has_local_message() noexcept { return false; }
  /// Returns the next message that has arrived, if any.
  virtual std::optional<Message> poll() = 0;
  /// Call it when poll() returns no message: see message::Carrier::check_connections().
  /// @throws BrokenConnection
  virtual void check_connections() {}

  /// Called once when the job begins: this rank will exchange messages with `ranks`, and they call
  /// it for this rank. Waits for a bounded time until they are connected, so that the first
  /// negotiation is not delayed.
  virtual void expect_messages(std::span<const int> /*ranks*/) {}

  /// Whether a transfer is under way that advances only in poll(): do not sleep for long.
  virtual bool busy() const noexcept = 0;
  /// Whether every message to this rank rings its doorbell. If not, the engine has to poll, because
  /// other hosts cannot ring.
  virtual bool rung_by_all() const noexcept = 0;
  /// Whether a message may be under way for which no doorbell rings any more: poll() returns it
  /// later.
  virtual bool needs_polling() const noexcept { return !rung_by_all(); }
  /// Whether a message to a rank whose process may have ended is harmless.
  virtual bool may_send_to_lost() const noexcept { return true; }
  /// Whether poll() would certainly return no message. The steady state then makes no call to the
  /// transport.
  virtual bool quiet() const noexcept = 0;
  /// Prefix of the names of memory that this rank can share with `rank`; empty if it can share
  /// none.
  virtual std::string shared_memory_prefix(int /*rank*/) const { return {}; }
  /// This rank's doorbell.
  virtual Doorbell& doorbell() noexcept = 0;

  /// One of a rank's flags for schedule replay, in memory shared by the ranks of its host. Null for
  /// ranks of other hosts, and for all ranks when the ranks of some host do not share flags.
  /// @param flag below kArrivalFlags
  virtual ArrivalFlags* arrival_flags(int rank, int flag) noexcept = 0;
  /// The flags that represent all other hosts together, written by the first rank of this host.
  /// Null when there are no such flags.
  virtual ArrivalFlags* remote_arrival_flags() noexcept = 0;

  /// Publishes this rank's heartbeat to the ranks of its host.
  virtual void heartbeat(TimePoint now) noexcept = 0;
  /// Returns a rank of this host whose process has ended, or that has sent no heartbeat for
  /// `timeout`. Ranks that sent a farewell are not lost.
  virtual std::optional<PeerLoss> check_peers(TimePoint now, Duration timeout) = 0;
  /// Number of processes whose end any rank of this host has detected. A change rings this rank,
  /// and check_peers() then returns a loss.
  virtual std::uint32_t endings() const noexcept { return 0; }
  /// A rank of this host that has sent a farewell and sends no further messages.
  struct Departure {
    int rank = 0;
    bool ended = false;  ///< its process has ended: its messages have arrived or are lost
  };
  virtual std::vector<Departure> departures() { return {}; }
  /// After an error of the transport, returns the loss of a rank of this host that may be its
  /// cause. Waits for up to `timeout`, because the loss may become detectable only later. The job
  /// ends in any case.
  virtual std::optional<PeerLoss> find_loss_behind_error(Duration /*timeout*/) {
    return std::nullopt;
  }
  /// Reports that this rank fails because it has lost `rank`. The ranks of this host get the report
  /// and its text from check_peers(), and do not report the end of this process as the first loss.
  virtual void report_loss(int rank, std::string_view cause) noexcept = 0;
  /// Records that the other ranks are informed of the failure in another way, so that the
  /// destructor does not wait until messages have reached them.
  virtual void give_up_messages() noexcept {}
  /// Records that this rank leaves in order, so that its silence from now on is no loss.
  virtual void farewell() noexcept = 0;
};

/// Makes the control plane of a job with one rank. It carries no messages.
std::unique_ptr<ControlPlane> make_self_control_plane();

}  // namespace hvd::control

namespace hvd::message {

class Carrier;

struct ControlPlaneOptions {
  /// For how long the start of a job waits for connections, which take some ms. Later connections
  /// are established when they are first used. Zero if one thread drives all ranks.
  Duration time_to_connect = std::chrono::milliseconds(500);
  /// Whether small messages between the ranks of a host use their shared memory. The same on all
  /// ranks. False in tests of the carrier.
  bool use_mail_rings = true;
};

/// A control plane over a carrier, between the ranks of `node`'s job. Within a host, signals and
/// small messages use the node's shared memory instead. Threading: see control::ControlPlane. A
/// message has at most 256 MiB.
std::unique_ptr<control::ControlPlane> make_control_plane(std::shared_ptr<Carrier>,
                                                          std::shared_ptr<host::Node> node,
                                                          const ControlPlaneOptions& = {});

}  // namespace hvd::message
