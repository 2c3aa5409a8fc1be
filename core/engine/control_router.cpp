#include "engine/control_router.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

/// The host of a rank, and in an elastic job its worker, for texts.
std::string describe_host(int rank, const RuntimeOptions& options, const Topology& topology) {
  const auto index = static_cast<std::size_t>(rank);
  if (index >= options.worker_of_rank.size()) return topology.host_name(rank);
  return text(topology.host_name(rank), ", worker ", options.worker_of_rank[index]);
}

std::unique_ptr<control::Coordinator> make_coordinator(const RuntimeOptions& options,
                                                       const Topology& topology, bool may_repeat) {
  if (topology.rank != 0) return nullptr;
  control::CoordinatorOptions coordinator;
  coordinator.fusion_threshold = options.fusion_threshold;
  coordinator.cache_capacity = options.cache_capacity;
  coordinator.schedule_lock = may_repeat;
  coordinator.replays_sets = topology.host_names.size() == 1;
  coordinator.stall = {options.stall_warning, options.stall_shutdown, options.deadlock_timeout};
  coordinator.host_of_rank.clear();
  for (int rank = 0; rank < topology.size; ++rank)
    coordinator.host_of_rank.push_back(describe_host(rank, options, topology));
  return std::make_unique<control::Coordinator>(std::move(coordinator),
                                                control::ProcessSetTable(topology.size));
}

control::TreePlace find_place(const RuntimeOptions& options, const Topology& topology) {
  if (!control::needs_tree(topology, options.control_radix)) return {};
  return control::place_in_tree(topology, topology.rank, options.control_radix);
}

std::vector<int> ranks_from_one(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size) - 1);
  std::iota(ranks.begin(), ranks.end(), 1);
  return ranks;
}

// A plan is sent to the ranks below this one in the tree. Without a tree, rank 0 sends it to all
// other ranks.
std::vector<int> find_receivers(const control::TreePlace& place, const Topology& topology) {
  if (topology.rank != 0 || !place.children.empty()) return place.children;
  return ranks_from_one(topology.size);
}

// The coordinator must receive a report well before it warns of a stall.
Duration longest_hold(const RuntimeOptions& options) {
  Duration longest = std::chrono::seconds(1);
  for (const Duration limit : {options.stall_warning, options.stall_shutdown}) {
    if (limit > Duration::zero()) longest = std::min(longest, limit / 8);
  }
  return longest;
}

// Returns two ranks of each other host, which then report the loss to the ranks of their host. The
// coordinator sends the loss to all ranks too, but it may hang for the same reason as any rank that
// had a connection to the lost rank.
std::vector<int> ranks_to_notify(const Topology& topology) {
  std::vector<int> relays;
  constexpr int kRanksPerHost = 2;
  std::vector<int> found(topology.host_names.size(), 0);
  found[static_cast<std::size_t>(topology.host_index())] = kRanksPerHost;
  for (int rank = 1; rank < topology.size; ++rank) {
    const auto host =
        static_cast<std::size_t>(topology.host_of_rank[static_cast<std::size_t>(rank)]);
    if (found[host] == kRanksPerHost) continue;
    ++found[host];
    relays.push_back(rank);
  }
  return relays;
}

}  // namespace

ControlRouter::ControlRouter(const RuntimeOptions& options, const Parts& parts, bool may_repeat)
    : control_(parts.control),
      counters_(parts.counters),
      time_(parts.time),
      watch_(parts.watch),
      negotiator_(parts.negotiator),
      sender_(parts.control, parts.counters),
      place_(find_place(options, parts.control.topology())),
      receivers_(find_receivers(place_, parts.control.topology())),
      coordinator_(make_coordinator(options, parts.control.topology(), may_repeat)) {
  if (!place_.children.empty())
    aggregator_.emplace(place_.subtree, negotiator_, longest_hold(options));
  control_.expect_messages(neighbours());
}

std::vector<int> ControlRouter::neighbours() const {
  std::vector<int> ranks = receivers_;
  if (!coordinator_) ranks.push_back(std::max(place_.parent, 0));
  return ranks;
}

void ControlRouter::report(const wire::Report& report) {
  if (aggregator_) {
    aggregator_->accept(report, time_.now());
  } else if (coordinator_) {
    count_local_message();
    coordinator_->accept(report, time_.awake());
  } else {
    sender_.send(std::max(place_.parent, 0), wire::encode(report));
  }
  counters_.negotiated_operations.store(negotiator_.reported_in_full() +
                                        negotiator_.reported_by_bit());
  counters_.cached_operations.store(negotiator_.reported_by_bit());
}

