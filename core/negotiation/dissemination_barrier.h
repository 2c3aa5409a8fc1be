#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/arrival_flags.h"
#include "negotiation/messages.h"

namespace hvd::control {

/// A dissemination barrier between hosts, one per position of a replayed schedule. Run by the first
/// rank of each host.
///
/// To a ScheduleReplay all other hosts together look like one more rank, the remote one. This class
/// writes its flags: it has arrived ready when all ranks of all hosts have, and leaving as soon as
/// it is known that one leaves. So what ScheduleReplay relies on holds for it too: a flag says the
/// same to everybody who looks, and is written once per position.
///
/// Hosts exchange what they know in ceil(log2(hosts)) rounds: in round r a host tells the one that
/// is 2^r further on, and goes on to the next round when it has heard from the one 2^r before it;
/// then it has heard, through others, from all. (The dissemination barrier: D. Hensgen, R. Finkel,
/// U. Manber, "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17(1),
/// 1988.) A host begins when all its ranks have arrived ready. When it knows that somebody leaves
/// it waits for nothing and tells so in all rounds that are left.
///
/// Not thread-safe: the thread that drives the engine.
class DisseminationBarrier {
 public:
  struct Send {
    int host = 0;
    wire::ReplayUpdate news = {};
  };

  /// @param local the flags of this host's ranks  @param remote of this host, written here only
  DisseminationBarrier(std::vector<ArrivalFlags*> local, ArrivalFlags& remote, int host, int hosts);

  /// What is to be sent since flags or news have changed. @return whether the remote flags have
  /// changed: this host's ranks are to be rung
  bool advance(std::vector<Send>& to_send);
  /// @return as advance(), which is to be called next  @throws hvd::Error for news that no host can
  /// have
  bool accept(const wire::ReplayUpdate&);

 private:
  enum class Local { kAbsent, kReady, kLeaving };
  struct Inbox {
    std::uint64_t heard = 0;  ///< bit r: of round r
    bool leaves = false;
  };
  Local local() const noexcept;
  Inbox& inbox(std::uint64_t position) noexcept { return inboxes_[position % 2]; }
  void pass_on_wish(std::vector<Send>& to_send);
  void tell(bool leaves, std::vector<Send>& to_send);

  const std::vector<ArrivalFlags*> local_;
  ArrivalFlags& remote_;
  const int host_;
  const int hosts_;
  const int rounds_;
  std::uint64_t position_ = 1;  ///< that is being exchanged
  int told_ = 0;                ///< rounds in which this host has told the next
  std::uint64_t wished_ =
      0;  ///< the last position at which hosts have been asked to leave, by ranks of this one
  /// Of this position and the next, by parity: a host may be one ahead.
  std::array<Inbox, 2> inboxes_;
};

}  // namespace hvd::control
