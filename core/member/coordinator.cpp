#include "member/coordinator.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/expect.h"
#include "base/text.h"

namespace hvd::member {

Coordinator::Coordinator(CoordinatorOptions options, TimePoint now)
    : options_(std::move(options)), since_(now), last_(now) {
  HVD_EXPECT(options_.min_np >= 1 && options_.min_np <= options_.start_size &&
                 options_.start_size <= options_.max_np,
             "min_np <= start_size <= max_np");
}

void Coordinator::worker_started(WorkerId id, const std::string& host, TimePoint now) {
  enter(now);
  HVD_EXPECT(!workers_.contains(id), "ids are not reused");
  workers_[id] = {.host = host, .since = now, .last_message = now};
  hosts_.try_emplace(host, Host{.last_message = now});
  if (phase_ == Phase::kEnded) actions_.emplace_back(Kill{id, "the job has ended"});
}

void Coordinator::worker_ended(WorkerId id, const std::string& cause, TimePoint now) {
  enter(now);
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  const bool member = record_loss(id, found->second, cause);
  workers_.erase(found);
  member ? reset(cause, now) : try_assign(now);
}

void Coordinator::receive(WorkerId from, const ToCoordinator& message, TimePoint now) {
  enter(now);
  const auto found = workers_.find(from);
  if (found == workers_.end()) {
    actions_.emplace_back(Kill{from, "the worker no longer belongs to the job"});
    return;
  }
  Worker& worker = found->second;
  worker.last_message = now;
  if (phase_ == Phase::kEnded || worker.status == WorkerState::kLost ||
      worker.status == WorkerState::kDismissed)
    return;
  std::visit([&](const auto& received) { handle(from, worker, received, now); }, message);
}

void Coordinator::handle(WorkerId id, Worker& worker, const Join& join, TimePoint now) {
  if (worker.status != WorkerState::kStarting) return;
  if (program_.empty()) program_ = join.program;
  if (program_ != join.program) {
    const std::string reason = text("the job's program is '", program_, "', this one is '",
                                    join.program, "'; start the same program everywhere");
    worker.status = WorkerState::kDismissed;
    notes_.push_back(text("worker ", id, " on ", worker.host, " was refused: ", reason));
    return send(id, Refused{reason});
  }
  worker.status = WorkerState::kCandidate;
  worker.since = now;
  if (!window_) window_ = now;
  if (phase_ == Phase::kCollecting) ask(id, worker, "the job has room");
}

void Coordinator::handle(WorkerId, Worker& worker, const Ready& ready, TimePoint now) {
  if (ready.generation == worker.asked) worker.late = false;
  if (phase_ != Phase::kCollecting || ready.generation != wanted_) return;
  worker.ready = ready;
  try_assign(now);
}

void Coordinator::handle(WorkerId, Worker& worker, const Synced& synced, TimePoint now) {
  const bool member = worker.status == WorkerState::kMember;
  if (phase_ != Phase::kForming || synced.generation != wanted_ || !member) return;
  worker.synced = synced;
  try_go(now);
}

void Coordinator::handle(WorkerId id, Worker& worker, const Failed& failed, TimePoint now) {
  const bool member = worker.status == WorkerState::kMember;
  if (failed.generation != present() || !member) return;
  const std::string cause = text("worker ", id, " reports: ", failed.cause);
  const auto accused = failed.accused ? workers_.find(*failed.accused) : workers_.end();
  if (accused != workers_.end() && accused->second.status == WorkerState::kMember)
    return lose(accused->first, cause, now);
  reset(cause, now);
}

void Coordinator::handle(WorkerId, Worker& worker, const AtEnd& end, TimePoint) {
  const bool runs = phase_ == Phase::kRunning || in_order_;
  const bool member = worker.status == WorkerState::kMember;
  if (!runs || end.generation != present() || !member) return;
  worker.at_end = true;
  try_complete();
}

void Coordinator::handle(WorkerId, Worker& worker, const Begun& begun, TimePoint now) {
  if (!change_ || change_->number != begun.change || change_->target) return;
  worker.begun = begun.commit;
  try_target(now);
}

/// A replacement for a process whose program has thrown may throw again at the same commit,
/// forever. Progress is measured by the commit of the exception, not by the commits since the last
/// exception, because commits count from 0 again when all ranks have thrown and the program loads a
/// state. The commit is compared with the highest commit of all exceptions, so that a program that
/// fails at two places in turn is detected too.
void Coordinator::handle(WorkerId id, Worker& worker, const ProgramFailed& failed, TimePoint) {
  const bool member = worker.status == WorkerState::kMember;
  if (failed.generation != present() || !member || failed_in_ == failed.generation) return;
  const bool further = failed_in_ == 0 || failed.commit > failed_at_;
  failures_ = further ? 1 : failures_ + 1;
  failed_in_ = failed.generation;
  failed_at_ = std::max(failed_at_, failed.commit);
  if (options_.max_failures == 0 || failures_ < options_.max_failures) return;
  std::size_t rank = 0;
  while (assigned_.seats[rank].worker != id) ++rank;
  failure_ = text("rank ", rank, " (worker ", id, " on ", worker.host, ") at commit ",
                  failed.commit, ": ", failed.cause);
  finish(Outcome::kFailsAgain);
}

Generation Coordinator::present() const {
  if (phase_ == Phase::kForming || phase_ == Phase::kRunning) return wanted_;
  return in_order_ ? running_ : 0;
}

bool Coordinator::record_loss(WorkerId id, Worker& worker, const std::string& cause) {
  const bool member = worker.status == WorkerState::kMember;
  const bool known =
      worker.status == WorkerState::kLost || worker.status == WorkerState::kDismissed;
  if (!known && phase_ != Phase::kEnded) {
    losses_.push_back({id, member ? wanted_ : 0, cause});
    notes_.push_back(text("worker ", id, " on ", worker.host, " is lost: ", cause));
  }
  return member;
}

void Coordinator::lose(WorkerId id, const std::string& cause, TimePoint now) {
  Worker& worker = workers_.at(id);
  const bool member = record_loss(id, worker, cause);
  worker.status = member ? WorkerState::kLost : WorkerState::kDismissed;
  worker.since = now;
  actions_.emplace_back(Kill{id, cause});
  member ? reset(cause, now) : try_assign(now);
}

void Coordinator::drop_host(const std::string& host, const std::string& cause, TimePoint now) {
  hosts_.erase(host);
  cut_off_[host] = now + limit(Limit::kLease);
  bool member = false;
  for (auto worker = workers_.begin(); worker != workers_.end();) {
    if (worker->second.host != host) {
      ++worker;
      continue;
    }
    member = record_loss(worker->first, worker->second, cause) || member;
    actions_.emplace_back(Kill{worker->first, cause});
    worker = workers_.erase(worker);
  }
  member ? reset(cause, now) : try_assign(now);
}

void Coordinator::host_reported(const std::string& host, TimePoint now) {
  enter(now);
  if (const auto found = hosts_.find(host); found != hosts_.end()) found->second.last_message = now;
}

void Coordinator::host_lost(const std::string& host, TimePoint now) {
  enter(now);
  if (hosts_.contains(host)) drop_host(host, text("host ", host, " is lost"), now);
}

void Coordinator::host_leaves(const std::string& host, TimePoint now) {
  enter(now);
  if (const auto found = hosts_.find(host); found != hosts_.end()) found->second.leaving = true;
  consider_change(now);
}

void Coordinator::worker_leaves(WorkerId id, bool leaves, TimePoint now) {
  enter(now);
  if (const auto found = workers_.find(id); found != workers_.end()) found->second.leaving = leaves;
  consider_change(now);
}

void Coordinator::ask(WorkerId id, Worker& worker, const std::string& cause) {
  worker.asked = wanted_;
  send(id, Reset{wanted_, cause});
}

void Coordinator::clear_answers() {
  for (auto& [id, worker] : workers_) {
    worker.ready.reset();
    worker.synced.reset();
    worker.begun.reset();
  }
}

void Coordinator::reset(const std::string& cause, TimePoint now) {
  if (phase_ == Phase::kEnded) return;
  const bool ran = phase_ == Phase::kRunning || in_order_;
  if (ran && options_.max_resets && resets_ >= *options_.max_resets)
    return finish(Outcome::kTooManyResets);
  resets_ += ran ? 1 : 0;
  ++wanted_;
  phase_ = Phase::kCollecting;
  in_order_ = false;
  change_.reset();
  complete_since_.reset();
  since_ = now;
  clear_answers();
  for (auto& [id, worker] : workers_) {
    worker.at_end = false;
    if (worker.status == WorkerState::kMember || worker.status == WorkerState::kCandidate)
      ask(id, worker, cause);
  }
  try_assign(now);
}

bool Coordinator::fence_passed(TimePoint now) const {
  if (count(WorkerState::kLost) > 0) return false;
  // The processes of a lost host share no memory with the survivors, and cannot complete a step
  // without them. Without survivors they could.
  if (count(WorkerState::kMember) > 0) return true;
  return std::all_of(cut_off_.begin(), cut_off_.end(),
                     [now](const auto& host) { return host.second <= now; });
}

bool Coordinator::enough(int ready, TimePoint now) const {
  if (ready < options_.min_np) return false;
  const bool starts = running_ == 0 && count(WorkerState::kMember) == 0;
  return !starts || ready >= options_.start_size || now - since_ >= limit(Limit::kStart);
}

bool Coordinator::may_form(TimePoint now) {
  if (!fence_passed(now)) return false;
  int ready = 0;
  int staying = 0;
  int late = 0;
  for (const auto& [id, worker] : workers_) {
    const bool member = worker.status == WorkerState::kMember;
    if (!member && worker.status != WorkerState::kCandidate) continue;
    if (member && !worker.ready) return false;
    ready += worker.ready ? 1 : 0;
    staying += worker.ready && !is_leaving(worker) ? 1 : 0;
    late += worker.ready ? 0 : 1;
  }
  if (!enough(ready, now)) return false;
  if (late == 0 || staying >= options_.max_np) return true;
  if (!complete_since_) complete_since_ = now;
  return now - *complete_since_ >= limit(Limit::kGrace);
}

bool Coordinator::divided() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const auto& entry) {
    return entry.second.ready && entry.second.ready->divided;
  });
}

