#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/lock_words.h"
#include "wire/messages.h"

namespace hvd::control {

/// Carries the arrivals of the schedule lock between hosts. Used by the first rank of each host.
///
/// To a ScheduleLock all other hosts together look like one more rank, the outside, whose words
/// this class writes: it has arrived ready when all ranks of all hosts have, and leaving as soon as
/// it is known that one leaves. So what ScheduleLock relies on holds for it too: a word says the
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
class LockRelay {
 public:
  struct Send {
    int host = 0;
    wire::LockNews news = {};
  };

  /// @param local the words of this host's ranks  @param outside of this host, written here only
  LockRelay(std::vector<LockWords*> local, LockWords& outside, int host, int hosts);

  /// What is to be sent since words or news have changed. @return whether the outside's words have
  /// changed: this host's ranks are to be rung
  bool advance(std::vector<Send>& to_send);
  /// @return as advance(), which is to be called next  @throws hvd::Error for news that no host can
  /// have
  bool accept(const wire::LockNews&);

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

  const std::vector<LockWords*> local_;
  LockWords& outside_;
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
