#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "engine/runtime_options.h"
#include "negotiation/liveness.h"
#include "negotiation/messages.h"
#include "observe/counters.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// Sends control messages and counts them. A pair of references: every part of an engine that sends
/// has its own.
///
/// Not thread-safe: the thread that drives the engine. What the control plane throws goes through.
class ControlSender {
 public:
  ControlSender(control::ControlPlane& control, observe::Counters& counters) noexcept
      : control_(control), counters_(counters) {}

  void send(int rank, const wire::Bytes& bytes) const {
    count(1, bytes.size());
    control_.send(rank, bytes);
  }
  /// @param ranks others than this one
  void send(std::span<const int> ranks, const wire::Bytes& bytes) const {
    count(ranks.size(), bytes.size());
    control_.send(ranks, bytes);
  }

 private:
  void count(std::size_t messages, std::size_t bytes) const noexcept {
    counters_.control_messages_sent.fetch_add(messages, std::memory_order_relaxed);
    counters_.control_bytes_sent.fetch_add(messages * bytes, std::memory_order_relaxed);
  }

  control::ControlPlane& control_;
  observe::Counters& counters_;
};

/// The time as the steps of an engine see it, and for how long the whole process was stopped, as
/// far as that shows: others cannot be blamed for what they did not hear from it meanwhile.
///
/// Not thread-safe: the thread that drives the engine. Nothing throws.
class StepTime {
 public:
  /// @param longest_sleep between two steps, while the process is not stopped
  StepTime(const Clock& clock, Duration longest_sleep) noexcept
      : clock_(clock), longest_sleep_(longest_sleep), step_(clock.now()) {}

  void begin_step() noexcept {
    const TimePoint now = clock_.now();
    if (now - step_ > 2 * longest_sleep_) paused_ += now - step_ - longest_sleep_;
    step_ = now;
  }
  Duration longest_sleep() const noexcept { return longest_sleep_; }
  /// When this step began.
  TimePoint step() const noexcept { return step_; }
  TimePoint now() const noexcept { return clock_.now(); }
  /// Without the time for which the process was stopped.
  TimePoint awake(TimePoint time) const noexcept { return time - paused_; }
  TimePoint awake() const noexcept { return awake(now()); }
  /// What awake() was given for this.
  TimePoint on_the_clock(TimePoint awake) const noexcept { return awake + paused_; }

 private:
  const Clock& clock_;
  const Duration longest_sleep_;
  TimePoint step_;
  Duration paused_{};
};

/// Signs of life: gives this rank's, and looks now and then for those of the others that something
/// depends on.
///
/// Not thread-safe: the thread that drives the engine. Errors of the transport go through.
class PeerWatch {
 public:
  /// All outlive it.
  PeerWatch(const RuntimeOptions&, control::ControlPlane&, observe::Counters&, const StepTime&);

  void heard(int rank) { liveness_.heard(rank, time_.awake()); }
  void heard(RankSpan ranks) { liveness_.heard(ranks, time_.awake()); }
  /// A rank has asked this one, the coordinator, for a sign of life. It does so only while it
  /// waits, so that this one has to look after the others for it.
  void note_asked() noexcept { asked_until_ = time_.now() + options_.peer_timeout / 2; }
  /// As of this step.
  bool asked() const noexcept { return time_.step() < asked_until_; }

  /// Whether it is time for look(), and other things that have time.
  bool due(bool waiting) noexcept;
  TimePoint next() const noexcept { return next_; }
  /// @param waiting whether anything depends on the others now  @return one that is lost
  std::optional<control::PeerLoss> look(bool waiting);
  /// Ranks of this host that have said farewell so long ago that nothing of theirs is still to
  /// come. To be asked with look(), while this rank waits.
  std::vector<int> departed();

 private:
  const RuntimeOptions options_;
  control::ControlPlane& control_;
  const ControlSender sender_;
  const StepTime& time_;
  control::Liveness liveness_;
  TimePoint next_{};
  std::uint32_t endings_ = 0;  // that have been looked after
  TimePoint asked_until_{};
  struct Departed {
    TimePoint farewell{};  // as it was seen here
    std::optional<TimePoint> end = {};
  };
  std::map<int, Departed> departed_;
};

/// When a rank tells the coordinator that it waits and has nothing to go on with: again and again,
/// as reports of others may be on their way more slowly.
///
/// Not thread-safe: the thread that drives the engine. Nothing throws.
class BlockedNotice {
 public:
  /// @param deadlock_timeout zero: never
  explicit BlockedNotice(Duration deadlock_timeout) noexcept : interval_(deadlock_timeout / 5) {}

  /// A thread waits while nothing runs here, so it waits for a plan.
  void note_wait() noexcept { waits_ = true; }
  /// It has submitted more first, so the time begins anew.
  void note_submission() noexcept { told_at_.reset(); }
  /// A plan has come, or none is needed: nothing is known any more of threads that wait.
  void note_plan() noexcept { waits_ = false; }
  /// To be asked now and then.
  bool due(TimePoint now) noexcept;

 private:
  const Duration interval_;
  bool waits_ = false;
  std::optional<TimePoint> told_at_;  // or since when there is something to tell
};

}  // namespace hvd::runtime
