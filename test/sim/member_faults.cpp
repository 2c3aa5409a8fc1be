// The faults in a MemberWorld, and its checks.
#include <algorithm>
#include <utility>

#include "base/text.h"
#include "sim/member_world.h"

namespace hvd::member::testing {

using std::chrono::milliseconds;

constexpr int kPhases = 8;  // in which inject_fault_at_a_phase() interrupts a process

void MemberWorld::plan_faults() {
  for (int i = 0; i < scenario_.faults; ++i) after(between(0, 400'000), [this] { inject_fault(); });
}

MemberWorld::Process* MemberWorld::pick_process(bool members_only) {
  std::vector<Process*> found;
  for (auto& [id, process] : processes_)
    if (process.alive && !process.over && (!members_only || members_.contains(id)))
      found.push_back(&process);
  return found.empty()
             ? nullptr
             : found[static_cast<std::size_t>(random_.below(static_cast<int>(found.size())))];
}

/// Waits until a process is in a certain phase, and kills or stops it, or lets an operation fail.
void MemberWorld::inject_fault_at_a_phase(int which) {
  if (coordinator_->outcome()) return;
  std::vector<Process*> victims;
  const bool all_touched =
      which == 7 && std::all_of(members_.begin(), members_.end(), [this](WorkerId id) {
        const Process& process = processes_.at(id);
        return !process.alive || process.model.summary.kind == StateKind::kTouched;
      });
  for (auto& [id, process] : processes_) {
    if (!process.alive || process.over || process.stopped) continue;
    const Member::Phase phase = process.member.phase();
    const bool forms = phase == Member::Phase::kForming || phase == Member::Phase::kSynced;
    const bool root = forms && process.rank == process.assign.root;
    const bool receives = forms && !root && process.assign.seats[process.rank].receives;
    const bool first = forms ? process.rank == 0 : members_.contains(id) && process.rank == 0;
    if ((which == 0 && root) || (which == 1 && receives) || (which == 2 && first) ||
        (which == 3 && phase == Member::Phase::kAtEnd) ||
        (which == 4 && phase == Member::Phase::kReady) ||
        (which == 5 && process.committing && phase == Member::Phase::kRunning) ||
        (which >= 6 && phase == Member::Phase::kRunning &&
         process.model.summary.kind == StateKind::kTouched && (which == 6 || all_touched)))
      victims.push_back(&process);
  }
  if (victims.empty())
    return after(between(20, 1'000), [this, which] { inject_fault_at_a_phase(which); });
  Process& victim =
      *victims[static_cast<std::size_t>(random_.below(static_cast<int>(victims.size())))];
  if (which == 7 || (which == 6 && random_.chance(70))) {
    cover("an operation fails after the parameters were written");
    for (Process* const process : which == 7 ? victims : std::vector<Process*>{&victim}) {
      // It throws, so the program does not get to its commit.
      ++process->epoch;
      process->inside = false;
      process->member.failed({}, "an operation has failed");
      flush(*process);
    }
    return;
  }
  static const char* const kNames[kPhases] = {"root",
                                              "receiver",
                                              "rank 0",
                                              "member at its end",
                                              "ready worker",
                                              "member in a commit",
                                              "member that has written parameters",
                                              ""};
  const bool stops = random_.chance(30);
  cover(text("a ", kNames[which], stops ? " is stopped" : " is killed"));
  victim.disturbed = true;
  stops ? stop(victim, milliseconds(random_.chance(50) ? 3'000 : 990 + random_.below(80)))
        : kill(victim.id);
}

void MemberWorld::inject_fault() {
  if (coordinator_->outcome()) return;
  const int kind = random_.below(100);
  if (kind < 35) return inject_fault_at_a_phase(random_.below(kPhases));
  if (kind >= 72 && kind < 90) {
    auto host = static_cast<std::size_t>(random_.below(scenario_.hosts));
    // If possible the one that holds a whole generation.
    if (members_.size() == 1) host = processes_.at(*members_.begin()).host;
    return inject_host_fault(hosts_[host], kind);
  }
  Process* const victim = pick_process(kind >= 90);
  if (victim == nullptr) return;
  if (kind < 60) {
    victim->disturbed = true;
    cover("a process is killed");
    kill(victim->id);
  } else if (kind < 72) {
    const bool brief = random_.chance(50);
    cover(brief ? "a process is stopped briefly" : "a process is stopped for long");
    stop(*victim, milliseconds(brief ? 50 + random_.below(400)
                                     : 900 + random_.below(random_.chance(50) ? 300 : 3'000)));
  } else {
    inject_program_fault(*victim, kind);
  }
}

void MemberWorld::inject_host_fault(Host& host, int kind) {
  const auto index = static_cast<std::size_t>(&host - hosts_.data());
  if (kind < 78) {
    const bool brief = random_.chance(40);
    cover(brief ? "a host is cut off briefly" : "a host is cut off for long");
    const milliseconds longer(random_.chance(20) ? 3'600'000 : 300 + random_.below(3'000));
    cut(host, brief ? milliseconds(1 + random_.below(80)) : longer, !brief && random_.chance(50));
  } else if (kind < 82 && hosts_.size() > 1 && host.alive) {
    cover("a host dies");
    host.disturbed = true;
    for (auto& [id, process] : processes_)
      if (process.host == index) process.alive = false;
    host.alive = false;
    after(between(20, 500), [this, name = host.name] { coordinator_->host_lost(name, now_); });
  } else if (kind < 85 && hosts_.size() > 1) {
    const std::size_t other = (index + 1) % hosts_.size();
    cover("two hosts lose each other");
    broken_.insert(std::minmax(index, other));
    host.disturbed = true;
    hosts_[other].disturbed = true;
    after(milliseconds(1 + random_.below(3'000)),
          [this, index, other] { broken_.erase(std::minmax(index, other)); });
  } else if (kind < 88) {
    cover("a host leaves in order");
    host.disturbed = true;
    host.leaves = true;
    coordinator_->host_leaves(host.name, now_);
  } else {
    cover("workers leave in order");
    leave_in_order(index);
  }
}

/// Some or all workers of a host leave, of which some may stay after all, and others replace them.
void MemberWorld::leave_in_order(std::size_t host) {
  const int part = random_.chance(50) ? 100 : 50;
  std::vector<WorkerId> leavers;
  for (const auto& [id, process] : processes_)
    if (process.host == host && process.alive && !process.over && random_.chance(part))
      leavers.push_back(id);
  for (const WorkerId id : leavers) {
    leaving_.insert(id);
    coordinator_->worker_leaves(id, true, now_);
    if (random_.chance(60)) replace(host);
    if (random_.chance(20)) {
      after(between(0, 300'000), [this, id] {
        cover("a worker need not leave any more");
        leaving_.erase(id);
        coordinator_->worker_leaves(id, false, now_);
      });
    }
  }
}

void MemberWorld::inject_program_fault(Process& victim, int kind) {
  if (kind < 95) {
    cover("a step takes long");
    victim.rest = milliseconds(2'500);
  } else if (victim.model.summary.kind == StateKind::kWhole &&
             victim.member.phase() == Member::Phase::kRunning) {
    // The process computes on with another state than the others.
    cover("a state is damaged");
    victim.disturbed = true;
    damaged_ = true;
    victim.model.summary.hash ^= 1;
    after(between(0, 200), [this, id = victim.id] {
      in(id, [](Process& process) { process.member.failed({}, "its gradients differ"); });
    });
  }
}

void MemberWorld::check_delivery(const Deliver& deliver) {
  if (const auto* const target = std::get_if<Target>(&deliver.message)) {
    if (in_order_ != target->next) {
      fails_.reset();
      if (scenario_.divided && scenario_.faults > 0 && random_.chance(15)) fails_ = *target;
    }
    in_order_ = target->next;
    named_ = target->leaving;
    cover("a change in order has a target");
  }
  if (const auto* const assign = std::get_if<Assign>(&deliver.message))
    check_assign(*assign, deliver.to);
  if (std::holds_alternative<End>(deliver.message)) check_end_of(deliver.to);
  if (const auto* const reset = std::get_if<Reset>(&deliver.message)) {
    const bool late = reset->cause.find("a change was not reached") != std::string::npos;
    cover("a change takes too long", late);
    if (late && scenario_.faults == 0) fail("a change takes too long without any fault");
  }
}

/// A member with a part of the state has sent it to others at the commit of a change in order.
void MemberWorld::check_end_of(WorkerId id) {
  if (coordinator_->outcome() || !scenario_.divided || !members_.contains(id)) return;
  const Process& process = processes_.at(id);
  if (process.partial || process.model.summary.kind == StateKind::kNone) return;  // it has no part
  cover("a worker leaves with a part of the state");
  const bool named = std::find(named_.begin(), named_.end(), id) != named_.end();
  if (!named || coordinator_->generation() != in_order_)
    fail(text("worker ", id, " leaves with its part of the state"));
  if (fails_ && fails_->next == in_order_)
    fail(text("worker ", id, " leaves although it could not hand its part on"));
}

void MemberWorld::check_assign(const Assign& assign, WorkerId to) {
  const auto size = static_cast<int>(assign.seats.size());
  const WorkerId root_id = assign.seats[assign.root].worker;
  const auto leaves = [this](WorkerId id) {
    return leaving_.contains(id) || hosts_[processes_.at(id).host].leaves;
  };
  std::set<WorkerId> members;
  int leavers = 0;
  int parts = 0;  // of the state that ranks have which stay
  for (const Seat& seat : assign.seats) {
    members.insert(seat.worker);
    leavers += leaves(seat.worker) ? 1 : 0;
    const bool stays = members_.contains(seat.worker);
    parts += stays ? 1 : 0;
    const Process& process = processes_.at(seat.worker);
    if (in_order_ == assign.generation && stays && seat.receives && !process.disturbed)
      fail(text("worker ", seat.worker, " loses a step in a change in order"));
  }
  if (in_order_ == assign.generation && parts == 0) fail("a change in order keeps no rank");
  // Beyond the largest size there may be those that leave afterwards.
  const int givers = scenario_.divided ? leavers : std::min(leavers, 1);
  const int max_size = std::max(scenario_.max_np + givers, static_cast<int>(members_.size()));
  if (size < scenario_.min_np || size > max_size) fail(text("a generation of ", size));
  if (members.size() != assign.seats.size()) fail("a worker has two ranks");
  if (assign.state.kind == StateKind::kTouched)
    touched_.insert({processes_.at(root_id).model.history, assign.state.commit});
  if (to == assign.seats.front().worker) {
    cover("a worker that leaves gives its state first", leaves(root_id) && size > 1);
    cover("several workers give their parts first",
          scenario_.divided && leavers > 1 && size > leavers);
    cover("a change in order is carried out", in_order_ == assign.generation);
    cover("all members have written parameters since the commit",
          assign.state.kind == StateKind::kTouched);
    cover("a generation is smaller", members.size() < members_.size());
    cover("a generation is larger", !members_.empty() && members.size() > members_.size());
  }
  if (to == assign.seats.back().worker) members_ = members;
}

void MemberWorld::check_run(const Process& process) {
  const Generation generation = process.assign.generation;
  const StateSummary& state = process.model.summary;
  if (state.kind != StateKind::kWhole) fail(text("worker ", process.id, " has no whole state"));
  const auto [start, first] = starts_.try_emplace(generation, process.model);
  if (!first && (start->second.summary != state || start->second.history != process.model.history))
    fail(text("worker ", process.id, " begins generation ", generation, " with another state"));
  if (process.committed.empty() || process.disturbed) return;
  const auto& [last, hash] = *process.committed.rbegin();
  if (last.first == process.model.history && last.second > state.commit)
    fail(text("commit ", last.second, " of worker ", process.id, " is undone"));
  const auto own = process.committed.find({process.model.history, state.commit});
  // This also holds if the generation that was given the state was reset before it ran.
  const bool touched = touched_.contains({process.model.history, state.commit});
  const bool differs = own != process.committed.end() && own->second != state.hash;
  if (differs && !touched && !damaged_)
    fail(text("commit ", state.commit, " of worker ", process.id, " has changed"));
}

void MemberWorld::check_store(const Process& process, Generation generation) {
  for (const auto& [id, other] : processes_) {
    const bool shares = other.host == process.host && other.alive;
    if (shares && other.member.generation() > generation)
      fail(text("worker ", process.id, " writes to memory that generation ",
                other.member.generation(), " uses"));
  }
}

void MemberWorld::check_loss(const Kill& kill_it) {
  if (coordinator_->outcome()) return;
  const Process& process = processes_.at(kill_it.worker);
  const bool excused = process.disturbed || hosts_[process.host].disturbed || !process.alive;
  if (kill_it.cause.find("has not entered generation") != std::string::npos)
    fail(text("worker ", kill_it.worker, " is found late: ", kill_it.cause));
  if (!excused) fail(text("a healthy worker, ", process.id, ", is lost: ", kill_it.cause));
}

void MemberWorld::check_end() {
  const Outcome outcome = *coordinator_->outcome();
  static const char* const kOutcomes[] = {"the job is complete", "the job has too few ranks",
                                          "the state is lost", "too many resets"};
  cover(kOutcomes[static_cast<std::size_t>(outcome)]);
  if (outcome != Outcome::kComplete) {
    const bool too_few = outcome == Outcome::kTooFew;
    const bool lost = outcome == Outcome::kStateLost && !scenario_.can_load;
    if (!too_few && !lost) fail(kOutcomes[static_cast<std::size_t>(outcome)]);
    return;
  }
  std::optional<Model> end;
  for (const auto& [id, process] : processes_) {
    if (!process.over || !members_.contains(id) || hosts_[process.host].disturbed) continue;
    const StateSummary& state = process.model.summary;
    if (state.commit != static_cast<Commit>(scenario_.steps))
      fail(text("worker ", id, " ends at commit ", state.commit));
    if (!end) end = process.model;
    if (end->summary != state) fail(text("worker ", id, " ends with another state"));
  }
  cover("a job without faults", scenario_.faults == 0);
}

}  // namespace hvd::member::testing
