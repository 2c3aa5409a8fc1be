#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control/negotiator.h"
#include "control/process_set_table.h"
#include "fusion/fusion_buffer.h"
#include "hvd/backend.h"
#include "observe/counters.h"
#include "runtime/operation_state.h"
#include "runtime/timeline_slot.h"

namespace hvd::runtime {

/// An agreed operation together with this rank's side of it.
struct ExecutableOperation {
  control::AgreedOperation agreed;
  OperationPtr operation;
};

/// Runs agreed batches: packs, hands to the channel, unpacks, completes. Everything between a plan and on_done.
///
/// Used by the thread that drives the engine. Batches of one channel run one after the other in the order of the plan; batches of
/// different channels side by side.
class Executor {
 public:
  /// Tells that an operation has ended.
  using Finish = std::function<void(const OperationPtr&, const Status&, const EventPtr& output_ready, bool in_flight)>;
  struct Environment {
    const Topology& topology;
    Peers& peers;
    const control::ProcessSetTable& sets;
    const Clock& clock;
    observe::Counters& counters;
    TimelineSlot& timeline;
  };

  Executor(Environment, std::vector<std::shared_ptr<Backend>>, std::optional<std::string> forced_backend, Finish);
  ~Executor();

  void start(std::vector<ExecutableOperation> batch);
  /// True when something moved. Throws hvd::Error when a backend fails.
  bool progress();
  bool active() const noexcept { return in_flight_ > 0; }
  /// Batches that have been started and have not ended.
  std::size_t in_flight() const noexcept { return in_flight_; }
  /// The name of an operation that runs or waits to run; empty when none does.
  std::string first_active() const;
  /// Ends everything with this status.
  void abort(const Status&) noexcept;

 private:
  struct Job;
  struct Lane {
    std::unique_ptr<Channel> channel;
    std::string backend;
    ChannelSpec spec;
    std::deque<std::unique_ptr<Job>> queue;
  };
  Lane& lane_for(const Job&);
  Backend& choose_backend(const ChannelSpec&, const Collective&) const;
  void describe(Job&) const;
  bool progress(Lane&);
  void launch(Lane&, Job&);
  void prepare_in_place(Job&);
  void prepare_gather(Job&);
  void complete(Lane&, Job&);
  void unpack(Job&);

  Environment environment_;
  std::vector<std::shared_ptr<Backend>> backends_;
  std::optional<std::string> forced_backend_;
  Finish finish_;
  fusion::FusionBufferPool buffers_;
  std::map<std::pair<int, std::string>, Lane> lanes_;  // by process set and backend
  std::size_t in_flight_ = 0;
};

}  // namespace hvd::runtime
