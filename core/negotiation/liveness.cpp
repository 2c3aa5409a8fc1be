#include "negotiation/liveness.h"

#include <algorithm>

namespace hvd::control {

Liveness::Liveness(std::vector<int> watched, Duration timeout) : timeout_(timeout) {
  for (const int rank : watched) peers_.push_back({.rank = rank});
}

void Liveness::record_message(RankSpan ranks, TimePoint now) {
  if (peers_.empty()) return;
  for (const RankRange range : ranks) {
    auto peer = std::partition_point(peers_.begin(), peers_.end(),
                                     [&](const Peer& p) { return p.rank < range.first; });
    for (; peer != peers_.end() && peer->rank <= range.last; ++peer) {
      peer->last_message = now;
      if (peer->silent_since) peer->silent_since = now;
    }
  }
}

Liveness::Actions Liveness::check(TimePoint now, bool waiting) {
  Actions actions;
  for (Peer& peer : peers_) {
    if (!waiting) {
      peer.silent_since.reset();
      continue;
    }
    const bool quiet = now - peer.last_message >= interval();
    const bool begins = !peer.silent_since;
    if (begins) peer.silent_since = quiet ? now : peer.last_message;
    if (now - *peer.silent_since >= timeout_) {
      if (!actions.lost) actions.lost = peer.rank;
      continue;
    }
    if (!quiet || (!begins && now - peer.last_ping < interval())) continue;
    actions.ping.push_back(peer.rank);
    peer.last_ping = now;
  }
  return actions;
}

}  // namespace hvd::control
