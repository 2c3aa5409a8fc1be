#include "engine/engine.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "base/log.h"
#include "control/validator.h"
#include "hvd/error.h"
#include "observe/supervisor_notice.h"

namespace hvd::runtime {
namespace {

// Ranks on other hosts cannot be seen through shared memory, so they are asked: the coordinator
// asks all, the others ask it.
std::vector<int> ranks_to_ask(const control::ControlPlane& control) {
  if (control.rung_by_all()) return {};
  if (control.rank() != 0) return {0};
  std::vector<int> others(static_cast<std::size_t>(control.size()) - 1);
  std::iota(others.begin(), others.end(), 1);
  return others;
}

std::unique_ptr<control::Coordinator> make_coordinator(const RuntimeOptions& options,
                                                       const Topology& topology,
                                                       bool lock_available) {
  if (topology.rank != 0) return nullptr;
  control::CoordinatorOptions coordinator;
  coordinator.fusion_threshold = options.fusion_threshold;
  coordinator.cache_capacity = options.cache_capacity;
  coordinator.schedule_lock = lock_available;
  coordinator.stall = {options.stall_warning, options.stall_shutdown, options.deadlock_timeout};
  coordinator.host_of_rank.clear();
  for (int rank = 0; rank < topology.size; ++rank)
    coordinator.host_of_rank.push_back(topology.host_name(rank));
  return std::make_unique<control::Coordinator>(std::move(coordinator),
                                                control::ProcessSetTable(topology.size));
}

control::TreePlace find_place(const RuntimeOptions& options, const Topology& topology) {
  if (!control::needs_tree(topology, options.control_radix)) return {};
  return control::place_in_tree(topology, topology.rank, options.control_radix);
}

// The coordinator learns of a stall only from what it has been told, so in good time before it says
// something.
Duration longest_hold(const RuntimeOptions& options) {
  Duration longest = std::chrono::seconds(1);
  for (const Duration limit : {options.stall_warning, options.stall_shutdown}) {
    if (limit > Duration::zero()) longest = std::min(longest, limit / 8);
  }
  return longest;
}

/// @pre it could be decoded
wire::MessageKind kind_of(const control::Message& message) {
  return static_cast<wire::MessageKind>(message.bytes[2]);
}

Status status_of(const std::exception& error) {
  if (const auto* lost = dynamic_cast<const PeerLostError*>(&error)) {
    return {StatusCode::kPeerLost, lost->what(), lost->rank()};
  }
  return {StatusCode::kInternal, error.what(), -1};
}

}  // namespace

Engine::Engine(const RuntimeOptions& options, EngineParts parts, OnEnd on_end)
    : options_(options),
      counters_(parts.counters),
      on_end_(std::move(on_end)),
      control_(std::move(parts.control)),
      front_(control::ProcessSetTable(control_->size())),
      time_(parts.clock, options_.peer_timeout / 4),
      negotiator_(control_->rank(), *front_.process_sets(), options_.cache_capacity),
      place_(find_place(options_, control_->topology())),
      executor_({control_->topology(), *control_, parts.clock, counters_, parts.timeline,
                 std::move(parts.arena), std::move(parts.device), options_.stall_shutdown},
                std::move(parts.backends), options_.backend,
                [this](const OperationPtr& operation, const Status& status, const EventPtr& ready,
                       bool in_flight) { finish(operation, status, ready, in_flight); }),
      steady_(options_, *control_, executor_, counters_),
      coordinator_(make_coordinator(options_, control_->topology(), steady_.available())),
      liveness_(ranks_to_ask(*control_), options_.peer_timeout) {
  if (!place_.children.empty())
    aggregator_.emplace(place_.subtree, negotiator_, longest_hold(options_));
  control_->beat(time_.step());
}

Engine::~Engine() = default;

// Note [The device of MPI's calls]: a CUDA-aware MPI gets on with a message in whichever call looks
// after messages, also one for another message, and makes its events and copies in the context that
// the calling thread has current then; with another one, or none, they fail, or do not wait
// (github.com/open-mpi/ompi/issues/13836). So once a channel carries the device's memory, the
// device is current for the whole of every round, control messages included, and nothing is
// launched on such a channel in the round that opens it.

bool Engine::step(Callbacks callbacks) noexcept {
  bool moved = false;
  time_.begin_step();
  try {
    std::optional<device::DeviceGuard> current;
    if (device::Context* const device = executor_.device_to_be_current())
      current.emplace(device->api(), device->device());
    if (const auto cause = front_.failed() ? std::nullopt : front_.outside_failure())
      fail(*cause, true);
    if (front_.failed()) {
      dump_state_if_asked();
      end_outstanding(front_.failure());
      while (!control_broken_ && control_->poll()) moved = true;  // moves what is still being sent
      return moved;
    }
    moved = take_submissions(callbacks) || moved;
    moved = run_steady() || moved;
    // Before this rank reports that it has left: after that the ranks of this host may enter the
    // next lock, and their words no longer say that one left (MUT_REPORT in
    // test/models/lock_relay.pml).
    while (steady_.relay()) moved = run_steady() || moved;
    moved = send_report() || moved;
    moved = receive() || moved;
    moved = pass_on() || moved;
    moved = coordinate() || moved;
    moved = executor_.progress() || moved;
    moved = keep_house() || moved;
    dump_state_if_asked();
    if (shutdown_agreed_ && !executor_.active() && executor_.device_queue().empty())
      front_.set_shut_down();
  } catch (const std::exception& error) {
    if (front_.failed()) control_broken_ = true;
    if (!front_.failed()) fail(explained(status_of(error)), true);
    return !control_broken_;
  }
  return moved;
}

bool Engine::take_submissions(Callbacks callbacks) {
  if (!front_.has_submissions()) return false;
  front_.take(taken_, callbacks);
  for (std::size_t next = 0; next < taken_.size(); ++next) {
    try {
      begin(taken_[next]);
    } catch (...) {
      front_.enqueue(std::span(taken_).subspan(next));  // they end with the cause
      taken_.clear();
      throw;
    }
  }
  const bool moved = !taken_.empty();
  taken_.clear();
  return moved;
}

void Engine::begin(const OperationPtr& operation) {
  counters_.bytes.fetch_add(operation->submission.input.bytes(), std::memory_order_relaxed);
  operation->order = begun_++;
  std::optional<wire::ErrorEntry> error;
  try {
    error = steady_.repeating() ? negotiator_.take_failure(operation->request)
                                : negotiator_.submit(operation->request);
  } catch (const UsageError& problem) {
    // The process set has been removed since submit() looked.
    return finish(operation, {StatusCode::kUsage, problem.what(), -1}, nullptr, false);
  }
  if (error) return end_with(operation, *error);
  blocked_since_.reset();  // and a thread that waits still does
  if (steady_.repeating() && steady_.offer(operation, time_.step())) return;
  outstanding_.add(operation);
}

bool Engine::run_steady() {
  if (!steady_.repeating()) return false;
  if (front_.shutdown_requested()) steady_.leave_soon();
  bool moved = false;
  for (;;) {
    const SteadyState::Progress progress = steady_.advance(time_.step());
    moved = moved || progress != SteadyState::Progress::kNothing;
    if (progress != SteadyState::Progress::kLeft) return moved;
    leave_steady();
    while (const auto plan = steady_.take_plan()) apply(*plan);
  }
}

void Engine::begin_steady(std::vector<control::AgreedBatch> schedule) {
  steady_.begin(std::move(schedule), time_.step());
  for (const OperationPtr& operation : outstanding_.in_order()) {
    if (steady_.offer(operation, time_.step()))
      outstanding_.take(operation->request.process_set, operation->request.name);
  }
}

// What has not run is negotiated as if it had been submitted just now.
void Engine::leave_steady() {
  if (coordinator_) coordinator_->note_lock_left(steady_.batches_run());
  for (const OperationPtr& operation : steady_.take_waiting()) outstanding_.add(operation);
  for (const OperationPtr& operation : outstanding_.in_order()) {
    const auto error = negotiator_.submit(operation->request);
    if (error)
      end_with(outstanding_.take(operation->request.process_set, operation->request.name), *error);
  }
}

// Those that wait for other ranks, not those that run.
std::vector<OperationPtr> Engine::outstanding_in_order() const {
  std::vector<OperationPtr> operations = outstanding_.in_order();
  const std::vector<OperationPtr> repeated = steady_.waiting();
  operations.insert(operations.end(), repeated.begin(), repeated.end());
  sort_by_order(operations);
  return operations;
}

bool Engine::note_blocked() noexcept {
  if (!waits_for_others() || executor_.active()) return false;
  wait_noted_ = true;
  return steady_.note_blocked();
}

void Engine::send(int rank, const wire::Bytes& bytes) {
  counters_.control_messages_sent.fetch_add(1, std::memory_order_relaxed);
  counters_.control_bytes_sent.fetch_add(bytes.size(), std::memory_order_relaxed);
  control_->send(rank, bytes);
}

bool Engine::send_report() {
  if (steady_.repeating()) return false;
  if (front_.shutdown_requested()) negotiator_.request_shutdown(front_.ending());
  const auto news = negotiator_.take_report();
  if (!news) return false;
  if (aggregator_) {
    aggregator_->accept(control_->rank(), *news, time_.now());
  } else {
    send(std::max(place_.parent, 0), wire::encode(*news));
  }
  counters_.negotiated_operations.store(
      negotiator_.reported_in_full() + negotiator_.reported_by_bit(), std::memory_order_relaxed);
  counters_.cached_operations.store(negotiator_.reported_by_bit(), std::memory_order_relaxed);
  return true;
}

bool Engine::receive() {
  if (control_->quiet()) return false;
  bool moved = false;
  while (const auto message = control_->poll()) {
    counters_.control_messages_received.fetch_add(1, std::memory_order_relaxed);
    handle(*message);
    // That another rank waits is nothing to go on with; a thread that waits here must come to its
    // rest, or it would not be known that it does.
    moved = moved || front_.failed() || kind_of(*message) != wire::MessageKind::kBlocked;
    if (front_.failed()) break;
  }
  return moved;
}

void Engine::handle(const control::Message& message) {
  const int source = message.source;
  const auto decoded = [&] {
    try {
      return wire::decode(message.bytes);
    } catch (const wire::WireError& error) {
      throw Error("rank " + std::to_string(control_->rank()) +
                  " received a corrupt message from rank " + std::to_string(source) + ": " +
                  error.what());
    }
  }();
  liveness_.heard(source, time_.awake());
  if (const auto* plan = std::get_if<wire::Plan>(&decoded)) return take_in(*plan);
  if (const auto* report_in = std::get_if<wire::Report>(&decoded))
    return take_in(source, *report_in);
  if (const auto* merged = std::get_if<wire::MergedReport>(&decoded))
    return take_in(source, *merged);
  if (const auto* abort = std::get_if<wire::Abort>(&decoded)) {
    if (abort->cause.rank != control_->rank()) {
      observe::notify_supervisor(observe::NoticeKind::kLoss,
                                 static_cast<int>(StatusCode::kPeerLost), abort->cause.message);
    }
    return fail(abort->cause, coordinator_ != nullptr);
  }
  if (const auto* news = std::get_if<wire::LockNews>(&decoded))
    return steady_.accept(source, *news);
  if (const auto* blocked = std::get_if<wire::Blocked>(&decoded);
      blocked != nullptr && coordinator_) {
    coordinator_->note_blocked(source, blocked->last_applied);
  }
  if (std::holds_alternative<wire::Ping>(decoded)) {
    // A rank asks only while it waits, so the coordinator has to look after the others for it.
    if (coordinator_) others_wait_until_ = time_.now() + options_.peer_timeout / 2;
    const wire::Bytes pong = wire::encode(wire::Pong{});
    send(source, pong);
  }
}

void Engine::take_in(int source, const wire::Report& report) {
  if (aggregator_) {
    aggregator_->accept(source, report, time_.now());
  } else if (coordinator_) {
    coordinator_->accept(source, report, time_.awake());
  } else {
    throw Error("rank " + std::to_string(source) + " reported to rank " +
                std::to_string(control_->rank()) + ", which does not coordinate");
  }
}

void Engine::take_in(int source, const wire::MergedReport& report) {
  if (!aggregator_) {
    throw Error("rank " + std::to_string(source) + " sent merged reports to rank " +
                std::to_string(control_->rank()) +
                ", which has nobody below it; set HVD_CONTROL_RADIX alike on every rank");
  }
  for (const auto& applied : report.applied) liveness_.heard(applied.ranks, time_.awake());
  aggregator_->accept(report, time_.now());
}

// What has come from below and is not held back goes on towards the coordinator.
bool Engine::pass_on() {
  if (!aggregator_) return false;
  const auto merged = aggregator_->take(time_.now());
  if (!merged) return false;
  if (coordinator_) {
    coordinator_->accept(*merged, time_.awake());
  } else {
    send(place_.parent, wire::encode(*merged));
  }
  return true;
}

// A plan goes to the ranks below, and without a tree to all.
void Engine::publish(const wire::Bytes& plan) {
  const std::size_t receivers =
      aggregator_ ? place_.children.size() : static_cast<std::size_t>(control_->size());
  counters_.control_messages_sent.fetch_add(receivers, std::memory_order_relaxed);
  counters_.control_bytes_sent.fetch_add(plan.size() * receivers, std::memory_order_relaxed);
  aggregator_ ? control_->send(place_.children, plan) : control_->publish(plan);
}

// Whoever made it has left what is repeated, so this rank can see that it was left; on another host
// it will hear of it.
void Engine::take_in(const wire::Plan& plan) {
  run_steady();
  steady_.repeating() ? steady_.defer(plan) : apply(plan);
}

void Engine::apply(const wire::Plan& plan) {
  // Ranks below report after it, in terms that this one must know by then.
  if (aggregator_ && !coordinator_) publish(wire::encode(plan));
  control::Applied applied = negotiator_.apply(plan);
  last_plan_at_ = time_.now();
  liveness_.heard(0, time_.awake(last_plan_at_));  // whoever has passed it on
  wait_noted_ = false;
  if (aggregator_) aggregator_->note_plan(plan);
  counters_.plans_applied.fetch_add(1, std::memory_order_relaxed);
  // Before an operation ends by which the caller learns of it.
  if (applied.sets_changed) front_.set_process_sets(negotiator_.process_sets());
  for (const auto& error : applied.errors)
    end_with(outstanding_.take(error.process_set, error.name), error);
  for (auto& batch : applied.batches) start(std::move(batch));
  for (const int removed : applied.sets_removed) executor_.retire(removed);
  shutdown_agreed_ = shutdown_agreed_ || applied.shutdown;
  if (!applied.lock.empty() && !steady_.available()) {
    throw Error("rank 0 repeats a schedule, which is switched off on rank " +
                std::to_string(control_->rank()) +
                "; set the schedule lock (HVD_SCHEDULE_LOCK) alike on every rank");
  }
  if (!applied.lock.empty()) begin_steady(std::move(applied.lock));
}

void Engine::start(control::AgreedBatch batch) {
  std::vector<OperationPtr> operations;
  try {
    for (const auto& agreed : batch.operations) {
      if (!batch.absent_here)
        operations.push_back(outstanding_.take(agreed.request.process_set, agreed.request.name));
    }
    executor_.start(std::move(batch), operations);
  } catch (...) {
    // Nobody else knows them now, and they have to end with the cause.
    for (const OperationPtr& operation : operations) outstanding_.add(operation);
    throw;
  }
}

bool Engine::coordinate() {
  // A rank that repeats a schedule has reported nothing, and a plan needs all.
  if (!coordinator_ || steady_.repeating()) return false;
  const auto plan = coordinator_->decide_encoded(time_.awake(time_.step()), executor_.in_flight());
  if (!plan) return false;
  publish(*plan);
  if (aggregator_) send(control_->rank(), *plan);
  return true;
}

bool Engine::waiting(TimePoint now) const noexcept {
  return busy() || (aggregator_ && aggregator_->holds_anything()) ||
         (coordinator_ && (coordinator_->waiting() || now < others_wait_until_));
}

void Engine::give_up(const Status& status) noexcept {
  executor_.abort(status);
  end_outstanding(status);
}

void Engine::end_outstanding(const Status& status) noexcept {
  std::vector<OperationPtr> taken;
  front_.take(taken, Callbacks::kAll);
  for (OperationPtr& operation : outstanding_in_order()) taken.push_back(std::move(operation));
  outstanding_.clear();
  steady_.take_waiting();
  for (const auto& operation : taken) finish(operation, status, nullptr, false);
}

void Engine::end_with(const OperationPtr& operation, const wire::ErrorEntry& error) {
  if (error.code == StatusCode::kShutdown)
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(error.code),
                               error.message);
  finish(operation, {error.code, error.message, error.rank}, nullptr, false);
}

