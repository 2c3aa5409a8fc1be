#include "execution/executor.h"

#include <algorithm>
#include <utility>

#include "hvd/error.h"

namespace hvd::runtime {
namespace {

constexpr std::string_view kDeviceBackend = "nccl";

const char* phase_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce:
      return "ALLREDUCE";
    case OpKind::kAllgather:
      return "ALLGATHER";
    case OpKind::kBroadcast:
      return "BROADCAST";
    case OpKind::kReducescatter:
      return "REDUCESCATTER";
    case OpKind::kAlltoall:
      return "ALLTOALL";
    case OpKind::kBarrier:
      return "BARRIER";
    case OpKind::kJoin:
      return "JOIN";
    case OpKind::kGather:
      return "GATHER";
    case OpKind::kAddProcessSet:
      return "ADD_PROCESS_SET";
    case OpKind::kRemoveProcessSet:
      return "REMOVE_PROCESS_SET";
  }
  return "?";
}

}  // namespace

Executor::Executor(Environment environment, std::vector<std::shared_ptr<Backend>> backends,
                   std::optional<std::string> forced_backend, Finish finish)
    : environment_(environment),
      backends_(std::move(backends)),
      forced_backend_(std::move(forced_backend)),
      finish_(std::move(finish)),
      buffers_(environment_.arena),
      device_completions_(environment_.clock, environment_.device_limit) {}

// What a device may still be at work on outlives this.
Executor::~Executor() { device_completions_.abandon(); }

