#include "sim/protocol_sim.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "hvd/error.h"
#include "negotiation/validator.h"

namespace hvd::sim {
namespace {

// Far longer than the longest scenario: every wait in it ends within kStallShutdown.
constexpr Duration kLongestRun = std::chrono::minutes(10);

testing::ControlWorld::Options options_for(const Scenario& scenario) {
  testing::ControlWorld::Options options;
  options.coordinator.fusion_threshold = scenario.fusion_threshold;
  options.coordinator.cache_capacity = scenario.cache_capacity;
  options.coordinator.stall = {kStallWarning, kStallShutdown};
  // Two ranks per host, so that the hosts have leaders.
  options.coordinator.host_of_rank = testing::hosts_of_ranks(scenario.ranks, 2);
  options.radix = scenario.tree_radix;
  options.longest_hold = scenario.longest_hold;
  return options;
}

// Prints the properties that must be equal on every rank. An allgather's first dimension may
// differ.
void describe(std::ostream& out, const wire::Response& operation) {
  wire::Request request = operation.request;
  if (request.kind == OpKind::kAllgather) request.shape[0] = 0;
  for (const auto byte : wire::encode(request)) out << std::to_integer<int>(byte) << ' ';
  for (const auto dim : operation.first_dims) out << dim << ',';
  out << ';';
}

std::string describe(const control::Applied& applied) {
  std::ostringstream out;
  for (const auto& error : applied.errors) out << error.name << ": " << error.message << '|';
  for (const auto& batch : applied.batches) {
    for (const auto& operation : batch.operations) describe(out, operation);
    out << '|';
  }
  out << applied.shutdown;
  return out.str();
}

}  // namespace

void EventLoop::at(TimePoint when, std::function<void()> action) {
  events_.push(
      {std::max(when, now_), count_++, std::make_shared<std::function<void()>>(std::move(action))});
}

bool EventLoop::step() {
  if (events_.empty()) return false;
  const Event event = events_.top();
  events_.pop();
  now_ = event.when;
  (*event.action)();
  return true;
}

ProtocolSim::ProtocolSim(const Scenario& scenario)
    : scenario_(scenario),
      random_(scenario.seed),
      world_(
          [this] {
            testing::ControlWorld::Options options = options_for(scenario_);
            options.on_merged = [this](int rank, const wire::Report& merged) {
              record_merged(rank, merged);
            };
            return options;
          }(),
          [this](int from, int to, wire::Bytes bytes) { deliver(from, to, std::move(bytes)); }),
      ranks_(static_cast<std::size_t>(scenario.ranks)) {}

Outcome ProtocolSim::run() {
  for (int rank = 0; rank < scenario_.ranks; ++rank) {
    loop_.after(pick_up_to(random_, scenario_.longest_delay), [this, rank] { begin_step(rank); });
  }
  const auto all_done = [this] {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.done; });
  };
  while (!all_done() && loop_.now() < kLongestRun && outcome_.complaints.size() < 5) {
    if (!loop_.step()) break;
  }
  outcome_.ended = all_done();
  inspect_end();
  return std::move(outcome_);
}

void ProtocolSim::begin_step(int rank) {
  Rank& self = at(rank);
  const auto leaves = scenario_.leaves_after.find(rank);
  const bool leaving = leaves != scenario_.leaves_after.end() && self.step >= leaves->second;
  if (leaving || self.step == scenario_.steps.size()) {
    world_.negotiator(rank).request_shutdown();
    return send_report(rank);
  }
  plan_submissions(rank, scenario_.steps[self.step++]);
  if (self.outstanding == 0) loop_.after(Duration(1), [this, rank] { begin_step(rank); });
}

