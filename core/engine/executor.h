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
#include "engine/queue.h"
#include "engine/operations.h"
#include "engine/queue_factory.h"
#include "negotiation/negotiator.h"
#include "observe/counters.h"
#include "observe/timeline_writer.h"

namespace hvd::runtime {

/// Where the timeline goes, if anywhere. Costs one relaxed load while it is off. Thread-safe.
class TimelineSlot {
 public:
  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  /// The writer, or null.
  std::shared_ptr<observe::TimelineWriter> writer() const {
    const MutexLock lock(mutex_);
    return writer_;
  }
  /// Exchanges the writer; the old one is destroyed, and its file completed, when its last user is
  /// done.
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

/// Runs agreed batches. Everything between a plan and on_done, the same for every device:
///
///   queue_for(): the queue of the channel that can do it
///   begin():     may_begin(): Channel::ready(), Staging::ready() -> Staging::stage()
///   launch():    Staging::pack_part() is true -> Channel::launch()
///   complete():  Work::progress() is true, Staging::unpack_part() is true -> Staging::unstage()
///                -> the operations have ended, or will have when the device reaches an event
///                (DeviceCompletions)
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
    const Clock& clock;
    observe::Counters& counters;
    TimelineSlot& timeline;
    std::shared_ptr<device::Context> device = nullptr;  ///< of this rank, if it has a GPU
    /// How long work may be in a device's queue, and how long a batch under way may get no further;
    /// zero: forever.
    Duration limit = {};
  };

  Executor(Environment, std::unique_ptr<QueueFactory>, Finish);
  ~Executor();

  /// Opens the channel that the batch needs, unless it is open. A batch that is started again and
  /// again is prepared once, so that start() allocates nothing.
  /// @param operations this rank's side of each agreed operation, or null where it is put() later;
  /// empty when this rank is absent from the batch
  std::shared_ptr<Execution> prepare(control::AgreedBatch, std::vector<OperationPtr> operations);
  /// Only these will run from now on: frees the buffers that none of them needs.
  void keep_buffers_for(std::span<const std::shared_ptr<Execution>>);
  /// Queues the batch; one that only agrees on something (a barrier, a join, a change of process
  /// sets) ends at once. @pre all its operations are there, and it does not run
  void start(const std::shared_ptr<Execution>&);
  /// The set was removed: its channels are closed once what was started on them has ended.
  void retire(int process_set);
  /// Does what can be done now, of each queue's batches about kBytesPerCall. True when something
  /// moved: there may be more to do. Throws hvd::Error when a backend fails.
  bool progress();
  /// To be called now and then. What runs has been submitted by every rank, so each of them can
  /// take part. @param now without the time for which this process was stopped
  /// @throws PeerLostError for a batch that has got no further for too long
  void check_headway(TimePoint now);
  bool active() const noexcept { return in_flight_ > 0; }
  /// Something is in flight, visible only by polling.
  bool needs_polling() const noexcept;
  /// Batches that have been started and have not ended.
  std::size_t in_flight() const noexcept { return in_flight_; }
  /// Those of them that a batch of this process set and on this device would queue behind: of the
  /// same set, but for small operations that have a channel beside it; on a GPU of all sets, as its
  /// channels take turns.
  std::size_t batches_ahead(int process_set, DeviceType) const noexcept;
  /// What is complete here and still in a device's queue.
  const DeviceCompletions& device_completions() const noexcept { return completions_; }
  /// The name of an operation that runs or waits to run; empty when none does.
  std::string first_active() const;
  /// What runs or waits to run, and which of the two.
  std::vector<std::pair<OperationPtr, std::string>> running() const;
  /// Ends everything with this status.
  void abort(const Status&) noexcept;

 private:
  ChannelQueue& queue_for(const Batch&);
  bool progress(ChannelQueue&);
  [[noreturn]] void fail_standing(const ChannelQueue&, Duration standstill, int waits_for) const;
  struct Advance {
    bool moved = false;
    bool ended = false;
  };
  Advance advance(ChannelQueue&, Execution&);
  bool may_begin(const ChannelQueue&, const Execution&) const;
  void begin(ChannelQueue&, Execution&);
  void launch(ChannelQueue&, Execution&);
  std::unique_ptr<Work> launch_staged(const ChannelQueue&, const Batch&, const Staged&);
  std::unique_ptr<Work> launch_alltoall(const ChannelQueue&, const Batch&);
  composite::Launch launcher(const ChannelQueue&);
  void complete(ChannelQueue&, Execution&);
  void finish_all(const Batch&, const Status&, const EventPtr& output_ready, bool in_flight);
  void close_retired();
  void record(const ChannelQueue&, const Execution&);

  const Environment environment_;
  const std::unique_ptr<QueueFactory> factory_;
  const Finish finish_;
  std::map<std::pair<int, std::string>, ChannelQueue>
      queues_;  // by process set and name; node addresses are stable: executions point here
  std::size_t in_flight_ = 0;
  LaunchOrder order_;
  DeviceCompletions completions_;
};

}  // namespace hvd::runtime