void ExecutionQueue::push(std::shared_ptr<BatchExecution> execution) {
  if (head_ > 0 && (empty() || executions_.size() == executions_.capacity())) {
    executions_.erase(executions_.begin(),
                      executions_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
  executions_.push_back(std::move(execution));
}

std::shared_ptr<BatchExecution> ExecutionQueue::pop() noexcept {
  return std::move(executions_[head_++]);
}

void Executor::start(control::AgreedBatch batch, std::vector<OperationPtr> operations) {
  if (!wire::only_agrees(batch.operations.front().request.kind)) {
    const auto execution = std::make_shared<BatchExecution>(std::move(batch), std::move(operations),
                                                            environment_.topology.rank);
    execution->queue =
        execution->on_device() ? &device_queue_for(*execution) : &queue_for(*execution);
    return start(execution);
  }
  for (std::size_t i = 0; i < operations.size(); ++i) {
    operations[i]->set_result(batch.operations[i].result);
    finish_(operations[i], {}, nullptr, false);
  }
}

std::shared_ptr<BatchExecution> Executor::prepare(control::AgreedBatch batch) {
  auto execution = std::make_shared<BatchExecution>(std::move(batch), environment_.topology.rank);
  if (!wire::only_agrees(execution->request().kind))
    execution->queue =
        execution->on_device() ? &device_queue_for(*execution) : &queue_for(*execution);
  return execution;
}

void Executor::keep_buffers_for(std::span<const std::shared_ptr<BatchExecution>> executions) {
  std::size_t largest = 0;
  for (const auto& execution : executions) {
    if (execution->queue == nullptr || execution->on_device() || !execution->buffered()) continue;
    largest = std::max({largest, execution->in_bytes(), execution->out_bytes()});
  }
  // A pool's buffer has at least a cache line.
  buffers_.trim(std::max<std::size_t>(largest, 64));
}

void Executor::start(const std::shared_ptr<BatchExecution>& execution) {
  if (execution->queue == nullptr) {  // nothing is to be moved
    for (const OperationPtr& operation : execution->operations())
      finish_(operation, {}, nullptr, false);
    return execution->let_go();
  }
  if (execution->queue->ordered) execution->device_order = device_launches_++;
  execution->queue->pending.push(execution);
  execution->agreed_at = environment_.timeline.on() ? environment_.clock.now() : TimePoint{};
  execution->launched_at = {};
  execution->started = true;
  ++in_flight_;
}

void Executor::retire(int process_set) {
  for (auto& [key, queue] : queues_) queue.retired = queue.retired || key.first == process_set;
  close_retired();
}

void Executor::close_retired() {
  std::erase_if(queues_, [this](const auto& entry) {
    const ChannelQueue& queue = entry.second;
    return queue.retired && queue.pending.empty() &&
           !(queue.device && device_completions_.has(*queue.channel));
  });
}

Backend& Executor::choose_backend(const ChannelSpec& spec, const Collective& collective) const {
  Backend* best = nullptr;
  int best_score = 0;
  // A choice of transport cannot concern a rank alone: the transports leave that to the local
  // backend. NCCL is a choice for GPUs only.
  const bool choice_counts =
      forced_backend_ && spec.ranks.size() > 1 && *forced_backend_ != kDeviceBackend;
  for (const auto& backend : backends_) {
    if (choice_counts && backend->name() != *forced_backend_) continue;
    const int score = backend->score(environment_.topology, spec, collective);
    if (score <= best_score) continue;
    best = backend.get();
    best_score = score;
  }
  if (best == nullptr) {
    throw Error("no backend can run " + std::string(to_string(collective.kind)) + " of " +
                std::string(to_string(collective.dtype)) + " on " +
                std::string(to_string(spec.device.type)) +
                (choice_counts ? "; HVD_BACKEND allows only '" + *forced_backend_ + "'" : ""));
  }
  return *best;
}

ChannelQueue& Executor::queue_for(const BatchExecution& execution) {
  Collective collective = execution.collective();
  if (collective.op == ReduceOp::kAdasum) {
    // It is made of what backends have, all on one channel: alltoall, allreduce and allgather. What
    // has the first has the others.
    collective.op = ReduceOp::kSum;
    collective.kind = OpKind::kAlltoall;
  }
  Backend& backend = choose_backend(execution.spec(), collective);
  ChannelQueue& queue = queues_[{execution.spec().process_set, std::string(backend.name())}];
  if (!queue.channel) {
    queue.channel = backend.open(execution.spec(), environment_.peers);
    queue.backend = backend.name();
  }
  return queue;
}

bool Executor::progress() {
  bool moved = false;
  if (!device_completions_.empty()) {
    device_completions_.look();
    close_retired();
  }
  if (in_flight_ == 0) return moved;
  bool retired = false;
  for (auto& [key, queue] : queues_) {
    moved = progress(queue) || moved;
    retired = retired || queue.retired;
  }
  if (retired) close_retired();
  return moved;
}

bool Executor::progress(ChannelQueue& queue) {
  bool moved = false;
  while (!queue.pending.empty()) {
    BatchExecution& execution = queue.pending.front();
    try {
      if (!execution.launched) {
        if (queue.device && !device_may_launch(queue, execution)) return moved;
        launch(queue, execution);
        moved = true;
      }
      if (execution.work && !execution.work->progress()) return moved || execution.work->moved();
      complete(queue, execution);
    } catch (const PeerLostError& error) {
      throw PeerLostError(execution.title() + ": " + error.what(), error.rank());
    } catch (const std::exception& error) {
      throw Error(execution.title() + ": " + error.what());
    }
    queue.pending.pop();
    --in_flight_;
    moved = true;
  }
  return moved;
}

void Executor::launch(ChannelQueue& queue, BatchExecution& execution) {
  execution.launched = true;
  if (environment_.timeline.on()) execution.launched_at = environment_.clock.now();
  if (queue.device) {
    execution.work = launch_on_device(queue, execution);
    return;
  }
  execution.prepare(buffers_);
  if (execution.nothing_to_move()) return;
  if (execution.last_work && execution.last_work->again(execution.in(), execution.out())) {
    environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
    execution.work = std::move(execution.last_work);
    return;
  }
  const composite::Launch launch = [this, &queue](const Collective& collective,
                                                  std::span<const std::byte> in,
                                                  std::span<std::byte> out) {
    environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
    return queue.channel->launch(collective, in, out);
  };
  if (execution.request().kind == OpKind::kAlltoall) {
    execution.work =
        composite::make_alltoall(launch, launch, execution.operations().front()->submission);
  } else if (execution.collective().op == ReduceOp::kAdasum) {
    execution.work = composite::make_adasum(launch, execution.collective(), execution.spec(),
                                            execution.in(), execution.out());
  } else {
    execution.work = launch(execution.collective(), execution.in(), execution.out());
  }
}

void Executor::complete(ChannelQueue& queue, BatchExecution& execution) {
  if (!queue.device) execution.unpack();
  const EventPtr output_ready = execution.work ? execution.work->output_ready() : nullptr;
  if (output_ready) device_completions_.add(*queue.channel, execution, output_ready);
  if (queue.ordered) ++device_completed_;
  if (execution.repeated() && !queue.device && execution.work && execution.work->repeats()) {
    execution.last_work = std::move(execution.work);
  } else {
    execution.work.reset();
  }
  if (environment_.timeline.on() && execution.launched_at != TimePoint{}) record(queue, execution);
  for (const OperationPtr& operation : execution.operations())
    finish_(operation, {}, output_ready, false);
  execution.started = execution.launched = false;
  execution.let_go();
}

void Executor::record(const ChannelQueue& queue, const BatchExecution& execution) {
  const auto writer = environment_.timeline.writer();
  if (!writer) return;
  const TimePoint now = environment_.clock.now();
  const std::string detail = queue.backend + ", " + std::to_string(execution.agreed().size()) +
                             " tensors, " + std::to_string(execution.out().size()) + " bytes";
  for (std::size_t i = 0; i < execution.agreed().size(); ++i) {
    const std::string& name = (execution.operations().empty() ? execution.agreed()[i].request
                                                              : execution.operations()[i]->request)
                                  .name;
    if (!execution.operations().empty())
      writer->span(name, "NEGOTIATE", execution.operations()[i]->submitted, execution.agreed_at);
    writer->span(name, "QUEUE", execution.agreed_at, execution.launched_at);
    writer->span(name, phase_of(execution.request().kind), execution.launched_at, now, detail);
  }
}

bool Executor::needs_polling() const noexcept {
  return active() && std::any_of(queues_.begin(), queues_.end(), [](const auto& entry) {
           return !entry.second.pending.empty() && entry.second.channel->needs_polling();
         });
}

std::string Executor::first_active() const {
  for (const auto& [key, queue] : queues_) {
    if (!queue.pending.empty()) return queue.pending.front().title();
  }
  return {};
}

std::vector<std::pair<OperationPtr, std::string>> Executor::running() const {
  std::vector<std::pair<OperationPtr, std::string>> found;
  for (const auto& [key, queue] : queues_) {
    for (const auto& execution : queue.pending.executions()) {
      const std::string state =
          (execution->work ? "runs on " : "agreed, queued for ") + queue.backend;
      for (const OperationPtr& operation : execution->operations())
        found.emplace_back(operation, state);
    }
  }
  return found;
}

void Executor::abort(const Status& status) noexcept {
  for (auto& [key, queue] : queues_) {
    if (queue.channel) queue.channel->abort();
    while (!queue.pending.empty()) {
      const std::shared_ptr<BatchExecution> execution = queue.pending.pop();
      const bool launched = execution->work != nullptr;
      execution->work.reset();
      if (launched)
        execution->abandon_buffers();  // those on a device go with the work, and stay allocated
      for (const OperationPtr& operation : execution->operations())
        finish_(operation, status, nullptr, launched);
      execution->started = execution->launched = false;
      execution->let_go();
    }
  }
  in_flight_ = 0;
  device_completions_.abandon();
  device_completed_ = device_launches_;
}

}  // namespace hvd::runtime