void ProtocolSim::plan_submissions(int rank, const Step& step) {
  Rank& self = at(rank);
  std::vector<std::vector<wire::Request>>
      orderly;  // unnamed: every rank submits them in the same order
  std::vector<std::vector<wire::Request>> shuffled;
  for (const Unit& unit : step) {
    std::vector<wire::Request> requests;
    for (const Use& use : unit) {
      const std::string& name = use.request.name;
      if (use.skipped_by.contains(rank)) {
        ++self.owed[name];
        continue;
      }
      const int times = use.request.unnamed ? 1 : 1 + std::exchange(self.owed[name], 0);
      self.outstanding += static_cast<std::size_t>(times);
      requests.insert(requests.end(), static_cast<std::size_t>(times), use.asked_by(rank));
    }
    if (requests.empty()) continue;
    const auto late = unit.front().late.find(rank);
    if (late != unit.front().late.end()) {
      loop_.after(late->second, [this, rank, requests] { submit(rank, requests); });
    } else if (requests.front().unnamed) {
      orderly.push_back(std::move(requests));
    } else if (scenario_.split_groups) {
      for (auto& request : requests) shuffled.push_back({std::move(request)});
    } else {
      shuffled.push_back(std::move(requests));
    }
  }
  for (std::size_t i = shuffled.size(); i > 1; --i) {
    std::swap(
        shuffled[i - 1],
        shuffled[static_cast<std::size_t>(pick(random_, 0, static_cast<std::int64_t>(i) - 1))]);
  }
  auto position = static_cast<std::int64_t>(shuffled.size());
  for (auto unit = orderly.rbegin(); unit != orderly.rend(); ++unit) {
    position = pick(random_, 0, position);
    shuffled.insert(shuffled.begin() + position, std::move(*unit));
  }
  Duration when{};
  for (auto& requests : shuffled) {
    when += pick_up_to(random_, scenario_.longest_think);
    loop_.after(when, [this, rank, requests] { submit(rank, requests); });
  }
}

void ProtocolSim::submit(int rank, std::vector<wire::Request> requests) {
  Rank& self = at(rank);
  for (wire::Request& request : requests) {
    if (request.unnamed) {
      request.ordinal =
          self.next_ordinal[request.in_sequence ? "" : std::string(to_string(request.kind))]++;
      request.name = wire::unnamed_name(request, request.ordinal);
    }
    if (self.in_flight.contains(request.name)) {
      self.waiting_turn[request.name].push_back(std::move(request));
    } else {
      submit_one(rank, std::move(request));
    }
  }
  // Several submissions within a short time go into one report, as they do when an engine is busy.
  loop_.after(Duration(pick(random_, 0, 3)), [this, rank] { send_report(rank); });
}

void ProtocolSim::submit_one(int rank, wire::Request request) {
  Rank& self = at(rank);
  const std::string name = request.name;
  auto& uses = outcome_.uses[name];
  const std::size_t use = self.uses_begun[name]++;
  if (uses.size() <= use) uses.resize(use + 1);
  uses[use][rank].request = request;
  self.in_flight.emplace(name, request);
  const auto error = world_.negotiator(rank).submit(std::move(request));
  if (!error) return;
  ++outcome_.tombstones;
  loop_.after(Duration(0), [this, rank, name, error = *error] {
    end_use(rank, name, error.code, error.message);
    send_report(rank);
  });
}

void ProtocolSim::send_report(int rank) { go_on(rank, world_.report(rank, loop_.now())); }

void ProtocolSim::record_merged(int rank, const wire::Report& merged) {
  outcome_.merged += merged.applied.empty() || count(merged.applied.front().ranks) > 1 ? 1 : 0;
  outcome_.overdue += merged.overdue ? 1 : 0;
  // The messages of other ranks are decoded by their receivers.
  if (rank == 0 && std::get<wire::Report>(wire::decode(wire::encode(merged))) != merged)
    complain(rank, "its merged report is another message when decoded");
}

