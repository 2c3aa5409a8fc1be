#include "engine/executor.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/control_plane.h"

namespace hvd::runtime {
namespace {

const char* timeline_name_of(OpKind kind) {
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
    case OpKind::kReduce:
      return "REDUCE";
    case OpKind::kScatter:
      return "SCATTER";
  }
  return "?";
}

/// Whether the batch's data passes through the queue's staging.
bool staged(const Batch& batch) noexcept {
  return !batch.nothing_to_move() && !batch.exchanges_rows();
}

/// Whether the batch passes neither through a buffer nor through a device, and therefore takes no
/// resource before it runs. All ranks get the same answer.
bool can_fill_ahead(const Batch& batch) noexcept {
  return staged(batch) && batch.spec().device.type == DeviceType::kCpu && !batch.buffered() &&
         !batch.absent_here() && !batch.conversion().scales_early();
}

/// Bytes of the collective, a measure of how long it takes.
std::size_t bytes_of(const Batch& batch) noexcept {
  return static_cast<std::size_t>(batch.collective().count) * size_of(batch.collective().dtype);
}

}  // namespace

Executor::Executor(const Parts& parts, std::unique_ptr<QueueFactory> factory, Finish finish)
    : parts_(parts),
      factory_(std::move(factory)),
      finish_(std::move(finish)),
      completions_(parts_.clock, parts_.limit) {}

// Keeps memory that a device may still use.
Executor::~Executor() { completions_.abandon(); }

std::shared_ptr<Execution> Executor::prepare(control::AgreedBatch batch,
                                             std::vector<OperationPtr> operations) {
  auto execution =
      std::make_shared<Execution>(std::move(batch), std::move(operations), parts_.topology.rank);
  if (!wire::only_agrees(execution->batch().request().kind))
    execution->queue_ = &queue_for(execution->batch());
  return execution;
}

void Executor::keep_buffers_for(std::span<const std::shared_ptr<Execution>> executions) {
  std::vector<const Batch*> batches;
  for (const auto& execution : executions) {
    if (execution->queue_ != nullptr) batches.push_back(&execution->batch());
  }
  factory_->keep_buffers_for(batches);
}

void Executor::start(const std::shared_ptr<Execution>& execution) {
  HVD_EXPECT(!execution->running(), "an execution is started when it has ended");
  HVD_EXPECT(
      std::ranges::all_of(execution->batch().operations(),
                          [](const OperationPtr& operation) { return operation ? true : false; }),
      "all operations of the batch are there");
  ChannelQueue* const queue = execution->queue_;
  if (queue == nullptr) {  // the ranks have agreed, and no data moves
    for (const OperationPtr& operation : execution->batch().operations())
      operation->set_result(execution->batch().result());
    finish_all(execution->batch(), {}, nullptr, false);
    return execution->batch_.release_operations();
  }
  if (queue->ordered) execution->turn_ = order_.next_turn();
  queue->push(execution);
  execution->agreed_at_ = parts_.timeline.on() ? parts_.clock.now() : TimePoint{};
  execution->launched_at_ = {};
  execution->state_ = ExecutionState::kQueued;
  ++in_flight_;
}

bool Executor::fill_ahead(Execution& execution) {
  HVD_EXPECT(!execution.running(), "an execution is filled when it has ended");
  const Batch& batch = execution.batch();
  execution.filled_ = false;
  if (execution.queue_ == nullptr || !execution.work_ || !can_fill_ahead(batch)) return true;
  if (!execution.work_->may_fill_ahead()) return true;
  if (!execution.queue_->empty()) return false;
  if (!execution.work_->fills_ahead()) return true;
  execution.work_->fill_ahead(batch.input());
  execution.filled_ = true;
  return true;
}

std::size_t Executor::run_filled(Execution& execution) {
  HVD_EXPECT(execution.filled_, "the input of the batch is there");
  execution.agreed_at_ = parts_.timeline.on() ? parts_.clock.now() : TimePoint{};
  execution.launched_at_ = execution.agreed_at_;
  parts_.counters.backend_calls.add(1);
  try {
    execution.batch().allocate_outputs();
  } catch (const std::exception& error) {
    throw Error(execution.batch().title() + ": " + error.what());
  }
  execution.work_->run_filled(execution.batch().output());
  execution.filled_ = false;
  end(execution, nullptr);
  return bytes_of(execution.batch());
}

