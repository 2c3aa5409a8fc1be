#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/composite/composite_work.h"
#include "base/clock.h"
#include "control/negotiator.h"
#include "execution/batch_execution.h"
#include "execution/device_batch.h"
#include "execution/fusion_buffer.h"
#include "execution/operation_state.h"
#include "execution/timeline_slot.h"
#include "hvd/backend.h"
#include "observe/counters.h"

namespace hvd::runtime {

/// First in, first out. Keeps its memory.
class ExecutionQueue {
 public:
  bool empty() const noexcept { return head_ == executions_.size(); }
  BatchExecution& front() const noexcept { return *executions_[head_]; }
  void push(std::shared_ptr<BatchExecution> execution);
  std::shared_ptr<BatchExecution> pop() noexcept;
  std::span<const std::shared_ptr<BatchExecution>> executions() const noexcept {
    return std::span(executions_).subspan(head_);
  }

 private:
  std::vector<std::shared_ptr<BatchExecution>> executions_;
  std::size_t head_ = 0;  // what is before it has been taken
};

/// A channel and what is to run on it.
struct ChannelQueue {
  std::unique_ptr<Channel> channel;
  std::string backend;
  ExecutionQueue pending;
  bool retired = false;
  /// For GPUs. Its batches are launched in one order over all queues that are `ordered`, the
  /// plan's: communicators that share a GPU must be used in the same order everywhere.
  std::unique_ptr<DevicePipeline> device;
  bool ordered = false;
};

/// Runs agreed batches: packs, hands to the channel, unpacks, completes. Everything between a plan
/// and on_done.
///
/// Used by the thread that drives the engine. Batches of one channel run one after the other in the
/// order of the plan; batches of different channels side by side.
class Executor {
 public:
  /// Tells that an operation has ended.
  using Finish = std::function<void(const OperationPtr&, const Status&,
                                    const EventPtr& output_ready, bool in_flight)>;
  struct Environment {
    const Topology& topology;
    Peers& peers;
    const Clock& clock;
    observe::Counters& counters;
    TimelineSlot& timeline;
    std::shared_ptr<SharedArena> arena = nullptr;       ///< of this rank
    std::shared_ptr<device::Context> device = nullptr;  ///< of this rank, if it has a GPU
    Duration device_limit = {};  ///< how long work may be in a device's queue; zero: forever
  };

  Executor(Environment, std::vector<std::shared_ptr<Backend>>,
           std::optional<std::string> forced_backend, Finish);
  ~Executor();

  /// @param operations this rank's side of each agreed operation; none when it is absent from the
  /// batch
  void start(control::AgreedBatch, std::vector<OperationPtr> operations);
  /// For a batch that will be started again and again, without allocating anything then.
  std::shared_ptr<BatchExecution> prepare(control::AgreedBatch);
  /// Only these will run from now on: frees the buffers that none of them needs.
  void keep_buffers_for(std::span<const std::shared_ptr<BatchExecution>>);
  /// @pre all its operations are there, and it does not run
  void start(const std::shared_ptr<BatchExecution>&);
  /// The set was removed: its channels are closed once what was started on them has ended.
  void retire(int process_set);
  /// Asked at the beginning of a round of the engine: the device that has to be current for all of
  /// it; null: none has to be. See Note [The device of MPI's calls].
  device::Context* device_to_be_current() noexcept;
  /// True when something moved. Throws hvd::Error when a backend fails.
  bool progress();
  bool active() const noexcept { return in_flight_ > 0; }
  /// Something is in flight, visible only by polling.
  bool needs_polling() const noexcept;
  /// Batches that have been started and have not ended.
  std::size_t in_flight() const noexcept { return in_flight_; }
  /// What is complete here and still in a device's queue.
  const DeviceCompletions& device_completions() const noexcept { return device_completions_; }
  /// The name of an operation that runs or waits to run; empty when none does.
  std::string first_active() const;
  /// What runs or waits to run, and which of the two.
  std::vector<std::pair<OperationPtr, std::string>> running() const;
  /// Ends everything with this status.
  void abort(const Status&) noexcept;

 private:
  ChannelQueue& queue_for(const BatchExecution&);
  ChannelQueue& device_queue_for(const BatchExecution&);
  std::unique_ptr<Work> launch_on_device(ChannelQueue&, BatchExecution&);
  bool device_may_launch(ChannelQueue&, const BatchExecution&);
  void close_retired();
  Backend& choose_backend(const ChannelSpec&, const Collective&) const;
  bool progress(ChannelQueue&);
  void launch(ChannelQueue&, BatchExecution&);
  void complete(ChannelQueue&, BatchExecution&);
  void record(const ChannelQueue&, const BatchExecution&);

  const Environment environment_;
  std::vector<std::shared_ptr<Backend>> backends_;
  std::optional<std::string> forced_backend_;
  Finish finish_;
  FusionBufferPool buffers_;
  std::map<std::pair<int, std::string>, ChannelQueue>
      queues_;  // by process set and backend; node addresses are stable: executions point here
  std::size_t in_flight_ = 0;
  DeviceCompletions device_completions_;
  std::uint64_t device_launches_ = 0;   // of ordered queues, started and
  std::uint64_t device_completed_ = 0;  // completed
  bool carries_device_memory_ = false;  // a channel does
  bool device_is_current_ = false;      // in this round
};

}  // namespace hvd::runtime
