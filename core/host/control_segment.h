#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/arrival_flags.h"
#include "base/clock.h"
#include "base/doorbell.h"
#include "base/process_watch.h"
#include "base/shared_segment.h"
#include "host/life_lock.h"

namespace hvd::host {

/// A segment of shared memory per host, with a doorbell, a heartbeat, arrival flags, a farewell
/// flag and a failure report for each of its ranks.
///
/// doorbell() may be used by any thread; the rest by the thread that drives the engine.
/// The segment has a name only while the ranks map it (unlink()), so that nothing is left behind by
/// ranks that are killed.
class ControlSegment {
 public:
  struct Loss {
    int slot = 0;
    std::string cause = {};
    /// World rank: the slot's process has failed because it lost this one (maybe itself); `cause`
    /// is then what it says of that.
    std::optional<int> accused = {};
  };

  /// A control segment of one slot in private memory, for a rank that is alone on its host or
  /// cannot share memory.
  static ControlSegment solitary();
  /// The first rank of a host makes the segment, of `slots` slots. @throws hvd::Error when shared
  /// memory is missing or too small.
  static ControlSegment create(const std::string& name, int slots);
  /// The others map it. @throws hvd::Error when it cannot be mapped or is not what create() made.
  static ControlSegment attach(const std::string& name, int slots);

  ControlSegment(ControlSegment&& other) noexcept;
  ControlSegment& operator=(ControlSegment&& other) noexcept;
  ControlSegment(const ControlSegment&) = delete;
  ControlSegment& operator=(const ControlSegment&) = delete;
  ~ControlSegment();

  /// Takes a slot: writes this process's identity and a first heartbeat.
  void enter(int slot, TimePoint now) noexcept;
  /// Removes the name; once every rank has mapped the segment, or given up.
  void unlink() noexcept;
  /// Begins to look after the other slots, and to be looked after; once all have been entered.
  void watch_others(TimePoint now);

  int slots() const noexcept { return slots_; }
  Doorbell& doorbell(int slot) noexcept;
  ArrivalFlags& arrival_flags(int slot) noexcept;
  /// Of all other hosts together.
  ArrivalFlags& remote_arrival_flags() noexcept;
  /// Counts the messages that have been sent to the slot's rank.
  std::atomic<std::uint64_t>& message_count(int slot) noexcept;
  /// How many processes have been seen to end, by any of them: when it changes, all are rung, and
  /// check() has something to say.
  std::uint32_t endings() const noexcept;
  Doorbell& own_doorbell() noexcept { return doorbell(own_); }
  std::uint64_t own_message_count() noexcept {
    return message_count(own_).load(std::memory_order_acquire);
  }
  void heartbeat(TimePoint now) noexcept;
  void farewell() noexcept;
  /// This process fails because it has lost a world rank, and may end at any time. The text is cut
  /// off after some hundred bytes.
  void accuse(int world_rank, std::string_view cause) noexcept;
  /// The first slot whose process accuses another rank, or has ended or not beaten for `timeout`
  /// without having said farewell.
  std::optional<Loss> check(TimePoint now, Duration timeout);
  struct Departure {
    int slot = 0;
    bool ended = false;  ///< its process
  };
  /// The other slots that have said farewell.
  std::vector<Departure> departures();
  /// The first loss in one look, from a thread that does not drive the engine: without heartbeats,
  /// which take time to judge. Accusations of `own_rank` tell it nothing.
  std::optional<Loss> glance(int own_rank) noexcept;

 private:
  struct Header;
  struct Slot;
  /// What is known about another slot. The age of a heartbeat is measured by this process's clock,
  /// from when it was first seen, so that clocks need not agree.
  struct Watched {
    int slot = 0;
    ProcessWatch process = {};
    std::int64_t heartbeat = 0;
    TimePoint seen = {};
  };

  ControlSegment(std::unique_ptr<SharedSegment>, int slots) noexcept;
  static std::size_t bytes_for(int slots) noexcept;
  Slot& slot(int index) noexcept;

  std::shared_ptr<SharedSegment> segment_;
  int slots_ = 0;
  int own_ = 0;
  std::vector<Watched> watched_;
  std::unique_ptr<LifeWatch> life_watch_;  // uses the segment
};

}  // namespace hvd::host
