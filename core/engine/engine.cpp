#include "engine/engine.h"

#include <algorithm>
#include <cstdio>
#include <span>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/validator.h"
#include "observe/supervisor_notice.h"
#include "transport/control_plane.h"

namespace hvd::runtime {
namespace {

Status status_of(const std::exception& error) {
  if (const auto* lost = dynamic_cast<const PeerLostError*>(&error)) {
    return {StatusCode::kPeerLost, lost->what(), lost->rank()};
  }
  const auto* const broken = dynamic_cast<const BrokenConnection*>(&error);
  return {StatusCode::kInternal, error.what(), broken != nullptr ? broken->rank() : -1};
}

constexpr std::size_t kMaxOperationsShown = 50;
/// Control messages wait for at most this many steps of Extent::kReplays.
constexpr int kMaxShortSteps = 8;

std::string line_of(const OperationState& operation, const std::string& state, TimePoint now) {
  if (operation.message) {
    return text("  ", operation.title(), ": ", now - operation.submitted, ", ", state, "\n");
  }
  const wire::Request& request = operation.request;
  return text("  ", control::describe(request),
              wire::only_agrees(request.kind)
                  ? ""
                  : text(" ", request.dtype, shape_to_string(operation.submission.input.shape)),
              request.process_set == 0 || request.by_members()
                  ? ""
                  : text(" of process set ", request.process_set),
              ": ", now - operation.submitted, ", ", state, "\n");
}

}  // namespace

Engine::Engine(const RuntimeOptions& options, EngineParts parts)
    : on_failure_(options.on_failure),
      counters_(parts.counters),
      control_(std::move(parts.control)),
      submission_queue_(control::ProcessSetTable(control_->size())),
      operations_(submission_queue_, control_->rank(),
                  parts.device ? std::optional(parts.device->device()) : std::nullopt),
      time_(parts.clock, options.peer_timeout / 4),
      negotiator_(control_->rank(), *submission_queue_.process_sets(), options.cache_capacity),
      executor_(
          {control_->topology(), parts.clock, counters_, parts.timeline, options.stall_shutdown},
          make_queue_factory({control_->topology(), *control_, parts.arena, parts.device,
                              options.fusion_threshold},
                             std::move(parts.backends), options.backend),
          [this](const OperationPtr& operation, const Status& status, const EventPtr& ready,
                 bool in_flight)
              HVD_REQUIRES(progress_) { finish(operation, status, ready, in_flight); }),
      steady_(options, *control_, executor_, counters_),
      watch_(options, *control_, counters_, time_),
      router_(options, {*control_, counters_, time_, watch_, negotiator_}, steady_.available()),
      blocked_(options.deadlock_timeout),
      points_(options,
              {*control_, counters_, negotiator_, parts.device,
               [this](const OperationPtr& operation, const Status& status, const EventPtr& ready)
                   HVD_REQUIRES(progress_) { finish(operation, status, ready, false); },
               [this]() HVD_REQUIRES(progress_) { return activity(); },
               [this](std::uint64_t inquiry, int source, const std::string& activity)
                   HVD_REQUIRES(progress_) { on_message_answer(inquiry, source, activity); }}),
      quick_(*control_) {}

Engine::~Engine() = default;

bool Engine::step(Callbacks callbacks, Extent extent) noexcept {
  bool moved = false;
  // A short step does nothing that depends on the exact time.
  const bool stays_short =
      extent == Extent::kReplays && short_steps_ > 0 && short_steps_ + 1 < kMaxShortSteps;
  time_.begin_step(stays_short ? StepTime::Precision::kAbout : StepTime::Precision::kExact);
  try {
    if (const auto cause =
            submission_queue_.failed() ? std::nullopt : submission_queue_.outside_failure())
      fail(*cause, true);
    if (submission_queue_.failed()) {
      dump_state_if_requested();
      end_outstanding(submission_queue_.failure());
      router_.drop_own_plan();
      if (watch_.due(true)) control_->heartbeat(time_.step());
      while (!control_broken_ && control_->poll())
        moved = true;  // advances messages that are being sent
      return moved;
    }
    moved = begin_submissions(callbacks) || moved;
    moved = run_steady(extent == Extent::kReplays) || moved;
    if (extent == Extent::kReplays && steady_.repeating() && !steady_.excludes_negotiation() &&
        ++short_steps_ < kMaxShortSteps)
      return executor_.progress() || moved;
    short_steps_ = 0;
    // Must precede send_report(), which may report that this rank has left the replay. After that
    // the ranks of this host may enter the next replay, and their flags no longer show that a rank
    // has left (MUT_REPORT in test/models/dissemination_barrier.pml).
    while (steady_.exchange_updates()) moved = run_steady() || moved;
    moved = send_report() || moved;
    moved = receive() || moved;
    moved = router_.forward_reports() || moved;
    moved = decide() || moved;
    moved = advance_messages() || moved;
    moved = describe_waits() || moved;
    moved = executor_.progress() || moved;
    moved = do_housekeeping() || moved;
    dump_state_if_requested();
    if (shutdown_agreed_ && !executor_.active() && executor_.device_completions().empty())
      submission_queue_.set_shut_down();
  } catch (const std::exception& error) {
    if (!submission_queue_.failed()) {
      fail(explain(status_of(error)), true);
      return true;
    }
    // A broken connection affects the messages to one rank only; the others must still be notified.
    control_broken_ = control_broken_ || dynamic_cast<const BrokenConnection*>(&error) == nullptr;
    return false;
  }
  return moved;
}

bool Engine::begin_submissions(Callbacks callbacks) {
  if (!submission_queue_.has_submissions()) return false;
  submission_queue_.pop_all(popped_, callbacks);
  for (std::size_t next = 0; next < popped_.size(); ++next) {
    try {
      begin(std::move(popped_[next]));
    } catch (...) {
      submission_queue_.enqueue(
          std::span(popped_).subspan(next));  // they end with the cause of failure
      popped_.clear();
      throw;
    }
  }
  const bool moved = !popped_.empty();
  popped_.clear();
  return moved;
}

void Engine::begin(OperationPtr&& operation) {
  counters_.bytes.add(operation->submission.input.bytes());
  operation->order = begun_++;
  if (last_begun_.get() != operation.get()) last_begun_ = operation;
  last_begun_at_ = time_.step();
  last_quick_.reset();
  if (operation->message) {
    blocked_.on_submission();
    return points_.begin(operation, time_.awake(time_.step()));
  }
  if (const auto error = negotiator_.consume_failure(operation->request))
    return end_with(operation, *error);
  blocked_.on_submission();
  if (steady_.accept(operation, time_.step()) || !negotiate(operation)) return;
  outstanding_.emplace(operation->order, std::move(operation));
}

bool Engine::negotiate(const OperationPtr& operation) {
  std::optional<wire::ErrorEntry> error;
  try {
    error = negotiator_.submit(operation->request, operation->order);
  } catch (const UsageError& problem) {
    // The process set was removed after submit() had checked it.
    finish(operation, {StatusCode::kUsage, problem.what(), -1}, nullptr, false);
    return false;
  }
  if (error) end_with(operation, *error);
  return !error;
}

bool Engine::run_steady(bool polls) {
  if (!steady_.repeating()) return false;
  if (submission_queue_.shutdown_requested()) steady_.leave_soon();
  bool moved = false;
  for (;;) {
    const SteadySets::Advanced advanced = steady_.advance(time_.step(), polls);
    moved = moved || advanced.moved;
    if (!advanced.left) return moved;
    leave_steady(*advanced.left);
    while (const auto plan = steady_.next_deferred_plan()) apply(*plan);
  }
}

void Engine::begin_steady(int process_set, std::vector<control::AgreedBundle> schedule) {
  steady_.begin(process_set, negotiator_.process_sets().ranks(process_set), std::move(schedule),
                time_.step());
  // The negotiator has withdrawn them.
  std::erase_if(outstanding_, [&](const auto& entry) HVD_REQUIRES(progress_) {
    OperationPtr operation = entry.second;
    return control::withdrawn_by_replay(operation->request, process_set) &&
           (steady_.accept(operation, time_.step()) || !negotiate(operation));
  });
}

void Engine::leave_steady(int process_set) {
  router_.on_replay_left(process_set, steady_.batches_run(process_set));
  // The released operations are negotiated as if they had just been submitted.
  const std::vector<OperationPtr> released = steady_.release(process_set);
  for (const OperationPtr& operation : released) outstanding_.emplace(operation->order, operation);
  for (const OperationPtr& operation : released) {
    if (!negotiate(operation)) outstanding_.erase(operation->order);
  }
}

Engine::OperationsInOrder Engine::all_outstanding() const {
  OperationsInOrder operations = outstanding_;
  for (const OperationPtr& operation : steady_.waiting())
    operations.emplace(operation->order, operation);
  return operations;
}

OperationPtr Engine::release_outstanding(std::uint64_t order) {
  auto node = outstanding_.extract(order);
  HVD_EXPECT(!node.empty(), "the operation waits for a plan");
  return std::move(node.mapped());
}

bool Engine::prepare_to_block(Waiting waiting) noexcept {
  if (waiting == Waiting::kForMessage) return false;
  if (!waits_for_others() || executor_.active()) return false;
  if (waiting == Waiting::kWithoutLimit) blocked_.on_blocked_wait();
  return steady_.leave_if_own_missing();
}

bool Engine::send_report() {
  if (steady_.excludes_negotiation()) return false;
  if (submission_queue_.shutdown_requested() && !steady_.repeating())
    negotiator_.request_shutdown(submission_queue_.ending());
  const auto own = negotiator_.next_report();
  if (!own) return false;
  router_.report(*own);
  return true;
}

bool Engine::receive() {
  if (router_.quiet()) return false;
  bool moved = false;
  std::size_t message_bytes = 0;  // other work gets its turn after kBytesPerCall
  while (auto received = router_.receive()) {
    if (const auto* plan = std::get_if<wire::Plan>(&received->payload)) on_plan(*plan);
    if (const auto* abort = std::get_if<wire::Abort>(&received->payload)) on_abort(*abort);
    if (const auto* update = std::get_if<wire::ReplayUpdate>(&received->payload))
      steady_.accept(received->source, *update);
    if (auto* probe = std::get_if<wire::WaitProbe>(&received->payload))
      probes_.push_back(std::move(*probe));
    if (const auto* answer = std::get_if<wire::WaitAnswer>(&received->payload))
      on_wait_answer(*answer);
    if (const auto* step = std::get_if<wire::PointMessage>(&received->payload)) {
      points_.handle(received->source, *step);
      message_bytes += received->bytes.size();
    }
    moved = moved || submission_queue_.failed() || received->moves;
    if (submission_queue_.failed() || message_bytes >= kBytesPerCall) return true;
  }
  control_->check_connections();
  return moved;
}

bool Engine::advance_messages() {
  const bool left = submission_queue_.shutdown_requested() &&
                    !submission_queue_.has_submissions() && points_.leave();
  return (points_.active() && points_.progress(time_.awake(time_.step()))) || left;
}

std::string Engine::activity() const {
  if (std::string title = executor_.first_active(); !title.empty()) return title;
  const OperationsInOrder waiting = all_outstanding();
  return waiting.empty() ? "" : waiting.begin()->second->title();
}

// The members of a set have left its replay before rank 0 makes a plan about an operation of it. On
// the host of rank 0, run_steady() detects that here. On other hosts the update may still be on its
// way, so the plan is deferred until it arrives.
void Engine::on_plan(const wire::Plan& plan) {
  while (run_steady()) continue;
  steady_.excludes_negotiation() ? steady_.defer(plan) : apply(plan);
}

void Engine::apply(const wire::Plan& plan) {
  HVD_EXPECT(!steady_.excludes_negotiation(), "this rank negotiates");
  router_.pass_down(plan);
  control::Applied applied = negotiator_.apply(plan);
  router_.on_applied(plan);
  blocked_.on_plan();
  // Set before the operation ends, because the caller then expects the change.
  if (applied.sets_changed) submission_queue_.set_process_sets(negotiator_.process_sets());
  for (const auto& error : applied.errors) end_with(release_outstanding(error.use), error);
  for (auto& batch : applied.batches) start(std::move(batch));
  for (const int removed : applied.sets_removed) {
    executor_.retire(removed);
    steady_.remove(removed);
    points_.remove_set(removed);
  }
  shutdown_agreed_ = shutdown_agreed_ || applied.shutdown;
  if (!applied.replay.empty() && !steady_.available()) {
    throw Error(text("rank 0 repeats a schedule, which is switched off on rank ", control_->rank(),
                     "; set schedule replay (HVD_SCHEDULE_LOCK) to the same value on every rank"));
  }
  if (!applied.replay.empty()) begin_steady(applied.replayed_set, std::move(applied.replay));
}

void Engine::start(control::AgreedBatch batch) {
  std::vector<OperationPtr> operations;
  try {
    for (const std::uint64_t use : batch.uses) operations.push_back(release_outstanding(use));
    // The other ranks run the batch, so this rank cannot end one of its operations alone.
    for (std::size_t i = 0; i < operations.size(); ++i) {
      if (const auto problem = control::find_misplanned(batch.operations[i].request,
                                                        operations[i]->request, control_->rank()))
        throw Error(*problem);
    }
    executor_.start(executor_.prepare(std::move(batch), operations));
  } catch (...) {
    // These operations must end with the cause of the failure, and no other part holds them.
    for (const OperationPtr& operation : operations)
      outstanding_.emplace(operation->order, operation);
    throw;
  }
}

bool Engine::decide() {
  // A rank that replays the schedule of all hosts has not reported, and a plan needs the reports of
  // all ranks.
  if (steady_.excludes_negotiation()) return false;
  return router_.decide([this](int process_set, DeviceType device) HVD_REQUIRES(progress_) {
    return executor_.batches_ahead(process_set, device);
  });
}

void Engine::give_up(const Status& status) noexcept {
  executor_.abort(status);
  end_outstanding(status);
}

void Engine::end_outstanding(const Status& status) noexcept {
  std::vector<OperationPtr> taken;
  submission_queue_.pop_all(taken, Callbacks::kAll);
  for (const auto& [order, operation] : all_outstanding()) taken.push_back(operation);
  outstanding_.clear();
  steady_.release_all();
  for (const OperationPtr& operation : points_.release_all()) taken.push_back(operation);
  descriptions_.clear();
  probes_.clear();
  // An operation whose begin() has thrown may be in the queue and in a part of the engine.
  for (const auto& operation : taken) {
    if (!operation->done()) finish(operation, status, nullptr, false);
  }
}

void Engine::end_with(const OperationPtr& operation, const wire::ErrorEntry& error) {
  if (error.code == StatusCode::kShutdown)
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(error.code),
                               error.message, error.rank);
  finish(operation, {error.code, error.message, error.rank}, nullptr, false);
}