/// Note [Leaving with a part of the state]: a member that has a part of a divided state leaves only
/// in a change in order, and only if Target has named it. All members then have the list of leaving
/// ranks at the commit of the change, and send copies of all parts to ranks that stay. If that
/// fails, no member reaches the commit. In that case, and after a reset, when the members may be at
/// different commits, the leaving member stays for one more generation.
bool Coordinator::may_leave(WorkerId id, const Worker& worker) const {
  if (worker.status != WorkerState::kMember || !divided()) return true;
  if (!in_order_ || !change_ || !change_->target) return false;
  const Commit commit = change_->target->commit;
  const auto handed_on = [commit](const Worker& w) {
    return w.ready && w.ready->state.commit >= commit;
  };
  if (members_that(handed_on).empty()) return false;
  const std::vector<WorkerId>& named = change_->target->leaving;
  return std::find(named.begin(), named.end(), id) != named.end();
}

/// Dismisses the leaving workers, if enough others remain. If no remaining worker has the newest
/// state, one of the leaving workers stays for one more generation, in which it sends its state to
/// the others.
void Coordinator::dismiss_leavers() {
  int stay = 0;
  std::optional<Commit> kept;  // the highest commit whose whole state the others have
  std::vector<WorkerId> leavers;
  departing_state_sources_.clear();
  for (const auto& [id, worker] : workers_) {
    if (!worker.ready) continue;
    const bool leaves = is_leaving(worker);
    if (leaves && may_leave(id, worker)) {
      leavers.push_back(id);
      continue;
    }
    if (leaves) departing_state_sources_.insert(id);
    stay += leaves ? 0 : 1;
    const StateSummary& state = worker.ready->state;
    if (state.kind == StateKind::kWhole) kept = std::max(kept.value_or(0), state.commit);
  }
  if (stay < options_.min_np) {
    departing_state_sources_.clear();
    return;
  }
  std::optional<WorkerId> source;
  const auto state_of = [this](WorkerId id) { return workers_.at(id).ready->state; };
  for (const WorkerId id : leavers) {
    const StateSummary state = state_of(id);
    if (state.kind == StateKind::kNone || (kept && *kept >= state.commit)) continue;
    if (!source || std::pair(state.commit, state.kind) >
                       std::pair(state_of(*source).commit, state_of(*source).kind))
      source = id;
  }
  if (source) departing_state_sources_.insert(*source);
  for (const WorkerId id : leavers) {
    if (source == id) continue;
    Worker& worker = workers_.at(id);
    worker.status = WorkerState::kDismissed;
    worker.ready.reset();
    send(id, End{});
  }
}

