// What an engine does by the clock and about the other ranks: signs of life, stalls, losses,
// failure.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "control/validator.h"
#include "engine/engine.h"
#include "hvd/error.h"
#include "observe/supervisor_notice.h"

namespace hvd::runtime {
namespace {

constexpr Duration kPeerCheckInterval = std::chrono::milliseconds(50);

// Two ranks of each other host, by whose accusation the ranks there learn of a loss: the
// coordinator, which tells all, may be what hangs on it, and so may any rank that had a connection
// to the lost one.
std::vector<int> speakers_besides_coordinator(const control::ControlPlane& control) {
  const Topology& topology = control.topology();
  std::vector<int> speakers;
  constexpr int kSpeakersPerHost = 2;
  std::vector<int> found(topology.host_names.size(), 0);
  found[static_cast<std::size_t>(topology.host_index())] = kSpeakersPerHost;
  for (int rank = 1; rank < topology.size; ++rank) {
    const auto host =
        static_cast<std::size_t>(topology.host_of_rank[static_cast<std::size_t>(rank)]);
    if (found[host] == kSpeakersPerHost) continue;
    ++found[host];
    speakers.push_back(rank);
  }
  return speakers;
}

// What the others call the loss of this rank: it ends, or they have given it up while it was
// stopped or out of reach.
Status as_told_to(int rank, const Status& cause) {
  if (cause.code != StatusCode::kPeerLost || cause.rank != rank) return cause;
  const std::string theirs = "lost rank " + std::to_string(rank) + " ";
  Status own = cause;
  if (own.message.starts_with(theirs)) own.message.erase(0, theirs.size());
  own.message =
      "the other ranks have lost this one, rank " + std::to_string(rank) + " " + own.message;
  return own;
}

}  // namespace

bool Engine::keep_house() {
  const TimePoint now = time_.step();
  const bool leaves = steady_.watch(now, waits_for_others());
  const bool is_waiting = waiting(now);
  const Duration interval = is_waiting ? std::min(kPeerCheckInterval, options_.peer_timeout / 8)
                                       : options_.peer_timeout / 4;
  if (next_housekeeping_ > now + interval)
    next_housekeeping_ = now + interval;  // an idle rank has got work
  if (now < next_housekeeping_) return leaves;
  next_housekeeping_ = now + interval;
  control_->beat(now);
  watch_peers(now, is_waiting);
  tell_if_blocked(now);
  if (coordinator_) tell_of_stalls(now);
  return leaves;
}

// A thread that waits while nothing runs here waits for a plan: so what was noted holds until one
// comes. It is told again and again, as reports of others may be on their way more slowly.
void Engine::tell_if_blocked(TimePoint now) {
  if (steady_.repeating()) wait_noted_ = false;
  if (!wait_noted_ || options_.deadlock_timeout == Duration::zero()) return blocked_since_.reset();
  if (!blocked_since_) blocked_since_ = told_blocked_at_ = now;
  if (now - told_blocked_at_ < options_.deadlock_timeout / 5) return;
  told_blocked_at_ = now;
  send(0, wire::encode(wire::Blocked{negotiator_.last_applied()}));
}

void Engine::tell_of_stalls(TimePoint now) {
  for (const auto& text : coordinator_->resumptions()) HVD_LOG(kWarning) << text;
  for (const auto& text : coordinator_->stall_warnings(time_.awake(now))) {
    counters_.stalls.fetch_add(1, std::memory_order_relaxed);
    HVD_LOG(kWarning) << text;
  }
}

void Engine::watch_peers(TimePoint now, bool is_waiting) {
  if (is_waiting) {
    if (const auto loss = control_->check_peers(time_.awake(now), options_.peer_timeout)) {
      if (loss->known) throw PeerLostError(loss->cause, loss->rank);
      lose(loss->rank, loss->cause);
    }
  }
  const auto actions = liveness_.check(time_.awake(now), is_waiting);
  for (const int rank : actions.ping) send(rank, wire::encode(wire::Ping{}));
  if (actions.lost) {
    const auto silence =
        std::chrono::duration_cast<std::chrono::milliseconds>(options_.peer_timeout);
    lose(*actions.lost, "it has not answered for " + std::to_string(silence.count()) + " ms");
  }
}

void Engine::lose(int rank, const std::string& cause) {
  std::string text = "lost rank " + std::to_string(rank) + " (host " +
                     control_->topology().host_name(rank) + "): " + cause + "; noticed by rank " +
                     std::to_string(control_->rank());
  std::string waits_for = executor_.first_active();
  const std::vector<OperationPtr> outstanding = outstanding_in_order();
  if (waits_for.empty() && !outstanding.empty())
    waits_for = control::describe(outstanding.front()->request);
  if (!waits_for.empty()) text += " while waiting for " + waits_for;
  throw PeerLostError(text, rank);
}

/// A broken connection is the consequence of a death more often than a fault of its own.
Status Engine::explained(const Status& cause) {
  if (cause.code == StatusCode::kPeerLost) return cause;
  try {
    const auto loss = control_->find_loss_behind_error();
    if (!loss) return cause;
    if (loss->known) return {StatusCode::kPeerLost, loss->cause, loss->rank};
    lose(loss->rank, loss->cause);
  } catch (const PeerLostError& error) {
    return {StatusCode::kPeerLost, error.what(), error.rank()};
  } catch (const std::exception&) {  // what is known already is the cause, then
  }
  return cause;
}

void Engine::fail(const Status& cause, bool tell_others) noexcept {
  if (front_.failed()) return;
  const Status own = as_told_to(control_->rank(), cause);
  front_.set_failed(own);
  // Before the program hears of it, and before the others may die of it.
  if (cause.code == StatusCode::kPeerLost && cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(cause.code),
                               cause.message);
  }
  // Of a process that ends without shutdown() the failure of others is mostly the consequence, and
  // its last words should not blame them.
  if (front_.ending()) {
    HVD_LOG(kInfo) << "the runtime has failed while this process was ending: " << own.message;
  } else {
    HVD_LOG(kError) << "the runtime has failed: " << own.message;
  }
  if (cause.code == StatusCode::kPeerLost && cause.rank >= 0)
    control_->accuse(cause.rank, cause.message);
  try {
    const wire::Bytes bytes = wire::encode(wire::Abort{control_->rank(), cause});
    if (tell_others && coordinator_) control_->publish(bytes);
    if (tell_others && !coordinator_) {
      control_->report(bytes);
      control_->send(speakers_besides_coordinator(*control_), bytes);
    }
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the other ranks could not be told: "
                    << error.what();  // they will find out by themselves
  }
  give_up(own);
}

}  // namespace hvd::runtime