void Engine::finish(const OperationPtr& operation, const Status& status, const EventPtr& ready,
                    bool in_flight) {
  auto& counter = status.ok() ? counters_.completed_operations : counters_.failed_operations;
  counter.add(1);
  operations_.release(*operation);
  if (in_flight) {
    operation->finish_in_flight(status);
  } else {
    operation->finish(status, ready);
  }
}

bool Engine::needs_polling() const noexcept { return transferring() || control_->needs_polling(); }

Duration Engine::time_to_deadline() const noexcept {
  if (submission_queue_.failed()) return std::max(watch_.next() - time_.now(), Duration::zero());
  TimePoint next = watch_.next();
  const auto at_most = [&next](std::optional<TimePoint> limit) {
    if (limit) next = std::min(next, *limit);
  };
  if (waits_for_others()) at_most(steady_.deadline());
  at_most(executor_.device_completions().next_check());
  at_most(router_.deadline());
  if (const auto messages = points_.deadline()) at_most(time_.on_the_clock(*messages));
  for (const RequestedDescription& open : descriptions_) at_most(open.description->until());
  return std::max(next - time_.now(), Duration::zero());
}

std::string Engine::state_text() const {
  const TimePoint now = time_.now();
  std::vector<std::pair<OperationPtr, std::string>> lines = executor_.running();
  for (const auto& [order, operation] : all_outstanding())
    lines.emplace_back(operation, "waits for other ranks");
  for (auto& line : points_.outstanding()) lines.push_back(std::move(line));
  for (const OperationPtr& operation : submission_queue_.queued())
    lines.emplace_back(operation, "submitted");
  std::ranges::stable_sort(lines, {}, [](const auto& line) { return line.first->submitted; });

  const std::string state = submission_queue_.failed()
                                ? "failed: " + submission_queue_.failure().message
                            : submission_queue_.shut_down()          ? "shut down"
                            : submission_queue_.shutdown_requested() ? "shutting down"
                                                                     : "running";
  std::string whole =
      text("hvd: rank ", control_->rank(), " of ", control_->size(), " (host ",
           control_->topology().host_name(control_->rank()), "): ", state, ", ", lines.size(),
           " operations outstanding, last plan applied ", negotiator_.last_applied());
  if (steady_.repeating())
    whole += text(", replaying a schedule of ", steady_.batches(), " batches");
  if (negotiator_.last_applied() > 0) whole += text(", ", now - router_.last_plan_at(), " ago");
  whole += "\n";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i == kMaxOperationsShown) {
      whole += text("  and ", lines.size() - i, " more\n");
      break;
    }
    whole += line_of(*lines[i].first, lines[i].second, now);
  }
  const std::vector<std::string> waiting = router_.waiting_texts(kMaxOperationsShown);
  if (!waiting.empty()) whole += "  as the coordinator sees it:\n";
  for (const std::string& line : waiting) whole += text("    ", line, "\n");
  return whole;
}

void Engine::dump_state_if_requested() {
  if (!submission_queue_.consume_dump_request()) return;
  // Written in one call, so that the texts of different ranks do not mix.
  const std::string state = state_text();
  std::fwrite(state.data(), 1, state.size(), stderr);
}

}  // namespace hvd::runtime