std::vector<Entrant> Coordinator::entrants() const {
  std::vector<std::pair<WorkerId, const Worker*>> ready;
  for (const auto& [id, worker] : workers_)
    if (worker.ready) ready.emplace_back(id, &worker);
  // Members first, then candidates in the order in which they joined.
  std::stable_sort(ready.begin(), ready.end(), [](const auto& a, const auto& b) {
    const bool member = a.second->status == WorkerState::kMember;
    if (member != (b.second->status == WorkerState::kMember)) return member;
    return member ? a.second->serial < b.second->serial : a.second->since < b.second->since;
  });
  // Members keep their places even above the limit, and a worker that stays only to send its state
  // does not count.
  const int sources = static_cast<int>(departing_state_sources_.size());
  const auto max_members = static_cast<std::size_t>(
      std::max(options_.max_np, count(WorkerState::kMember) - sources) + sources);
  if (ready.size() > max_members) ready.resize(max_members);
  std::vector<Entrant> entrants;
  for (const auto& [id, worker] : ready) {
    const std::uint64_t serial =
        worker->serial > 0 ? worker->serial : serials_ + 1 + entrants.size();
    entrants.push_back({.worker = id,
                        .host = worker->host,
                        .serial = serial,
                        .state = worker->ready->state,
                        .can_load = worker->ready->can_load,
                        .address = worker->ready->address});
  }
  return entrants;
}

