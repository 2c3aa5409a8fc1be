#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/cpu_quota.h"
#include "hvd/options.h"

namespace hvd::runtime {

/// Which threads make progress, and how they wait, given a rank's cores.
struct ProgressPolicy {
  bool inline_progress = false;  ///< submitting threads make progress without blocking
  bool spins = false;            ///< a waiting thread spins for a moment before it yields its core
};

/// @param ranks number of ranks of this host
/// @param quota CPUs that cgroups grant this process, shared by the ranks of this host
ProgressPolicy choose_progress_policy(ProgressMode, int ranks,
                                      std::optional<double> quota = cpu_quota());

/// The reasons for which a sleeping driver polls, the most urgent first.
enum class PollFor : std::uint8_t {
  kReplayedLaunch,  ///< a batch on a GPU whose launch waits for ranks of other hosts
  kTransfer,        ///< messages in transfer: large ones need repeated progress on both sides
  kMessages,        ///< messages of other hosts, which cannot ring the doorbell
};

inline constexpr Duration kShortestSleep = std::chrono::microseconds(20);

/// The time to sleep before the next poll, which grows from poll to poll.
/// @param polls number of earlier polls that found no work
Duration poll_interval(PollFor, int polls);

/// A description for log messages: "inline progress, 1 core per rank".
std::string describe(const ProgressPolicy&, int ranks, std::optional<double> quota = cpu_quota());

}  // namespace hvd::runtime
