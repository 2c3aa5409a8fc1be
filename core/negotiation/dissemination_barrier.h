#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/cache_line.h"
#include "negotiation/messages.h"

namespace hvd::control {

/// A dissemination barrier between hosts, one per position of a replayed schedule. Run by the first
/// rank of each host.
///
/// A ScheduleReplay treats all other hosts together as one more rank, the remote rank. This class
/// writes the flags of the remote rank, which arrives as ready when all ranks of all hosts have
/// arrived ready, and as leaving as soon as this host receives the information that a rank leaves.
/// As ScheduleReplay requires, a flag is written once per position, so that every reader finds the
/// same value.
///
/// Hosts exchange updates in ceil(log2(hosts)) rounds. In round r, host h sends an update to host h
/// + 2^r (modulo the number of hosts). It starts the next round when it has received the update of
/// host h - 2^r. After the last round it has received the updates of all hosts, directly or
/// indirectly. (The dissemination barrier: D. Hensgen, R. Finkel, U. Manber, "Two algorithms for
/// barrier synchronization", Int. J. Parallel Programming 17(1), 1988.) A host begins when all its
/// ranks have arrived ready. A host that is informed of a leaving rank sends the messages of all
/// its remaining rounds at once.
///
/// Not thread-safe: only the thread that drives the engine calls it.
class DisseminationBarrier {
 public:
  /// Updates to send, each with the number of the host.
  using HostUpdates = std::vector<std::pair<int, wire::ReplayUpdate>>;

  /// @param local the flags of this host's ranks
  /// @param remote the flags of the remote rank of this host, written only here
  DisseminationBarrier(std::vector<ArrivalFlags*> local, ArrivalFlags& remote, int host, int hosts);

  /// Called after flags or received updates have changed. @param to_send appended to
  /// @return whether the remote flags have changed, in which case this host's ranks must be woken
  bool advance(HostUpdates& to_send);
  /// Takes an update of another host. advance() must be called next. @return like advance()
  /// @throws hvd::Error for an update that no correct host can have sent
  bool accept(const wire::ReplayUpdate&);

 private:
  enum class Local { kAbsent, kReady, kLeaving };
  struct Inbox {
    std::uint64_t received = 0;  ///< bit r: of round r
    bool leaves = false;
  };
  Local local() const noexcept;
  Inbox& inbox(std::uint64_t position) noexcept { return inboxes_[position % 2]; }
  void forward_leave_request(HostUpdates& to_send);
  void send_round(bool leaves, HostUpdates& to_send);

  const std::vector<ArrivalFlags*> local_;
  ArrivalFlags& remote_;
  const int host_;
  const int hosts_;
  const int rounds_;
  std::uint64_t position_ = 1;  ///< the position that is being exchanged
  int sent_ = 0;                ///< rounds in which this host has sent
  /// The last position at which a rank of this host has requested that the other hosts leave.
  std::uint64_t leave_requested_ = 0;
  /// For this position and the next, by parity, because another host may be one position ahead.
  std::array<Inbox, 2> inboxes_;
};

}  // namespace hvd::control
