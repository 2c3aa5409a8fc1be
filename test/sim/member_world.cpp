#include "sim/member_world.h"

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace hvd::member::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return Random(a, b).next(); }

MemberScenario draw(Random& random) {
  MemberScenario scenario;
  scenario.hosts = 1 + random.below(4);
  scenario.per_host = 1 + random.below(3);
  const int size = scenario.hosts * scenario.per_host;
  scenario.start = random.chance(75) ? size : 1;
  scenario.min_np = random.chance(70) ? 1 : 1 + random.below(scenario.start);
  scenario.max_np = size + random.below(3);
  scenario.steps = 5 + random.below(60);
  scenario.faults = random.below(9);
  scenario.can_load = random.chance(80);
  scenario.replaces = random.chance(85);
  scenario.divided = random.chance(50);
  return scenario;
}

}  // namespace

MemberWorld::MemberWorld(std::uint64_t seed, Coverage& coverage)
    : seed_(seed),
      random_(seed, 32),
      coverage_(coverage),
      scenario_(draw(random_)),
      deadlines_(TimeSettings{.peer = seconds(1)}) {
  CoordinatorOptions options;
  options.start_size = scenario_.start;
  options.min_np = scenario_.min_np;
  options.max_np = scenario_.max_np;
  options.deadlines = deadlines_;
  coordinator_.emplace(options, now_);
  for (int host = 0; host < scenario_.hosts; ++host) {
    hosts_.push_back(
        {.name = text("host", host),
         .lease = Lease(deadlines_[Limit::kRenewal], deadlines_[Limit::kHeartbeat], now_)});
  }
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    for (int i = 0; i < scenario_.per_host; ++i) start(host, false);
    agent_beats(host);
  }
  if (random_.chance(40)) start(static_cast<std::size_t>(random_.below(scenario_.hosts)), true);
  plan_faults();
  tick();
}

std::vector<std::string> MemberWorld::run() {
  constexpr std::uint64_t kMaxEvents = 2'000'000;
  const TimePoint limit = now_ + std::chrono::minutes(10);
  const auto over = [this] {
    return coordinator_->outcome() &&
           std::all_of(processes_.begin(), processes_.end(),
                       [](const auto& entry) { return !entry.second.alive || entry.second.over; });
  };
  std::uint64_t handled = 0;
  while (!over() && faults_.empty()) {
    if (queue_.empty() || queue_.top().time > limit || ++handled > kMaxEvents) {
      fail("the job does not end");
      break;
    }
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    event.act();
    flush_coordinator();
  }
  if (faults_.empty()) check_end();
  return faults_;
}

void MemberWorld::fail(const std::string& what) {
  faults_.push_back(
      text("seed ", seed_, " at ", now_ - seconds(1000), ": ", what, "; ", described()));
}

std::string MemberWorld::described() const {
  std::string out = text("generation ", coordinator_->generation(), ", phase ",
                         static_cast<int>(coordinator_->phase()));
  for (const auto& [id, process] : processes_) {
    if (!process.alive) continue;
    out += text("; worker ", id, " on ", process.host, ": phase ",
                static_cast<int>(process.member.phase()), ", commit ", process.model.summary.commit,
                process.stopped ? ", stopped" : "", process.over ? ", over" : "",
                process.waits ? ", waits" : "");
  }
  return out;
}

void MemberWorld::cover(const std::string& what, bool when) { coverage_[what] += when ? 1 : 0; }

void MemberWorld::at(TimePoint time, std::function<void()> act) {
  queue_.push({time, ++events_, std::move(act)});
}

void MemberWorld::in(WorkerId id, std::function<void(Process&)> act) {
  Process& process = processes_.at(id);
  if (!process.alive || process.over) return;
  if (process.stopped) {
    process.held.push_back([this, id, act] { in(id, act); });
    return;
  }
  act(process);
  flush(process);
}