void Engine::finish(const OperationPtr& operation, const Status& status, const EventPtr& ready,
                    bool in_flight) {
  auto& counter = status.ok() ? counters_.completed_operations : counters_.failed_operations;
  counter.fetch_add(1, std::memory_order_relaxed);
  on_end_(*operation);
  if (in_flight) {
    operation->finish_in_flight(status);
  } else {
    operation->finish(status, ready);
  }
}

bool Engine::needs_polling() const noexcept { return transferring() || !control_->rung_by_all(); }

Duration Engine::time_to_deadline() const noexcept {
  if (front_.failed()) return options_.peer_timeout / 4;  // nothing goes by the clock any more
  const TimePoint now = time_.now();
  TimePoint next = next_housekeeping_;
  if (const auto patience = steady_.deadline(); patience && waits_for_others())
    next = std::min(next, *patience);
  if (const auto look = executor_.device_queue().next_look()) next = std::min(next, *look);
  if (coordinator_) {
    if (const auto deadline = coordinator_->next_deadline())
      next = std::min(next, time_.on_the_clock(*deadline));
  }
  if (aggregator_) {
    if (const auto deadline = aggregator_->deadline()) next = std::min(next, *deadline);
  }
  return std::max(next - now, Duration::zero());
}

}  // namespace hvd::runtime
