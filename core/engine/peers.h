#pragma once

#include <algorithm>
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

/// Sends control messages and counts them. It holds references only, so every part of an engine
/// that sends messages has its own copy.
///
/// Not thread-safe: used by the thread that drives the engine. Errors of the control plane are
/// passed on.
class ControlSender {
 public:
  ControlSender(control::ControlPlane& control, observe::Counters& counters) noexcept
      : control_(control), counters_(counters) {}

  void send(int rank, const wire::Bytes& bytes) const {
    count(1, bytes.size());
    control_.send(rank, bytes);
  }
  /// See control::ControlPlane::send_lazily().
  void send_lazily(int rank, const wire::Bytes& bytes) const {
    count(1, bytes.size());
    control_.send_lazily(rank, bytes);
  }
  /// @param ranks other ranks
  void send(std::span<const int> ranks, const wire::Bytes& bytes) const {
    count(ranks.size(), bytes.size());
    control_.send(ranks, bytes);
  }

 private:
  void count(std::size_t messages, std::size_t bytes) const noexcept {
    counters_.control_messages_sent.add(messages);
    counters_.control_bytes_sent.add(messages * bytes);
  }

  control::ControlPlane& control_;
  observe::Counters& counters_;
};

/// Records the time of an engine's steps and estimates from gaps between them how long the whole
/// process was stopped. Silence of other ranks during a stop does not indicate a loss.
///
/// Not thread-safe: used by the thread that drives the engine. Does not throw.
class StepTime {
 public:
  /// @param longest_sleep the longest time between two steps of a process that is not stopped
  StepTime(const Clock& clock, Duration longest_sleep) noexcept
      : clock_(clock), longest_sleep_(longest_sleep), step_(clock.now()) {}

  enum class Precision : std::uint8_t { kExact, kAbout };
  /// @param precision kAbout: see Clock::about_now()
  void begin_step(Precision precision = Precision::kExact) noexcept {
    const TimePoint now =
        precision == Precision::kExact ? clock_.now() : std::max(step_, clock_.about_now());
    if (now - step_ > 2 * longest_sleep_) paused_ += now - step_ - longest_sleep_;
    step_ = now;
  }
  Duration longest_sleep() const noexcept { return longest_sleep_; }
  /// When this step began.
  TimePoint step() const noexcept { return step_; }
  TimePoint now() const noexcept { return clock_.now(); }
  /// Converts a time of the clock to a time that excludes stops of the process.
  TimePoint awake(TimePoint time) const noexcept { return time - paused_; }
  TimePoint awake() const noexcept { return awake(now()); }
  /// The inverse of awake().
  TimePoint on_the_clock(TimePoint awake) const noexcept { return awake + paused_; }

 private:
  const Clock& clock_;
  const Duration longest_sleep_;
  TimePoint step_;
  Duration paused_{};
};

/// Publishes this rank's heartbeat and checks the heartbeats of the ranks that it depends on.
///
/// Not thread-safe: used by the thread that drives the engine. Errors of the transport are passed
/// on.
class PeerWatch {
 public:
  /// The references outlive it.
  PeerWatch(const RuntimeOptions&, control::ControlPlane&, observe::Counters&, const StepTime&);

  void on_message_from(int rank) { liveness_.record_message(rank, time_.awake()); }
  void on_message_from(RankSpan ranks) { liveness_.record_message(ranks, time_.awake()); }
  /// Call this when the coordinator has received a ping. Ranks ping only while they wait, so the
  /// coordinator then checks the other ranks for them.
  void on_ping() noexcept { pinged_until_ = time_.now() + options_.peer_timeout / 2; }
  /// Whether a rank has pinged recently, as of this step.
  bool pinged() const noexcept { return time_.step() < pinged_until_; }

  /// Whether it is time for check() and other periodic work.
  bool due(bool waiting) noexcept;
  TimePoint next() const noexcept { return next_; }
  /// Publishes a heartbeat and looks for a lost rank.
  /// @param waiting whether this rank depends on others now @return a lost rank
  std::optional<control::PeerLoss> check(bool waiting);
  /// Ranks of this host that left the job so long ago that all their messages have arrived. Called
  /// together with check() while this rank waits.
  std::vector<int> departed();

 private:
  const RuntimeOptions options_;
  control::ControlPlane& control_;
  const ControlSender sender_;
  const StepTime& time_;
  control::Liveness liveness_;
  TimePoint next_{};
  std::uint32_t endings_ = 0;  // of processes, handled so far
  TimePoint pinged_until_{};
  struct Departed {
    TimePoint farewell{};  // when this rank found it
    std::optional<TimePoint> end = {};
  };
  std::map<int, Departed> departed_;
};

/// Decides when a blocked rank reports to the coordinator that it is blocked. The report is
/// repeated, because the reports of other ranks may take longer.
///
/// Not thread-safe: used by the thread that drives the engine. Does not throw.
class BlockedNotice {
 public:
  /// @param deadlock_timeout zero: never
  explicit BlockedNotice(Duration deadlock_timeout) noexcept : interval_(deadlock_timeout / 5) {}

  /// Call this when a thread waits for an operation that waits for a plan, and no batch runs.
  void on_blocked_wait() noexcept { waits_ = true; }
  /// Call this when the rank has submitted another operation: restarts the time.
  void on_submission() noexcept { reported_at_.reset(); }
  /// Call this when a plan has arrived or a schedule is replayed: the rank may not be blocked
  /// any more.
  void on_plan() noexcept { waits_ = false; }
  /// Whether to report now. Call this regularly.
  bool due(TimePoint now) noexcept;

 private:
  const Duration interval_;
  bool waits_ = false;
  std::optional<TimePoint>
      reported_at_;  // last report, or the time at which the rank became blocked
};

}  // namespace hvd::runtime
