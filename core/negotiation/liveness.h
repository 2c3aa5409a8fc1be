#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"

namespace hvd::control {

/// Finds peers on other hosts that have gone silent. While this rank waits, a peer that has sent no
/// message for timeout/4 is pinged every timeout/4, and a peer that stays silent for `timeout` is
/// lost. The silence begins at the peer's last message, or at the first ping if the peer was silent
/// before this rank began to wait. While this rank does not wait, no pings are sent and silence
/// does not count. Pure; not thread-safe.
class Liveness {
 public:
  /// @param watched ascending
  Liveness(std::vector<int> watched, Duration timeout);

  void record_message(int rank, TimePoint now) { record_message(RankSet(rank), now); }
  void record_message(RankSpan ranks, TimePoint now);

  struct Actions {
    std::vector<int> ping = {};
    std::optional<int> lost = {};
  };
  /// @param waiting whether this rank depends on the peers now
  Actions check(TimePoint now, bool waiting);
  /// How often check() must be called while this rank waits.
  Duration interval() const noexcept { return timeout_ / 4; }

 private:
  struct Peer {
    int rank = 0;
    TimePoint last_message{};
    TimePoint last_ping{};
    std::optional<TimePoint> silent_since = {};  ///< while this rank waits
  };
  Duration timeout_;
  std::vector<Peer> peers_;
};

}  // namespace hvd::control