void MemberWorld::work(Process& process, Duration delay, std::function<void(Process&)> act) {
  after(delay, [this, id = process.id, epoch = process.epoch, act = std::move(act)] {
    in(id, [epoch, act](Process& later) {
      if (later.epoch == epoch) act(later);
    });
  });
}

void MemberWorld::carry(std::size_t index, TimePoint Host::*last, std::function<void()> act) {
  Host& host = hosts_[index];
  if (!host.alive || host.disconnected) return;
  if (host.cut) {
    host.held.push_back([this, index, last, act] { carry(index, last, act); });
    return;
  }
  host.*last = std::max(host.*last, now_ + between(30, random_.chance(5) ? 20'000 : 800));
  at(host.*last, std::move(act));
}

void MemberWorld::up(std::size_t host, std::function<void()> act) {
  carry(host, &Host::last_up, std::move(act));
}

void MemberWorld::down(std::size_t host, std::function<void()> act) {
  carry(host, &Host::last_down, std::move(act));
}

void MemberWorld::flush_coordinator() {
  for (const CoordinatorAction& action : coordinator_->take_actions()) {
    if (const auto* const kill_it = std::get_if<Kill>(&action)) {
      check_loss(*kill_it);
      // An agent may take a while to end a process.
      const Duration delay = random_.chance(25) ? between(0, 60'000) : Duration{};
      down(processes_.at(kill_it->worker).host,
           [this, delay, id = kill_it->worker] { after(delay, [this, id] { kill(id); }); });
      continue;
    }
    const auto& deliver = std::get<Deliver>(action);
    check_delivery(deliver);
    const wire::Bytes bytes = encode(deliver.message);
    down(processes_.at(deliver.to).host, [this, to = deliver.to, bytes] {
      in(to, [bytes](Process& process) { process.member.receive(decode_to_worker(bytes)); });
    });
  }
}

void MemberWorld::flush(Process& process) {
  for (auto actions = process.member.take_actions(); !actions.empty();
       actions = process.member.take_actions())
    for (const MemberAction& action : actions)
      std::visit([&](const auto& what) { act(process, what); }, action);
}

void MemberWorld::tick() {
  coordinator_->check(now_);
  flush_coordinator();
  if (coordinator_->outcome()) return;
  const TimePoint next = coordinator_->next_check(now_);
  at(std::min(std::max(next, now_ + std::chrono::microseconds(50)), now_ + milliseconds(5)),
     [this] { tick(); });
}

void MemberWorld::start(std::size_t host, bool spare) {
  const WorkerId id = ++last_id_;
  processes_.emplace(id, Process{.id = id, .host = host, .member = Member(id, "program 1")});
  Process& process = processes_.at(id);
  coordinator_->worker_started(id, hosts_[host].name, now_);
  process.slow = random_.chance(8);
  const bool dies = random_.chance(6);
  const bool hangs = !dies && random_.chance(2);
  if (dies) {
    process.disturbed = true;
    cover("a joiner dies");
    after(between(0, 40'000), [this, id] { kill(id); });
  }
  if (hangs) {
    process.disturbed = true;
    cover("a joiner never joins");
    return;
  }
  const Duration build = spare ? between(50'000, 300'000) : between(1'000, 30'000);
  after(build, [this, id] { in(id, [](Process& joiner) { joiner.member.join(); }); });
}

void MemberWorld::kill(WorkerId id) {
  Process& process = processes_.at(id);
  if (!process.alive) return;
  process.alive = false;
  break_connections(process);
  const std::size_t host = process.host;
  if (!hosts_[host].alive) return;
  // The agent detects the end, and hvdrun a little later.
  after(between(20, 2'000), [this, id, host] {
    up(host, [this, id, host] {
      coordinator_->worker_ended(id, "killed", now_);
      if (!coordinator_->outcome()) replace(host);
    });
  });
}

void MemberWorld::replace(std::size_t host) {
  if (!scenario_.replaces || last_id_ > 60) return;
  after(between(500, 60'000), [this, host] {
    if (coordinator_->outcome()) return;
    std::size_t place = host;
    if (!hosts_[place].alive || hosts_[place].disturbed)
      place = static_cast<std::size_t>(random_.below(scenario_.hosts));
    if (hosts_[place].alive && !hosts_[place].disturbed) start(place, false);
  });
}

void MemberWorld::agent_beats(std::size_t index) {
  Host& host = hosts_[index];
  if (!host.alive) return;
  if (host.lease.expired(now_)) {
    bool any = false;
    for (auto& [id, process] : processes_) {
      if (process.host != index || !process.alive) continue;
      any = true;
      kill(id);
    }
    cover("an agent's lease expires", any);
  }
  if (now_ >= host.lease.next_request()) {
    const std::uint64_t number = host.lease.request(now_);
    up(index, [this, index, number] {
      coordinator_->host_reported(hosts_[index].name, now_);
      down(index, [this, index, number] { hosts_[index].lease.answered(number); });
    });
  }
  after(milliseconds(10), [this, index] { agent_beats(index); });
}

void MemberWorld::stop(Process& process, Duration duration) {
  if (process.stopped || !process.alive) return;
  process.stopped = true;
  if (duration > deadlines_[Limit::kSilence] / 2) process.disturbed = true;
  after(duration, [this, id = process.id] {
    Process& again = processes_.at(id);
    again.stopped = false;
    for (auto& event : std::exchange(again.held, {})) event();
  });
}

void MemberWorld::cut(Host& host, Duration duration, bool isolates) {
  if (host.cut || !host.alive) return;
  host.cut = true;
  host.isolated = isolates;
  if (duration > deadlines_[Limit::kHeartbeat] / 4 || isolates) host.disturbed = true;
  const auto index = static_cast<std::size_t>(&host - hosts_.data());
  if (host.disturbed && random_.chance(40)) {
    cover("the connection of a host breaks");
    host.disconnected = true;
    after(between(100, 20'000), [this, name = host.name] { coordinator_->host_lost(name, now_); });
  }
  after(duration, [this, index] {
    Host& again = hosts_[index];
    again.cut = false;
    again.isolated = false;
    for (auto& message : std::exchange(again.held, {})) message();
  });
}

bool MemberWorld::reachable(const Process& a, const Process& b) const {
  if (a.host == b.host) return true;
  if (broken_.contains(std::minmax(a.host, b.host))) return false;
  const Host& one = hosts_[a.host];
  const Host& other = hosts_[b.host];
  return one.alive && other.alive && !one.isolated && !other.isolated;
}

// The work of a process.

void MemberWorld::act(Process& process, const Send& send) {
  const wire::Bytes bytes = encode(send.message);
  up(process.host, [this, id = process.id, bytes] {
    coordinator_->receive(id, decode_to_coordinator(bytes), now_);
  });
}

void MemberWorld::act(Process& process, const Leave&) { leave(process, true); }

/// Processes on other hosts detect the end of their connections to a process that dies or leaves.
void MemberWorld::break_connections(const Process& process) {
  const Generation generation = process.member.generation();
  for (const Seat& seat : process.assign.seats) {
    const Process& peer = processes_.at(seat.worker);
    if (peer.host == process.host || !reachable(process, peer)) continue;
    after(between(20, 400), [this, id = peer.id, broken = process.id, generation] {
      in(id, [broken, generation](Process& other) {
        if (other.member.generation() != generation) return;
        other.member.failed(broken, "its connection has ended");
      });
    });
  }
}

void MemberWorld::leave(Process& process, bool forced) {
  ++process.epoch;
  process.waits = false;
  // A commit that waits is carried out before the program's function is left.
  if (process.committing) commit(process, process.member.may_commit());
  process.inside = false;
  if (forced) break_connections(process);
  const Duration delay = process.slow ? between(1'000, 30'000) : between(10, 400);
  work(process, delay, [this](Process& later) {
    if (later.member.phase() != Member::Phase::kLeaving) return;
    later.received.clear();
    StateSummary own = later.model.summary;
    if (later.partial) own.kind = StateKind::kNone;
    later.member.left(own, scenario_.can_load, text("address of ", later.id),
                      scenario_.divided && own.kind != StateKind::kNone);
  });
}

void MemberWorld::act(Process& process, const Form& form) {
  if (form.assign.load && !scenario_.can_load && !starts_.empty()) fail("a state is loaded");
  ++process.epoch;
  process.assign = form.assign;
  process.rank = form.rank;
  if (form.assign.load && form.rank == form.assign.root) {
    if (process.model.summary.kind != StateKind::kNone && !process.partial)
      fail("a state is made although one exists");
    work(process, between(100, 5'000), [this](Process& later) {
      if (later.member.phase() != Member::Phase::kForming) return;
      later.partial = false;
      later.model.history = ++histories_;
      later.model.summary = {0, StateKind::kWhole, mix(histories_, 7)};
      cover("a state is loaded again", histories_ > 1);
      later.member.synced(later.assign.generation, later.model.summary);
    });
  } else if (form.receives) {
    // It is overwritten bit by bit.
    process.partial = true;
    process.model.summary.hash = mix(process.model.summary.hash, 13);
    work(process, between(50, 2'000), [this](Process& later) { receive_state(later); });
  } else {
    work(process, between(50, 2'000), [](Process& later) {
      later.model.summary.kind = StateKind::kWhole;
      later.member.synced(later.assign.generation, later.model.summary);
    });
  }
}

void MemberWorld::receive_state(Process& process) {
  if (process.member.phase() != Member::Phase::kForming) return;
  process.waits_since = now_;
  const WorkerId root_id = process.assign.seats[process.assign.root].worker;
  const auto available = [this, root_id](const Process& receiver) {
    const Process& root = processes_.at(root_id);
    return root.alive && !root.stopped && reachable(receiver, root) &&
           root.member.generation() == receiver.assign.generation &&
           root.member.phase() != Member::Phase::kForming;
  };
  if (!available(process)) {
    accuse_silent(process, {process.assign.root});
    work(process, milliseconds(20), [this](Process& later) { receive_state(later); });
    return;
  }
  // The second half arrives later: the root must not have changed it meanwhile.
  const Model first = processes_.at(root_id).model;
  work(process, between(50, 15'000), [this, first, root_id, available](Process& later) {
    if (later.member.phase() != Member::Phase::kForming) return;
    if (!available(later)) return receive_state(later);
    const Model& second = processes_.at(root_id).model;
    if (second.summary != first.summary) fail("the root changes its state while it gives it");
    later.partial = false;
    later.model = first;
    later.model.summary.kind = StateKind::kWhole;
    later.member.synced(later.assign.generation, later.model.summary);
  });
}

void MemberWorld::accuse_silent(Process& process, const std::vector<std::uint32_t>& missing) {
  for (const std::uint32_t rank : missing) {
    const Process& peer = processes_.at(process.assign.seats[rank].worker);
    const bool silent = !peer.alive || peer.stopped || !reachable(process, peer);
    if (!silent || now_ - process.waits_since < deadlines_[Limit::kSilence]) continue;
    cover("a peer is accused");
    process.member.failed(peer.id, "it is silent");
    return;
  }
}

void MemberWorld::act(Process& process, const Run&) {
  ++process.epoch;
  check_run(process);
  // It may be a state in which parameters had been written.
  process.committed[{process.model.history, process.model.summary.commit}] =
      process.model.summary.hash;
  process.inside = true;
  step(process);
}

void MemberWorld::step(Process& process) {
  if (process.model.summary.commit >= static_cast<Commit>(scenario_.steps)) {
    process.inside = false;
    process.member.at_end();
    return;
  }
  const Duration delay = between(50, 3'000) + std::exchange(process.rest, Duration{});
  work(process, delay, [this](Process& later) { contribute(later); });
}

void MemberWorld::contribute(Process& process) {
  const Generation generation = process.assign.generation;
  const Commit commit = process.model.summary.commit;
  const std::uint64_t value = mix(process.model.summary.hash, process.rank);
  check_store(process, generation);
  for (const Seat& seat : process.assign.seats)
    send(process.id, seat.worker, {generation, commit}, process.rank, value);
  process.waits = true;
  process.waits_since = now_;
  watch_peers(process);
}

/// Sends again until the hosts reach each other, as TCP does.
void MemberWorld::send(WorkerId from, WorkerId to, std::pair<Generation, Commit> step,
                       std::uint32_t rank, std::uint64_t value) {
  const Process& sender = processes_.at(from);
  if (!reachable(sender, processes_.at(to))) {
    if (!hosts_[sender.host].alive) return;
    return after(milliseconds(10), [=, this] { send(from, to, step, rank, value); });
  }
  after(from == to ? Duration{} : between(5, 400), [=, this] {
    in(to, [=, this](Process& receiver) {
      receiver.received[step][rank] = value;
      try_step(receiver);
    });
  });
}

void MemberWorld::watch_peers(Process& process) {
  work(process, deadlines_[Limit::kPing], [this](Process& later) {
    if (!later.waits) return;
    const auto& received = later.received[{later.assign.generation, later.model.summary.commit}];
    std::vector<std::uint32_t> missing;
    for (std::uint32_t rank = 0; rank < later.assign.seats.size(); ++rank)
      if (!received.contains(rank)) missing.push_back(rank);
    accuse_silent(later, missing);
    watch_peers(later);
  });
}

void MemberWorld::try_step(Process& process) {
  if (!process.waits) return;
  const auto& received =
      process.received[{process.assign.generation, process.model.summary.commit}];
  if (received.size() < process.assign.seats.size()) return;
  process.waits = false;
  std::uint64_t sum = 0;
  for (const auto& [rank, value] : received) sum += value;
  // The optimizer's step, and a little later the commit.
  process.model.summary.kind = StateKind::kTouched;
  process.model.summary.hash = mix(process.model.summary.hash, sum);
  work(process, between(5, 200), [this](Process& later) {
    later.committing = true;
    commit(later, later.member.begin_commit());
  });
}

/// Whether the ranks could not send each other their parts at this commit.
bool MemberWorld::fails_to_hand_on(const Process& process) const {
  return fails_ && process.assign.generation + 1 == fails_->next &&
         process.model.summary.commit + 1 == fails_->commit;
}

void MemberWorld::commit(Process& process, Member::Verdict verdict) {
  if (verdict == Member::Verdict::kWait) return cover("a commit waits for its verdict");
  process.committing = false;
  if (verdict == Member::Verdict::kStop && fails_to_hand_on(process)) {
    cover("a commit at which the members change fails");
    process.model.summary.kind = StateKind::kWhole;
    process.model.summary.hash =
        process.committed.at({process.model.history, process.model.summary.commit});
    if (process.member.phase() != Member::Phase::kLeaving || !process.inside) return;
    process.inside = false;
    return leave(process, false);
  }
  // A lost member can complete at most the step for which it has all contributions.
  if (!starts_.empty() && starts_.rbegin()->first > process.assign.generation &&
      ++process.late_commits > 1)
    fail(text("worker ", process.id, " goes on in generation ", process.assign.generation));
  process.received.erase({process.assign.generation, process.model.summary.commit});
  ++process.model.summary.commit;
  process.model.summary.kind = StateKind::kWhole;
  process.committed[{process.model.history, process.model.summary.commit}] =
      process.model.summary.hash;
  if (verdict == Member::Verdict::kGoOn) return step(process);
  if (process.member.phase() == Member::Phase::kLeaving && process.inside) {
    process.inside = false;
    leave(process, false);
  }
}

void MemberWorld::act(Process& process, const Wake&) {
  if (process.committing) commit(process, process.member.may_commit());
}

void MemberWorld::act(Process& process, const Finish&) { process.over = true; }

void MemberWorld::act(Process& process, const Exit&) { kill(process.id); }

}  // namespace hvd::member::testing
