// The deadlines of the coordinator, and changes in order.
#include <algorithm>

#include "base/text.h"
#include "member/coordinator.h"

namespace hvd::member {

void Coordinator::enter(TimePoint now) {
  const Duration pause = now - last_;
  last_ = now;
  if (pause <= limit(Limit::kPing)) return;
  for (auto& [id, worker] : workers_) {
    worker.since += pause;
    worker.last_message += pause;
    worker.pinged += pause;
  }
  for (auto& [name, host] : hosts_) host.last_message += pause;
  since_ += pause;
  if (window_) *window_ += pause;
  if (change_) change_->since += pause;
}

void Coordinator::check(TimePoint now) {
  enter(now);
  if (phase_ == Phase::kEnded) return;
  std::erase_if(cut_off_, [now](const auto& host) { return host.second <= now; });
  check_hosts(now);
  check_silence(now);
  check_fences(now);
  check_starts(now);
  check_stalls(now);
  check_collecting(now);
  consider_change(now);
}

bool Coordinator::needs_answer(const Worker& worker) const {
  if (worker.status == WorkerState::kCandidate) return true;
  return worker.status == WorkerState::kMember && (phase_ != Phase::kRunning || change_);
}

void Coordinator::check_silence(TimePoint now) {
  std::vector<WorkerId> silent;
  for (auto& [id, worker] : workers_) {
    const bool begins = !worker.watched;
    worker.watched = needs_answer(worker);
    if (!worker.watched) continue;
    if (begins) worker.last_message = now;
    if (now - worker.last_message >= limit(Limit::kSilence)) {
      silent.push_back(id);
    } else if (begins ||
               now - std::max(worker.last_message, worker.pinged) >= limit(Limit::kPing)) {
      worker.pinged = now;
      send(id, Ping{});
    }
  }
  for (const WorkerId id : silent)
    if (workers_.contains(id))
      lose(id, text("it has not responded for ", limit(Limit::kSilence), " (HVD_PEER_TIMEOUT)"),
           now);
}

void Coordinator::check_hosts(TimePoint now) {
  std::vector<std::string> silent;
  for (const auto& [name, host] : hosts_)
    if (now - host.last_message >= limit(Limit::kHeartbeat)) silent.push_back(name);
  for (const std::string& name : silent)
    drop_host(name, text("host ", name, " has not responded for ", limit(Limit::kHeartbeat)), now);
}

void Coordinator::check_fences(TimePoint now) {
  std::vector<std::string> stuck;
  for (const auto& [id, worker] : workers_)
    if (worker.status == WorkerState::kLost && now - worker.since >= limit(Limit::kFence))
      stuck.push_back(worker.host);
  for (const std::string& host : stuck)
    if (hosts_.contains(host))
      drop_host(host, text("a process on host ", host, " could not be ended"), now);
}

void Coordinator::check_starts(TimePoint now) {
  std::vector<WorkerId> late;
  for (const auto& [id, worker] : workers_)
    if (worker.status == WorkerState::kStarting && now - worker.since >= limit(Limit::kStart))
      late.push_back(id);
  for (const WorkerId id : late)
    lose(id, text("it has not joined within ", limit(Limit::kStart), " (--start-timeout)"), now);
}

void Coordinator::check_stalls(TimePoint now) {
  if (change_ && now - change_->since >= limit(Limit::kChange))
    return reset(
        text("a change was not reached within ", limit(Limit::kChange), " (--change-patience)"),
        now);
  if (in_order_ || phase_ == Phase::kRunning || now - since_ < limit(Limit::kStall)) return;
  std::vector<WorkerId> blamed;
  if (phase_ == Phase::kCollecting) {
    blamed = members_that([](const Worker& w) { return !w.ready; });
  } else if (phase_ == Phase::kForming) {
    const WorkerId root = assigned_.seats[assigned_.root].worker;
    const auto synced = members_that([](const Worker& w) { return w.synced.has_value(); });
    const bool root_alone =
        std::all_of(synced.begin(), synced.end(), [root](WorkerId id) { return id == root; });
    if (root_alone) {
      blamed.push_back(root);
    } else {
      blamed = members_that([](const Worker& w) { return !w.synced; });
    }
  }
  for (const WorkerId id : blamed)
    lose(id, text("it has not entered generation ", wanted_, " within ", limit(Limit::kStall)),
         now);
}

void Coordinator::check_collecting(TimePoint now) {
  if (phase_ != Phase::kCollecting) return;
  const int present = count(WorkerState::kMember) + count(WorkerState::kCandidate);
  if (present < options_.min_np && now - since_ >= limit(Limit::kElastic))
    return finish(Outcome::kTooFew);
  try_assign(now);
}

void Coordinator::consider_change(TimePoint now) {
  if (phase_ != Phase::kRunning || change_) return;
  dismiss_candidates();
  bool joins = false;
  bool leaves = false;
  int stay = 0;  // including candidates that can replace leaving members
  for (const auto& [id, worker] : workers_) {
    const bool member = worker.status == WorkerState::kMember;
    const bool leaving = is_leaving(worker);
    const bool joining = worker.status == WorkerState::kCandidate && !worker.late && !leaving;
    joins = joins || joining;
    leaves = leaves || (member && leaving);
    stay += (member && !leaving) || joining ? 1 : 0;
  }
  const bool open = window_ && now - *window_ >= limit(Limit::kJoinWindow);
  joins = joins && open && count(WorkerState::kMember) < options_.max_np;
  leaves = leaves && stay >= options_.min_np;
  if (joins || leaves) begin_change(now);
}

/// Dismisses the candidates that are to leave; the generation runs without them.
void Coordinator::dismiss_candidates() {
  for (auto& [id, worker] : workers_) {
    if (worker.status != WorkerState::kCandidate || !is_leaving(worker)) continue;
    worker.status = WorkerState::kDismissed;
    send(id, End{});
  }
}

void Coordinator::begin_change(TimePoint now) {
  change_ = Change{.number = ++changes_, .since = now};
  for (auto& [id, worker] : workers_) {
    if (worker.status != WorkerState::kMember) continue;
    worker.begun.reset();
    send(id, Prepare{changes_, wanted_});
  }
}

void Coordinator::try_target(TimePoint now) {
  Commit highest = 0;
  for (const auto& [id, worker] : workers_) {
    if (worker.status != WorkerState::kMember) continue;
    if (!worker.begun) return;
    highest = std::max(highest, *worker.begun);
  }
  change_->target = Target{change_->number, highest + 1, ++wanted_, named_to_leave()};
  phase_ = Phase::kCollecting;
  in_order_ = true;
  since_ = now;
  complete_since_.reset();
  clear_answers();
  for (auto& [id, worker] : workers_) {
    if (worker.status == WorkerState::kMember) send(id, *change_->target);
    if (worker.status == WorkerState::kCandidate) ask(id, worker, "a change in order");
  }
}

/// The members that leave, if enough others stay to keep their state: two, or one if there will be
/// no more. Otherwise the list is empty, and new workers must join first to take over the state.
std::vector<WorkerId> Coordinator::named_to_leave() const {
  std::vector<WorkerId> leavers;
  int stay = 0;
  int join = 0;
  for (const auto& [id, worker] : workers_) {
    const bool leaving = is_leaving(worker);
    if (worker.status == WorkerState::kMember) {
      leaving ? leavers.push_back(id) : void(++stay);
    } else if (worker.status == WorkerState::kCandidate && !worker.late && !leaving) {
      ++join;
    }
  }
  const int later = std::max(stay, std::min(stay + join, options_.max_np));
  if (stay == 0 || stay < std::min(2, later)) leavers.clear();
  return leavers;
}

TimePoint Coordinator::next_check(TimePoint now) const {
  TimePoint next = now + limit(Limit::kPing) / 2;
  // A deadline that has passed was acted on by check(), or has no effect.
  const auto consider = [&](TimePoint since, Limit which) {
    const TimePoint deadline = since + limit(which);
    if (deadline > now) next = std::min(next, deadline);
  };
  for (const auto& [id, worker] : workers_) {
    if (worker.status == WorkerState::kStarting) consider(worker.since, Limit::kStart);
    if (worker.status == WorkerState::kLost) consider(worker.since, Limit::kFence);
    if (!needs_answer(worker)) continue;
    if (!worker.watched) return now;  // its silence counts from the first ping
    consider(worker.last_message, Limit::kSilence);
  }
  for (const auto& [name, host] : hosts_) consider(host.last_message, Limit::kHeartbeat);
  for (const auto& [name, until] : cut_off_)
    if (until > now) next = std::min(next, until);
  if (complete_since_) consider(*complete_since_, Limit::kGrace);
  if (window_) consider(*window_, Limit::kJoinWindow);
  if (change_) consider(change_->since, Limit::kChange);
  consider(since_, Limit::kStart);
  consider(since_, Limit::kStall);
  consider(since_, Limit::kElastic);
  return next;
}

}  // namespace hvd::member
