#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "engine/batch.h"

namespace hvd::runtime {

/// Batches that are complete for the host and still queued on the device: keeps their memory alive,
/// and notices when one fails there. Used by the thread that drives the engine.
class DeviceCompletions {
 public:
  /// @param limit how long anything may be in the queue; zero: forever
  DeviceCompletions(const Clock& clock, Duration limit) : clock_(clock), limit_(limit) {}

  void add(Channel&, const Batch&, EventPtr output_ready);
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
