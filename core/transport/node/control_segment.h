#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/cache_line.h"
#include "base/clock.h"
#include "base/doorbell.h"
#include "base/message_box.h"
#include "base/process_watch.h"
#include "base/shared_segment.h"
#include "transport/node/life_lock.h"
#include "transport/node/mail_ring.h"

namespace hvd::host {

/// A segment of shared memory per host, with a doorbell, a heartbeat, arrival flags, a farewell
/// flag and a failure report for each of its ranks, and a queue of messages and a box for one
/// message for each pair of them.
///
/// Any thread may call doorbell() and find_loss(); only the thread that drives the engine calls the
/// rest. The segment has a name only until all ranks have mapped it (unlink()), so that killed
/// ranks leave no file behind.
class ControlSegment {
 public:
  /// For report_loss(): a rank is lost, but it is unknown which.
  static constexpr int kUnknownRank = -1;

  struct Loss {
    int slot = 0;
    std::string cause = {};
    /// The world rank whose loss made the slot's process fail (possibly its own rank), or
    /// kUnknownRank. `cause` is then the text of its report.
    std::optional<int> accused = {};
  };

  /// A control segment of one slot in private memory, for a rank that is alone on its host or
  /// cannot share memory.
  static ControlSegment solitary();
  /// Makes the segment, with `slots` slots. Called by the first rank of a host.
  /// @throws hvd::Error when shared memory is missing or too small
  static ControlSegment create(const std::string& name, int slots);
  /// Maps the segment. Called by the other ranks of the host.
  /// @throws hvd::Error when it cannot be mapped or was not made by create() of the same build
  static ControlSegment attach(const std::string& name, int slots);

  ControlSegment(ControlSegment&& other) noexcept;
  ControlSegment& operator=(ControlSegment&& other) noexcept;
  ControlSegment(const ControlSegment&) = delete;
  ControlSegment& operator=(const ControlSegment&) = delete;
  ~ControlSegment();

  /// Takes a slot: writes this process's identity and a first heartbeat.
  void enter(int slot, TimePoint now) noexcept;
  /// Removes the name. Call it once every rank has mapped the segment or failed to.
  void unlink() noexcept;
  /// Starts to watch the processes of the other slots. Call it once all slots have been entered.
  void watch_others(TimePoint now);

  int slots() const noexcept { return slots_; }
  Doorbell& doorbell(int slot) noexcept;
  /// @param flag below kArrivalFlags
  ArrivalFlags& arrival_flags(int slot, int flag) noexcept;
  /// The arrival flags for all other hosts together.
  ArrivalFlags& remote_arrival_flags() noexcept;
  /// Counts the messages that have been sent to the slot's rank.
  std::atomic<std::uint64_t>& message_count(int slot) noexcept;
  /// Counts the entries of all rings to the slot's rank.
  std::atomic<std::uint64_t>& mail_count(int slot) noexcept;
  /// Whether the slot's rank is to be rung for lazy messages.
  std::atomic<bool>& awaits_lazy_mail(int slot) noexcept;
  /// Whether each pair of slots has rings. Hosts with very many ranks have none.
  bool has_mail_rings() const noexcept { return ring_capacity_ > 0; }
  /// @pre has_mail_rings()
  MailRing mail_ring(int from_slot, int to_slot) noexcept;
  /// Whether each pair of slots has boxes. Very many slots have no room for them.
  bool has_message_boxes() const noexcept { return box_capacity_ > 0; }
  /// @pre has_message_boxes()
  MessageBox message_box(int from_slot, int to_slot) noexcept;
  /// Number of processes whose end any process of the host has detected. A change rings all
  /// doorbells, and check() then returns a loss.
  std::uint32_t endings() const noexcept;
  Doorbell& own_doorbell() noexcept { return doorbell(own_); }
  std::uint64_t own_message_count() noexcept {
    return message_count(own_).load(std::memory_order_acquire);
  }
  void heartbeat(TimePoint now) noexcept;
  void farewell() noexcept;
  /// Reports that this process fails because it has lost a world rank (or kUnknownRank), and that
  /// it may end at any time. The text is truncated to the size of its field (511 bytes).
  void report_loss(int world_rank, std::string_view cause) noexcept;
  /// Returns the first slot whose process accuses another rank, or which has ended or sent no
  /// heartbeat for `timeout` without a farewell.
  std::optional<Loss> check(TimePoint now, Duration timeout);
  /// The processes of the other slots. Call it once all slots have been entered.
  std::vector<ProcessIdentity> other_processes();
  /// The other slots that have sent a farewell, each with whether its process has ended.
  std::vector<std::pair<int, bool>> departures();
  /// Returns the first loss found in one pass. For threads that do not drive the engine. Ignores
  /// heartbeats, which take time to judge, and accusations of `own_rank`.
  std::optional<Loss> find_loss(int own_rank) noexcept;

 private:
  struct Header;
  struct Slot;
  /// The last observation of another slot. The age of a heartbeat is measured by this process's
  /// clock from its first observation, so that the clocks of processes need not agree.
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
  std::size_t ring_capacity_ = 0;
  std::size_t box_capacity_ = 0;
  int own_ = 0;
  std::vector<Watched> watched_;
  std::unique_ptr<LifeWatch> life_watch_;  // uses the segment
};

}  // namespace hvd::host