void Coordinator::try_assign(TimePoint now) {
  if (phase_ != Phase::kCollecting || !may_form(now)) return;
  dismiss_leavers();
  auto next = regroup(wanted_, entrants(), running_ == 0);
  if (!next) return finish(Outcome::kStateLost);
  assign(std::move(*next), now);
}

void Coordinator::assign(Regroup next, TimePoint now) {
  phase_ = Phase::kForming;
  since_ = now;
  resets_ += in_order_ ? 1 : 0;
  in_order_ = false;
  change_.reset();
  complete_since_.reset();
  assigned_ = std::move(next.assign);
  for (const Seat& seat : assigned_.seats) {
    Worker& worker = workers_.at(seat.worker);
    worker.status = WorkerState::kMember;
    if (worker.serial == 0) worker.serial = ++serials_;
    worker.at_end = false;
    send(seat.worker, assigned_);
  }
  for (auto& [id, worker] : workers_)
    if (worker.status == WorkerState::kCandidate) worker.late = !worker.ready;
  if (next.touched) {
    notes_.push_back(text("no rank has the whole state of commit ", assigned_.state.commit,
                          ": all continue with the parameters of rank ", assigned_.root,
                          ", so the samples of one step are used twice"));
  }
  for (const WorkerId id : next.differed) {
    notes_.push_back(text("worker ", id, " had another state than most ranks at commit ",
                          assigned_.state.commit, " and receives theirs"));
  }
}

void Coordinator::try_go(TimePoint now) {
  if (!members_that([](const Worker& w) { return !w.synced; }).empty()) return;
  const StateSummary state = workers_.at(assigned_.seats[assigned_.root].worker).synced->state;
  const auto differ = members_that([&](const Worker& w) { return w.synced->state != state; });
  for (const WorkerId id : differ)
    lose(id,
         text("its state differs after it was received: the memory or the network of ",
              workers_.at(id).host, " is broken"),
         now);
  if (!differ.empty()) return;
  phase_ = Phase::kRunning;
  since_ = now;
  running_ = wanted_;
  for (const Seat& seat : assigned_.seats) send(seat.worker, Go{wanted_});
  window_.reset();
  if (count(WorkerState::kCandidate) > 0) window_ = now;
  consider_change(now);
}

void Coordinator::try_complete() {
  if (members_that([](const Worker& w) { return !w.at_end; }).empty()) finish(Outcome::kComplete);
}

void Coordinator::finish(Outcome outcome) {
  phase_ = Phase::kEnded;
  outcome_ = outcome;
  change_.reset();
  for (auto& [id, worker] : workers_) {
    const bool connected =
        worker.status == WorkerState::kMember || worker.status == WorkerState::kCandidate;
    if (outcome == Outcome::kComplete && connected) {
      send(id, End{});
    } else {
      actions_.emplace_back(Kill{id, "the job has ended"});
    }
  }
}

int Coordinator::count(WorkerState status) const {
  return static_cast<int>(std::count_if(workers_.begin(), workers_.end(), [&](const auto& entry) {
    return entry.second.status == status;
  }));
}

bool Coordinator::is_leaving(const Worker& worker) const {
  const auto host = hosts_.find(worker.host);
  return worker.leaving || (host != hosts_.end() && host->second.leaving);
}

std::vector<WorkerId> Coordinator::members_that(
    const std::function<bool(const Worker&)>& hold) const {
  std::vector<WorkerId> ids;
  for (const auto& [id, worker] : workers_)
    if (worker.status == WorkerState::kMember && hold(worker)) ids.push_back(id);
  return ids;
}

std::vector<CoordinatorAction> Coordinator::take_actions() { return std::exchange(actions_, {}); }

std::vector<std::string> Coordinator::take_notes() { return std::exchange(notes_, {}); }

}  // namespace hvd::member
