#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/composite/composite_work.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "device/context.h"
#include "engine/operations.h"
#include "engine/queue.h"
#include "engine/queue_factory.h"
#include "negotiation/negotiator.h"
#include "observe/counters.h"
#include "observe/timeline_writer.h"

namespace hvd::runtime {

/// Holds the writer of the timeline, if one is set. on() costs one relaxed load. Thread-safe.
class CurrentTimeline {
 public:
  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  /// The writer, or null.
  std::shared_ptr<observe::TimelineWriter> writer() const {
    const MutexLock lock(mutex_);
    return writer_;
  }
  /// Exchanges the writer. The old one is destroyed, and its file completed, when its last user
  /// releases it.
  std::shared_ptr<observe::TimelineWriter> exchange(
      std::shared_ptr<observe::TimelineWriter> writer) {
    const MutexLock lock(mutex_);
    on_.store(writer != nullptr, std::memory_order_relaxed);
    writer_.swap(writer);
    return writer;
  }

 private:
  std::atomic<bool> on_{false};
  mutable Mutex mutex_;
  std::shared_ptr<observe::TimelineWriter> writer_ HVD_GUARDED_BY(mutex_);
};

/// Runs agreed batches, from the plan to the callbacks, in the same way for every device:
///
///   queue_for(): the queue of the channel that can run it
///   begin():     may_begin(): Channel::ready(), Staging::ready() -> Staging::stage()
///   launch():    Staging::pack_part() is true -> Channel::launch()
///   complete():  Work::progress() is true, Staging::unpack_part() is true -> Staging::unstage()
///                -> the operations have ended, or will have when the device reaches an event
///                (DeviceCompletions)
///
/// Batches of one channel run one after the other in the order of the plan; batches of different
/// channels run side by side. Used by the thread that drives the engine.
class Executor {
 public:
  /// Called when an operation has ended.
  using Finish = std::function<void(const OperationPtr&, const Status&,
                                    const EventPtr& output_ready, bool in_flight)>;
  struct Parts {
    const Topology& topology;
    const Clock& clock;
    observe::Counters& counters;
    CurrentTimeline& timeline;
    /// Time limit for work in a device's queue, and for a batch that makes no progress; zero: no
    /// limit.
    Duration limit = {};
  };

  Executor(const Parts&, std::unique_ptr<QueueFactory>, Finish);
  ~Executor();

  /// Opens the channel that the batch needs, unless it is open. A batch that is started repeatedly
  /// is prepared once, so that start() allocates no memory.
  /// @param operations this rank's side of each agreed operation, or null for one that put() adds
  /// later; empty when this rank is absent from the batch
  std::shared_ptr<Execution> prepare(control::AgreedBatch, std::vector<OperationPtr> operations);
  /// Frees the buffers that these executions do not need. Called when no other execution will run
  /// from now on.
  void keep_buffers_for(std::span<const std::shared_ptr<Execution>>);
  /// Queues the batch. A batch that moves no data (a barrier, a join, a change of process sets)
  /// ends at once. @pre all its operations have been put, and it is not running
  void start(const std::shared_ptr<Execution>&);
  /// Fills a small batch ahead, if its channel can: then run_filled() is called instead of start().
  /// See Note [Filled on arrival] in pipeline.h. @return false if earlier batches of its channel
  /// have to end first. @pre all its operations have been put, and it is not running
  bool fill_ahead(Execution&);
  /// Runs the batch to its end. @return its bytes. @pre it is filled, and all ranks have filled it
  std::size_t run_filled(Execution&);
  /// Call this when the set was removed: closes its channels once their batches have ended.
  void retire(int process_set);
  /// Advances each queue by about kBytesPerCall of its batches. @return whether there was any
  /// progress; there may be more to do. @throws hvd::Error when a backend fails
  bool progress();
  /// Checks that the running batches make progress. Call this regularly. Every rank has
  /// submitted these batches, so no rank has a reason to delay them. @param now excludes the time
  /// for which this process was stopped
  /// @throws PeerLostError for a batch that has made no progress for too long
  void check_progress(TimePoint now);
  bool active() const noexcept { return in_flight_ > 0; }
  /// Whether work is in flight whose end does not ring the doorbell.
  bool needs_polling() const noexcept;
  /// Batches that were started and have not ended.
  std::size_t in_flight() const noexcept { return in_flight_; }
  /// The number of batches in flight behind which a batch of this process set and device would
  /// queue. On the host these are the batches of the same set, except small operations on the
  /// urgent channel. On a GPU they are the batches of all sets, because their channels run in one
  /// order.
  std::size_t batches_ahead(int process_set, DeviceType) const noexcept;
  /// Batches that are complete for the host and still in a device's queue.
  const DeviceCompletions& device_completions() const noexcept { return completions_; }
  /// The title of a batch that runs or waits to run; empty when there is no such batch.
  std::string first_active() const;
  /// The operations that run or wait to run, each with a text that describes its state.
  std::vector<std::pair<OperationPtr, std::string>> running() const;
  /// Ends all operations with this status.
  void abort(const Status&) noexcept;

 private:
  ChannelQueue& queue_for(const Batch&);
  bool progress(ChannelQueue&);
  [[noreturn]] void fail_stalled(const ChannelQueue&, Duration stalled_for, int waits_for) const;
  bool advance(ChannelQueue&, Execution&, bool& moved);
  bool may_begin(const ChannelQueue&, const Execution&) const;
  void begin(ChannelQueue&, Execution&);
  void launch(ChannelQueue&, Execution&);
  std::unique_ptr<Work> launch_staged(const ChannelQueue&, const Batch&, const Staged&);
  std::unique_ptr<Work> launch_alltoall(const ChannelQueue&, const Batch&);
  composite::Launch launcher(const ChannelQueue&);
  void complete(ChannelQueue&, Execution&);
  void end(Execution&, const EventPtr& output_ready);
  void finish_all(const Batch&, const Status&, const EventPtr& output_ready, bool in_flight);
  void close_retired();
  void record(const ChannelQueue&, const Execution&);

  const Parts parts_;
  const std::unique_ptr<QueueFactory> factory_;
  const Finish finish_;
  std::map<std::pair<int, std::string>, ChannelQueue>
      queues_;  // by process set and name; node addresses are stable: executions point here
  std::size_t in_flight_ = 0;
  LaunchOrder order_;
  DeviceCompletions completions_;
};

}  // namespace hvd::runtime
