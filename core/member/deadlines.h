#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

/// The deadlines of an elastic job. One table derives them from HVD_PEER_TIMEOUT.
namespace hvd::member {

/// The deadlines, in the order of the table.
enum class Limit : std::size_t {
  kGrace,
  kBeat,
  kJoinWindow,
  kRenewal,
  kPing,
  kKill,
  kHeartbeat,
  kFence,
  kLease,
  kSilence,
  kChange,
  kStart,
  kStall,
  kElastic,
};
inline constexpr std::size_t kLimitCount = static_cast<std::size_t>(Limit::kElastic) + 1;

/// A duration that counts as infinite.
inline constexpr Duration kNever = Duration::max() / 4;

/// The user's settings. An empty value is derived from `peer`; 0 means never.
struct TimeSettings {
  Duration peer = std::chrono::seconds(30);  ///< HVD_PEER_TIMEOUT
  std::optional<Duration> heartbeat = {};    ///< --heartbeat
  std::optional<Duration> join_window = {};  ///< --join-window
  std::optional<Duration> change = {};       ///< --change-patience
  std::optional<Duration> start = {};        ///< --start-timeout
  std::optional<Duration> stall = {};        ///< HVD_STALL_SHUTDOWN
  std::optional<Duration> elastic = {};      ///< --elastic-timeout
};

/// A row of the table.
struct LimitRow {
  std::string_view name = {};
  /// The deadline without a setting, in parts of 1/3000 of the peer timeout.
  int parts = 0;
  /// The setting that replaces it, if there is one.
  std::optional<Duration> TimeSettings::*setting = nullptr;
  /// Deadlines that must pass one after the other within this one.
  std::array<std::optional<Limit>, 3> holds = {};
  std::string_view meaning = {};
};

/// All rows, in the order of Limit. A row holds only deadlines of rows before it.
std::span<const LimitRow> limit_rows() noexcept;

/// The deadlines of a job. No deadline is shorter than the sum of those that pass within it.
class Deadlines {
 public:
  /// A setting that is too short for the deadlines within it is raised. Deadlines within the peer
  /// timeout are lowered to fit into it, because the running engine also uses the peer timeout.
  /// Values outside 1 ms to 1 year are moved to the nearer end.
  explicit Deadlines(const TimeSettings& = {});

  Duration operator[](Limit limit) const noexcept {
    return values_[static_cast<std::size_t>(limit)];
  }
  /// A sentence for each setting that was changed.
  const std::vector<std::string>& adjustments() const noexcept { return adjustments_; }
  /// One line per deadline, for --verbose.
  std::vector<std::string> described() const;

 private:
  void set(Limit, const TimeSettings&);

  std::array<Duration, kLimitCount> values_{};
  std::vector<std::string> adjustments_;
};

}  // namespace hvd::member