// A message from rank 0 to itself counts as sent and as received.
void ControlRouter::count_local_message() noexcept {
  counters_.control_messages_sent.add(1);
  counters_.control_messages_received.add(1);
}

bool ControlRouter::forward_reports() {
  if (!aggregator_) return false;
  const auto merged = aggregator_->next_report(time_.now());
  if (!merged) return false;
  if (coordinator_) {
    coordinator_->accept(*merged, time_.awake());
  } else {
    sender_.send(place_.parent, wire::encode(*merged));
  }
  return true;
}

void ControlRouter::report_blocked() {
  if (coordinator_) {
    count_local_message();
    return coordinator_->record_blocked(control_.rank(), negotiator_.last_applied());
  }
  sender_.send(0, wire::encode(wire::Blocked{negotiator_.last_applied()}));
}

void ControlRouter::ask(const wire::WaitQuestion& question) {
  if (!coordinator_) return sender_.send(0, wire::encode(question));
  count_local_message();
  coordinator_->ask(control_.rank(), question, time_.awake());
}

void ControlRouter::reply(const wire::WaitReply& reply) {
  if (!coordinator_) return sender_.send(0, wire::encode(reply));
  count_local_message();
  coordinator_->accept(control_.rank(), reply);
}

std::vector<wire::AnyMessage> ControlRouter::send_wait_messages() {
  std::vector<wire::AnyMessage> own;
  for (auto& [rank, message] : coordinator_->wait_messages(time_.awake())) {
    if (rank == control_.rank()) {
      count_local_message();
      own.push_back(std::move(message));
    } else if (const auto* const probe = std::get_if<wire::WaitProbe>(&message)) {
      sender_.send(rank, wire::encode(*probe));
    } else {
      sender_.send(rank, wire::encode(std::get<wire::WaitAnswer>(message)));
    }
  }
  return own;
}

void ControlRouter::on_replay_left(int process_set, std::uint64_t batches_run) {
  if (coordinator_) return coordinator_->end_replay(process_set, batches_run);
  const auto& sets = negotiator_.process_sets();
  if (process_set == 0 || !sets.contains(process_set) ||
      sets.ranks(process_set).front() != control_.rank())
    return;
  sender_.send(0, wire::encode(wire::ReplayLeft{process_set, batches_run}));
}

bool ControlRouter::decide(const control::BatchesAhead& ahead) {
  if (!coordinator_ || own_plan_) return false;
  auto plan = coordinator_->decide(time_.awake(time_.step()), ahead);
  if (!plan) return false;
  if (!receivers_.empty()) sender_.send(receivers_, coordinator_->encode(*plan));
  own_plan_ = std::move(plan);
  count_local_message();
  return true;
}

void ControlRouter::pass_down(const wire::Plan& plan) {
  if (aggregator_ && !coordinator_) sender_.send(receivers_, wire::encode(plan));
}

void ControlRouter::on_applied(const wire::Plan& plan) {
  last_plan_at_ = time_.now();
  watch_.on_message_from(0);  // even when another rank has passed the plan on
  if (aggregator_) aggregator_->apply(plan);
  counters_.plans_applied.add(1);
}

std::optional<ControlRouter::Received> ControlRouter::receive() {
  if (own_plan_) return Received{*std::exchange(own_plan_, std::nullopt), control_.rank()};
  auto message = control_.poll();
  if (!message) return std::nullopt;
  counters_.control_messages_received.add(1);
  auto decoded = [&] {
    try {
      return wire::decode(message->bytes, known_items());
    } catch (const wire::WireError& error) {
      throw Error(text("rank ", control_.rank(), " received a corrupt message from rank ",
                       message->source, ": ", error.what()));
    }
  }();
  watch_.on_message_from(message->source);
  const bool moves = !std::holds_alternative<wire::Blocked>(decoded);
  return Received{handle(message->source, std::move(decoded)), message->source,
                  std::move(message->bytes), moves};
}

