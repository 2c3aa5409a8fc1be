#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/composite/composite_work.h"
#include "base/clock.h"
#include "device/buffer_ring.h"
#include "device/context.h"
#include "execution/batch_execution.h"
#include "hvd/backend.h"

namespace hvd::runtime {

/// What a channel queue of a device has besides its channel: streams for packing and unpacking, so
/// that the next batch is packed while this one is reduced, and buffers.
struct DevicePipeline {
  /// @param channel outlives this
  /// @param folds factors of floating types are applied while packing and unpacking
  DevicePipeline(device::Context&, Channel& channel, bool folds);
  ~DevicePipeline();

  device::Context& context;
  Channel& channel;
  const bool folds;
  const device::OwnedStream in;
  const device::OwnedStream out;
  device::BufferPool buffers;
  device::BufferRing channels_own;  ///< for what is fused and as large on every rank, see
                                    ///< Channel::fusion_buffers()
};

/// Starts a batch whose tensors are on the device: one launch packs them (and scales and casts)
/// behind their input_ready events, the collective follows, and one launch unpacks; an unfused one
/// without a factor or a cast goes to the channel as it is. The Work is complete once all of that
/// is queued, which takes no time of the device, and output_ready() is the event behind it. No call
/// waits on the host.
/// @param execution and pipeline outlive the Work
std::unique_ptr<Work> start_on_device(DevicePipeline& pipeline, BatchExecution& execution,
                                      const composite::Launch& launch,
                                      const composite::Launch& launch_on_host);

/// Batches that are complete for the host and still queued on the device: keeps their memory alive,
/// and notices when one fails there. Used by the thread that drives the engine.
class DeviceCompletions {
 public:
  /// @param limit how long anything may be in the queue; zero: forever
  DeviceCompletions(const Clock& clock, Duration limit) : clock_(clock), limit_(limit) {}

  void add(Channel&, const BatchExecution&, EventPtr output_ready);
  bool empty() const noexcept { return entries_.empty(); }
  bool has(const Channel&) const noexcept;
  /// Looks, now and then, which have come to their end. @throws PeerLostError, Error when one has
  /// failed or takes too long
  void look();
  /// When to look next; nothing when nothing is in the queue.
  std::optional<TimePoint> next_look() const noexcept;
  /// The memory is kept until the process ends. See Note [Who frees the buffer].
  void abandon() noexcept;

 private:
  struct Entry {
    Channel* channel;
    EventPtr output_ready;
    std::vector<std::shared_ptr<const void>> keep_alive;
    std::string what;
    TimePoint since;
  };
  const Clock& clock_;
  const Duration limit_;
  std::deque<Entry> entries_;
  TimePoint next_look_{};
};

}  // namespace hvd::runtime
