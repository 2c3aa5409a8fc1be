#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"

namespace hvd::control {

/// Finds peers on other hosts that have gone silent, by asking: a peer that somebody waits for and
/// that has not been heard for timeout/4 is pinged, again and again; one that stays silent for
/// `timeout` is lost. Silence counts from when it was last heard; of one that was quiet before
/// anybody waited, from the first ping. While nobody waits, nothing is sent and silence means
/// nothing. Pure; not thread-safe.
class Liveness {
 public:
  /// @param watched ascending
  Liveness(std::vector<int> watched, Duration timeout);

  void heard(int rank, TimePoint now) { heard(RankSet(rank), now); }
  void heard(RankSpan ranks, TimePoint now);

  struct Actions {
    std::vector<int> ping = {};
    std::optional<int> lost = {};
  };
  /// @param waiting whether anything depends on the peers now.
  Actions check(TimePoint now, bool waiting);
  /// When check() may have something to do next, given that somebody waits.
  Duration interval() const noexcept { return timeout_ / 4; }

 private:
  struct Peer {
    int rank = 0;
    TimePoint last_heard{};
    TimePoint last_ping{};
    std::optional<TimePoint> silent_since = {};  ///< while somebody waits
  };
  Duration timeout_;
  std::vector<Peer> peers_;
};

}  // namespace hvd::control