ControlRouter::Payload ControlRouter::handle(int source, wire::AnyMessage message) {
  if (auto* plan = std::get_if<wire::Plan>(&message)) return std::move(*plan);
  if (auto* update = std::get_if<wire::ReplayUpdate>(&message)) return *update;
  if (auto* abort = std::get_if<wire::Abort>(&message)) return std::move(*abort);
  if (auto* step = std::get_if<wire::PointMessage>(&message)) return std::move(*step);
  if (auto* report = std::get_if<wire::Report>(&message)) on_report(source, std::move(*report));
  if (const auto* blocked = std::get_if<wire::Blocked>(&message);
      blocked != nullptr && coordinator_) {
    coordinator_->record_blocked(source, blocked->last_applied);
  }
  if (const auto* left = std::get_if<wire::ReplayLeft>(&message); left != nullptr && coordinator_)
    coordinator_->end_replay(left->process_set, left->batches_run);
  if (auto* probe = std::get_if<wire::WaitProbe>(&message)) return std::move(*probe);
  if (auto* answer = std::get_if<wire::WaitAnswer>(&message)) return std::move(*answer);
  if (const auto* question = std::get_if<wire::WaitQuestion>(&message)) {
    if (!coordinator_) refuse(source, "sent a question", ", which does not coordinate");
    coordinator_->ask(source, *question, time_.awake());
  }
  if (const auto* reply = std::get_if<wire::WaitReply>(&message)) {
    if (!coordinator_) refuse(source, "sent a reply", ", which does not coordinate");
    coordinator_->accept(source, *reply);
  }
  if (std::holds_alternative<wire::Ping>(message)) {
    if (coordinator_) watch_.on_ping();
    sender_.send(source, wire::encode(wire::Pong{}));
  }
  return {};
}

void ControlRouter::on_report(int source, wire::Report report) {
  for (const auto& applied : report.applied) watch_.on_message_from(applied.ranks);
  if (aggregator_) return aggregator_->accept(std::move(report), time_.now());
  if (!coordinator_) refuse(source, "reported", ", which does not coordinate");
  const RankSet sender(source);
  for (const auto& applied : report.applied) {
    if (contains(sender, applied.ranks)) continue;
    refuse(source, "sent merged reports",
           ", which has no ranks below it; set HVD_CONTROL_RADIX to the same value on every rank");
  }
  coordinator_->accept(report, time_.awake());
}

void ControlRouter::refuse(int source, const std::string& what, const std::string& why) const {
  throw Error(text("rank ", source, " ", what, " to rank ", control_.rank(), why));
}

void ControlRouter::broadcast_failure(const wire::Abort& abort) {
  const wire::Bytes bytes = wire::encode(abort);
  if (coordinator_) return control_.send(ranks_from_one(control_.size()), bytes);
  std::exception_ptr failure;
  try {
    control_.send(0, bytes);
  } catch (const std::exception&) {  // rank 0 may be the lost rank
    failure = std::current_exception();
  }
  control_.send(ranks_to_notify(control_.topology()), bytes);
  if (failure) std::rethrow_exception(failure);
}

void ControlRouter::notify_suspect(const wire::Abort& abort) {
  const int lost = abort.cause.rank;
  const int deputy = lost == 1 ? 2 : 1;
  if (lost < 0 || control_.rank() != deputy || !control_.may_send_to_lost()) return;
  control_.send(lost, wire::encode(abort));
}

void ControlRouter::log_stalls() {
  if (!coordinator_) return;
  for (const auto& text : coordinator_->resumptions()) HVD_LOG(kWarning) << text;
  for (const auto& text : coordinator_->stall_warnings(time_.awake(time_.step()))) {
    counters_.stalls.add(1);
    HVD_LOG(kWarning) << text;
  }
}

bool ControlRouter::waiting() const noexcept {
  return (aggregator_ && aggregator_->holds_anything()) ||
         (coordinator_ && (coordinator_->waiting() || watch_.pinged()));
}

std::optional<TimePoint> ControlRouter::deadline() const {
  std::optional<TimePoint> next = aggregator_ ? aggregator_->deadline() : std::nullopt;
  if (!coordinator_) return next;
  if (const auto stalls = coordinator_->next_deadline()) {
    const TimePoint then = time_.on_the_clock(*stalls);
    next = next ? std::min(*next, then) : then;
  }
  return next;
}

std::vector<std::string> ControlRouter::waiting_texts(std::size_t most) const {
  if (!coordinator_) return {};
  return coordinator_->waiting_texts(time_.awake(), most);
}

}  // namespace hvd::runtime
