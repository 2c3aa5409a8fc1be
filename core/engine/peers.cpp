#include "engine/peers.h"
#include "base/text.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace hvd::runtime {

namespace {

constexpr Duration kPeerCheckInterval = std::chrono::milliseconds(50);
/// Time allowed from the end of a rank's process until its last messages have been received.
constexpr Duration kTimeToArrive = std::chrono::seconds(1);
/// Time allowed from a rank's farewell until its last messages have been sent.
constexpr Duration kTimeToSend = std::chrono::seconds(15);

// Ranks of other hosts share no memory with this one, so they are pinged: the coordinator pings
// all, the others ping the coordinator.
std::vector<int> ranks_to_ping(const control::ControlPlane& control) {
  if (control.rung_by_all()) return {};
  if (control.rank() != 0) return {0};
  std::vector<int> others(static_cast<std::size_t>(control.size()) - 1);
  std::iota(others.begin(), others.end(), 1);
  return others;
}

}  // namespace

PeerWatch::PeerWatch(const RuntimeOptions& options, control::ControlPlane& control,
                     observe::Counters& counters, const StepTime& time)
    : options_(options),
      control_(control),
      sender_(control, counters),
      time_(time),
      liveness_(ranks_to_ping(control), options.peer_timeout) {
  control_.heartbeat(time_.step());
}

bool PeerWatch::due(bool waiting) noexcept {
  const TimePoint now = time_.step();
  const Duration interval =
      waiting ? std::min(kPeerCheckInterval, options_.peer_timeout / 8) : options_.peer_timeout / 4;
  next_ = std::min(next_, now + interval);  // the rank may have been idle
  const std::uint32_t endings = control_.endings();
  if (now < next_ && endings == endings_) return false;
  endings_ = endings;
  next_ = now + interval;
  return true;
}

std::optional<control::PeerLoss> PeerWatch::check(bool waiting) {
  const TimePoint now = time_.step();
  control_.heartbeat(now);
  if (waiting) {
    if (auto loss = control_.check_peers(time_.awake(now), options_.peer_timeout)) return loss;
  }
  const auto actions = liveness_.check(time_.awake(now), waiting);
  for (const int rank : actions.ping) sender_.send(rank, wire::encode(wire::Ping{}));
  if (!actions.lost) return std::nullopt;
  const auto silence = std::chrono::duration_cast<std::chrono::milliseconds>(options_.peer_timeout);
  return control::PeerLoss{*actions.lost, text("it has not answered for ", silence.count(), " ms"),
                           false};
}

std::vector<int> PeerWatch::departed() {
  const TimePoint now = time_.awake(time_.step());
  std::vector<int> ranks;
  for (const auto& [rank, ended] : control_.departures()) {
    Departed& seen = departed_.try_emplace(rank, Departed{.farewell = now}).first->second;
    if (ended && !seen.end) seen.end = now;
    if (now - seen.farewell >= kTimeToSend || (seen.end && now - *seen.end >= kTimeToArrive))
      ranks.push_back(rank);
  }
  return ranks;
}

bool BlockedNotice::due(TimePoint now) noexcept {
  if (!waits_ || interval_ == Duration::zero()) {
    reported_at_.reset();
    return false;
  }
  if (!reported_at_) reported_at_ = now;
  if (now - *reported_at_ < interval_) return false;
  reported_at_ = now;
  return true;
}

}  // namespace hvd::runtime