// Called after this rank has sent or received a message.
void ProtocolSim::go_on(int rank, bool coordinator_accepted) {
  if (coordinator_accepted) coordinate();
  const auto& aggregator = world_.aggregator(rank);
  const auto deadline = aggregator ? aggregator->deadline() : std::nullopt;
  if (!deadline || at(rank).watched_hold == deadline) return;
  at(rank).watched_hold = deadline;
  loop_.at(*deadline, [this, rank] {
    const auto due = world_.aggregator(rank)->deadline();
    if (due && *due <= loop_.now()) go_on(rank, world_.forward(rank, loop_.now()));
  });
}

void ProtocolSim::publish(const wire::Bytes& plan) {
  if (scenario_.tree_radix > 0) return deliver(0, 0, plan);
  for (int rank = 0; rank < scenario_.ranks; ++rank) deliver(0, rank, plan);
}

void ProtocolSim::end_use(int rank, const std::string& name, StatusCode code,
                          const std::string& message) {
  Rank& self = at(rank);
  if (self.in_flight.erase(name) == 0)
    return complain(rank, "'" + name + "' ends, but is not in flight");
  Record& record = outcome_.uses[name][self.uses_begun[name] - 1][rank];
  ++record.endings;
  record.code = code;
  record.message = message;
  if (auto next = self.waiting_turn.find(name);
      next != self.waiting_turn.end() && !next->second.empty()) {
    wire::Request request = std::move(next->second.front());
    next->second.pop_front();
    submit_one(rank, std::move(request));
  }
  if (--self.outstanding == 0) {
    loop_.after(pick_up_to(random_, scenario_.longest_think), [this, rank] { begin_step(rank); });
  }
}

void ProtocolSim::deliver(int from, int to, wire::Bytes bytes) {
  ++outcome_.messages;
  TimePoint& last = last_arrival_[{from, to}];
  last = std::max(last + Duration(1), loop_.now() + pick_up_to(random_, scenario_.longest_delay));
  loop_.at(last, [this, from, to, bytes = std::move(bytes)] { receive(from, to, bytes); });
}

void ProtocolSim::receive(int from, int to, const wire::Bytes& bytes) {
  try {
    const wire::AnyMessage message = wire::decode(bytes);
    if (const auto* plan = std::get_if<wire::Plan>(&message)) return apply(to, *plan);
    for (const auto& applied : std::get<wire::Report>(message).applied)
      outcome_.stale_reports += applied.last_applied < latest_plan_ ? 1 : 0;
    go_on(to, world_.accept(to, message, loop_.now()));
  } catch (const std::exception& error) {
    complain(to, std::string("message from rank ") + std::to_string(from) + ": " + error.what());
  }
}

void ProtocolSim::coordinate() {
  outcome_.warnings += world_.coordinator().stall_warnings(loop_.now()).size();
  const auto ahead = [this](int, DeviceType) { return at(0).batches_in_flight; };
  while (const auto plan = world_.coordinator().decide(loop_.now(), ahead)) {
    ++outcome_.plans;
    latest_plan_ = plan->sequence;
    for (const auto& batch : plan->batches) outcome_.fused += batch.tensors.size() > 1 ? 1 : 0;
    publish(wire::encode(*plan));
  }
  outcome_.max_displaced =
      std::max(outcome_.max_displaced, world_.coordinator().displaced_entries());
  watch_deadline();
}

void ProtocolSim::watch_deadline() {
  const auto deadline = world_.coordinator().next_deadline();
  if (!deadline ||
      (watched_deadline_ && *watched_deadline_ <= *deadline && *watched_deadline_ > loop_.now()))
    return;
  watched_deadline_ = *deadline;
  loop_.at(*deadline, [this, when = *deadline] {
    if (watched_deadline_ == when) watched_deadline_.reset();
    coordinate();
  });
}

