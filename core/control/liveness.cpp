#include "control/liveness.h"

#include <algorithm>

namespace hvd::control {

Liveness::Liveness(std::vector<int> watched, Duration timeout) : timeout_(timeout) {
  for (const int rank : watched) peers_.push_back({.rank = rank});
}

void Liveness::heard(RankSpan ranks, TimePoint now) {
  if (peers_.empty()) return;
  for (const RankRange range : ranks) {
    auto peer = std::partition_point(peers_.begin(), peers_.end(), [&](const Peer& p) { return p.rank < range.first; });
    for (; peer != peers_.end() && peer->rank <= range.last; ++peer) {
      peer->last_heard = now;
      peer->unanswered_since.reset();
    }
  }
}

Liveness::Actions Liveness::check(TimePoint now, bool waiting) {
  Actions actions;
  for (Peer& peer : peers_) {
    if (!waiting) {
      peer.unanswered_since.reset();
      continue;
    }
    if (peer.unanswered_since && now - *peer.unanswered_since >= timeout_) {
      if (!actions.lost) actions.lost = peer.rank;
      continue;
    }
    const bool quiet = now - peer.last_heard >= interval();
    const bool asked_lately = peer.unanswered_since && now - peer.last_ping < interval();
    if (!quiet || asked_lately) continue;
    actions.ping.push_back(peer.rank);
    peer.last_ping = now;
    if (!peer.unanswered_since) peer.unanswered_since = now;
  }
  return actions;
}

}  // namespace hvd::control