void Executor::retire(int process_set) {
  for (auto& [key, queue] : queues_) queue.retired = queue.retired || key.first == process_set;
  close_retired();
}

void Executor::close_retired() {
  std::erase_if(queues_, [this](const auto& entry) {
    const ChannelQueue& queue = entry.second;
    return queue.retired && queue.empty() && !completions_.has(*queue.channel);
  });
}

ChannelQueue& Executor::queue_for(const Batch& batch) {
  std::pair<int, std::string> key{batch.spec().process_set, factory_->choose(batch)};
  const auto found = queues_.find(key);
  if (found != queues_.end()) return found->second;
  return queues_.emplace(std::move(key), factory_->open(batch)).first->second;
}

std::size_t Executor::batches_ahead(int process_set, DeviceType device) const noexcept {
  std::size_t batches = 0;
  for (const auto& [key, queue] : queues_) {
    if (queue.empty() || queue.urgent) continue;
    if (device == DeviceType::kCpu && key.first != process_set) continue;
    if (queue.front().batch().spec().device.type == device) batches += queue.executions().size();
  }
  return batches;
}

bool Executor::progress() {
  bool moved = false;
  if (!completions_.empty()) {
    completions_.check();
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
  // Many small batches are as much work as one large batch, so bytes limit a call.
  std::size_t bytes = 0;
  while (!queue.empty() && bytes < kBytesPerCall) {
    Execution& execution = queue.front();
    bool ended = false;
    try {
      ended = advance(queue, execution, moved);
    } catch (const PeerLostError& error) {
      throw PeerLostError(execution.batch().title() + ": " + error.what(), error.rank());
    } catch (const BrokenConnection& error) {
      throw BrokenConnection(execution.batch().title() + ": " + error.what(), error.rank());
    } catch (const std::exception& error) {
      throw Error(execution.batch().title() + ": " + error.what());
    }
    if (!ended) return moved;
    bytes += bytes_of(execution.batch());
    queue.pop();
    --in_flight_;
  }
  return moved;
}

/// Advances a large batch by one state at most, because each state takes a whole call.
/// @param moved set if there was any progress @return whether the batch has ended
bool Executor::advance(ChannelQueue& queue, Execution& execution, bool& moved) {
  const Batch& batch = execution.batch();
  const bool large = bytes_of(batch) >= kBytesPerCall && batch.buffered();
  if (execution.state_ == ExecutionState::kQueued) {
    if (!may_begin(queue, execution)) return false;
    begin(queue, execution);
    moved = true;
  }
  if (execution.state_ == ExecutionState::kPacking) {
    moved = true;
    if (staged(batch) && !queue.staging->pack_part(batch)) return false;
    launch(queue, execution);
    if (large) return false;
  }
  if (execution.state_ == ExecutionState::kUnderWay) {
    if (execution.work_ && !execution.work_->progress()) {
      moved = moved || execution.work_->moved();
      return false;
    }
    execution.state_ = ExecutionState::kUnpacking;
    moved = true;
    if (large) return false;
  }
  moved = true;
  if (staged(batch) && !queue.staging->unpack_part(batch)) return false;
  complete(queue, execution);
  return true;
}

void Executor::check_progress(TimePoint now) {
  if (in_flight_ == 0 || parts_.limit == Duration::zero()) return;
  for (auto& [key, queue] : queues_) {
    const bool under_way =
        !queue.empty() && queue.front().state_ == ExecutionState::kUnderWay && queue.front().work_;
    const auto progress_count = under_way ? queue.front().work_->progress_count() : std::nullopt;
    const Duration stalled_for = queue.stalled_for(now, progress_count);
    if (stalled_for >= parts_.limit) fail_stalled(queue, stalled_for, progress_count->waits_for);
  }
}

void Executor::fail_stalled(const ChannelQueue& queue, Duration stalled_for, int waits_for) const {
  const Topology& topology = parts_.topology;
  const auto rank_text = [&topology](int rank) {
    return text("rank ", rank, " (host ", topology.host_name(rank), ")");
  };
  const auto seconds = [](Duration duration) {
    return std::chrono::duration_cast<std::chrono::seconds>(duration).count();
  };
  throw PeerLostError(
      text(queue.front().batch().title(), " has made no progress on ", rank_text(topology.rank),
           " for ", seconds(stalled_for), " s on ", queue.backend,
           ", although every rank has submitted it; it waits for ",
           waits_for < 0 ? "another rank" : rank_text(waits_for), "; expected progress within ",
           seconds(parts_.limit),
           " s (HVD_STALL_SHUTDOWN); a connection between ranks does not deliver, although the "
           "ranks show signs of life"),
      -1);
}

bool Executor::may_begin(const ChannelQueue& queue, const Execution& execution) const {
  if (queue.ordered && !order_.is_next(execution.turn_)) return false;
  if (!queue.channel->ready()) return false;
  const Batch& batch = execution.batch();
  if (!staged(batch)) return true;
  try {
    return queue.staging->ready(batch);
  } catch (const std::exception& error) {  // the text reaches all ranks
    throw Error(text("rank ", parts_.topology.rank, ": ", error.what()));
  }
}

void Executor::begin(ChannelQueue& queue, Execution& execution) {
  const Batch& batch = execution.batch();
  if (parts_.timeline.on()) execution.launched_at_ = parts_.clock.now();
  execution.state_ = ExecutionState::kPacking;
  if (batch.nothing_to_move()) batch.allocate_outputs();
  if (staged(batch)) execution.staged_ = &queue.staging->stage(batch);
}

void Executor::launch(ChannelQueue& queue, Execution& execution) {
  const Batch& batch = execution.batch();
  // Set first, because a launch that fails may have begun.
  execution.state_ = ExecutionState::kUnderWay;
  if (batch.exchanges_rows()) {
    execution.work_ = launch_alltoall(queue, batch);
  } else if (staged(batch)) {
    const Staged& staged = *execution.staged_;
    if (execution.work_ && execution.work_->again(staged.in, staged.out)) {
      parts_.counters.backend_calls.add(1);
    } else {
      execution.work_ = launch_staged(queue, batch, staged);
    }
  }
}

std::unique_ptr<Work> Executor::launch_staged(const ChannelQueue& queue, const Batch& batch,
                                              const Staged& staged) {
  // A channel for the host's memory runs Adasum as a composite of other collectives; channels for a
  // GPU implement it themselves.
  if (staged.collective.op == ReduceOp::kAdasum && queue.channel->host() == nullptr) {
    return composite::make_adasum(launcher(queue), staged.collective, batch.spec(), staged.in,
                                  staged.out);
  }
  parts_.counters.backend_calls.add(1);
  return queue.channel->launch(staged.collective, staged.in, staged.out);
}

composite::Launch Executor::launcher(const ChannelQueue& queue) {
  return [this, &queue](const Collective& collective, std::span<const std::byte> in,
                        std::span<std::byte> out) {
    parts_.counters.backend_calls.add(1);
    return queue.channel->launch(collective, in, out);
  };
}

// The sizes are exchanged in the host's memory, wherever the rows are.
std::unique_ptr<Work> Executor::launch_alltoall(const ChannelQueue& queue, const Batch& batch) {
  Submission& submission = batch.operations().front()->submission;
  const composite::Launch launch = launcher(queue);
  const composite::Launch launch_rows = [launch, &queue, &submission](const Collective& rows,
                                                                      std::span<const std::byte> in,
                                                                      std::span<std::byte> out) {
    Collective exchange = rows;
    exchange.input_ready = queue.staging->after_both(submission.input_ready, rows.input_ready);
    return launch(exchange, in, out);
  };
  Channel* const host = queue.channel->host();
  if (host == nullptr) return composite::make_alltoall(launch_rows, launch, submission);
  const composite::Launch launch_sizes =
      [host](const Collective& sizes, std::span<const std::byte> in, std::span<std::byte> out) {
        return host->launch(sizes, in, out);
      };
  return composite::make_alltoall(launch_rows, launch_sizes, submission);
}

void Executor::complete(ChannelQueue& queue, Execution& execution) {
  const Batch& batch = execution.batch();
  EventPtr output_ready = execution.work_ ? execution.work_->output_ready() : nullptr;
  if (staged(batch)) output_ready = queue.staging->unstage(batch, std::move(output_ready));
  if (output_ready) completions_.add(*queue.channel, batch, output_ready);
  if (queue.ordered) order_.end_turn();
  if (execution.work_ && !execution.work_->repeats()) execution.work_.reset();
  end(execution, output_ready);
}

void Executor::end(Execution& execution, const EventPtr& output_ready) {
  if (parts_.timeline.on() && execution.launched_at_ != TimePoint{})
    record(*execution.queue_, execution);
  finish_all(execution.batch(), {}, output_ready, false);
  execution.state_ = ExecutionState::kIdle;
  execution.batch_.release_operations();
}

void Executor::finish_all(const Batch& batch, const Status& status, const EventPtr& output_ready,
                          bool in_flight) {
  for (const OperationPtr& operation : batch.operations())
    finish_(operation, status, output_ready, in_flight);
}

void Executor::record(const ChannelQueue& queue, const Execution& execution) {
  const auto writer = parts_.timeline.writer();
  if (!writer) return;
  const TimePoint now = parts_.clock.now();
  const Batch& batch = execution.batch();
  const std::string detail =
      text(queue.backend, ", ", batch.agreed().size(), " tensors, ", batch.out_bytes(), " bytes");
  for (std::size_t i = 0; i < batch.agreed().size(); ++i) {
    const bool here = !batch.operations().empty();
    const std::string& name =
        (here ? batch.operations()[i]->request : batch.agreed()[i].request).name;
    if (here)
      writer->span(name, "NEGOTIATE", batch.operations()[i]->submitted, execution.agreed_at_);
    writer->span(name, "QUEUE", execution.agreed_at_, execution.launched_at_);
    writer->span(name, timeline_name_of(batch.request().kind), execution.launched_at_, now, detail);
  }
}

bool Executor::needs_polling() const noexcept {
  return active() && std::any_of(queues_.begin(), queues_.end(), [](const auto& entry) {
           return !entry.second.empty() && entry.second.channel->needs_polling();
         });
}

std::string Executor::first_active() const {
  for (const auto& [key, queue] : queues_) {
    if (!queue.empty()) return queue.front().batch().title();
  }
  return {};
}

std::vector<std::pair<OperationPtr, std::string>> Executor::running() const {
  std::vector<std::pair<OperationPtr, std::string>> found;
  for (const auto& [key, queue] : queues_) {
    for (const auto& execution : queue.executions()) {
      const bool begun = execution->state_ != ExecutionState::kQueued;
      const std::string state = (begun ? "runs on " : "agreed, queued for ") + queue.backend;
      for (const OperationPtr& operation : execution->batch().operations())
        found.emplace_back(operation, state);
    }
  }
  return found;
}

void Executor::abort(const Status& status) noexcept {
  for (auto& [key, queue] : queues_) {
    queue.channel->abort();
    while (!queue.empty()) {
      const std::shared_ptr<Execution> execution = queue.pop();
      // The host does not pack between two calls, but a device may still be packing.
      const bool on_device = execution->batch().spec().device.type != DeviceType::kCpu;
      const bool in_flight =
          execution->state_ > (on_device ? ExecutionState::kQueued : ExecutionState::kPacking);
      execution->work_.reset();
      if (in_flight) queue.staging->abandon();
      finish_all(execution->batch(), status, nullptr, in_flight);
      execution->state_ = ExecutionState::kIdle;
      execution->batch_.release_operations();
    }
  }
  in_flight_ = 0;
  completions_.abandon();
  order_.end_all();
}

}  // namespace hvd::runtime