void ProtocolSim::apply(int rank, const wire::Plan& plan) {
  Rank& self = at(rank);
  for (const int child : world_.place(rank).children) deliver(rank, child, wire::encode(plan));
  const control::Applied applied = world_.apply(rank, plan);
  if (world_.aggregator(rank)) go_on(rank, world_.forward(rank, loop_.now()));
  compare_with_others(rank, plan.sequence, applied);
  for (const auto& error : applied.errors) end_use(rank, error.name, error.code, error.message);
  for (const auto& batch : applied.batches) execute(rank, batch);
  if (applied.shutdown) {
    if (self.done) complain(rank, "a second shutdown");
    self.done = true;
  }
  send_report(rank);
}

void ProtocolSim::execute(int rank, const control::AgreedBatch& batch) {
  Rank& self = at(rank);
  std::vector<std::string> names;
  for (const auto& operation : batch.operations) {
    const auto asked = self.in_flight.find(operation.request.name);
    if (asked == self.in_flight.end())
      return complain(rank, "runs '" + operation.request.name + "' unasked");
    if (asked->second != operation.request)
      complain(rank, "runs another '" + operation.request.name + "' than it asked for");
    names.push_back(operation.request.name);
  }
  ++self.batches_in_flight;
  self.lane_free =
      std::max(self.lane_free, loop_.now()) + pick_up_to(random_, scenario_.longest_execution);
  loop_.at(self.lane_free, [this, rank, names] {
    --at(rank).batches_in_flight;
    for (const auto& name : names) end_use(rank, name, StatusCode::kOk, "");
    send_report(rank);
    if (rank == 0) coordinate();
  });
}

void ProtocolSim::compare_with_others(int rank, std::uint64_t sequence,
                                      const control::Applied& applied) {
  // An error concerns only the ranks that have submitted the operation. UseJudge checks how the
  // uses ended.
  control::Applied common = applied;
  common.errors.clear();
  std::string text = describe(common);
  if (sequence == applied_.size() + 1) {
    applied_.push_back(std::move(text));
  } else if (sequence > applied_.size() || applied_[sequence - 1] != text) {
    complain(rank, "differs in its effects of plan " + std::to_string(sequence));
  }
}

void ProtocolSim::inspect_end() {
  for (int rank = 0; rank < scenario_.ranks; ++rank) {
    const Rank& self = at(rank);
    const control::Negotiator& negotiator = world_.negotiator(rank);
    outcome_.by_bit += negotiator.reported_by_bit();
    if (!self.done) {
      complain(rank, "hangs in step " + std::to_string(self.step) + " with " +
                         std::to_string(self.outstanding) + " operations outstanding" +
                         (self.in_flight.empty()
                              ? ""
                              : ", one is " + control::describe(self.in_flight.begin()->second)));
    } else if (negotiator.last_applied() != outcome_.plans || negotiator.awaiting() != 0) {
      complain(rank, "has not applied every plan or still waits for one");
    }
    compare_caches(rank);
  }
  outcome_.displaced_at_end = world_.coordinator().displaced_entries();
  outcome_.failed_uses_at_end = world_.coordinator().failed_uses();
}

void ProtocolSim::compare_caches(int rank) {
  const control::ResponseCache& here = world_.negotiator(rank).cache();
  const control::ResponseCache& decides = world_.coordinator().cache();
  bool equal = here.size() == decides.size();
  for (std::uint32_t slot = 0; slot < decides.size() && equal; ++slot) {
    equal = here.holds(slot) && decides.holds(slot) &&
            here.at(slot).request == decides.at(slot).request &&
            here.at(slot).first_dims == decides.at(slot).first_dims;
  }
  if (!equal) complain(rank, "its cache differs from the coordinator's");
}

void ProtocolSim::complain(int rank, const std::string& what) {
  std::ostringstream out;
  out << "seed " << scenario_.seed << ", t = " << std::chrono::duration<double>(loop_.now()).count()
      << " s, rank " << rank << ": " << what;
  outcome_.complaints.push_back(out.str());
}

}  // namespace hvd::sim
