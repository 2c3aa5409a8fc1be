#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/cpu_quota.h"
#include "hvd/options.h"

namespace hvd::runtime {

/// Which threads make progress, and how they wait, on the cores that a rank has.
struct ProgressPolicy {
  bool inline_progress = false;  ///< submitting threads make what progress they can at once
  bool spins = false;            ///< a waiting thread spins for a moment before it yields its core
};

/// @param ranks of this host
/// @param quota what cgroups grant this process, in CPUs, which the ranks of this host share
ProgressPolicy choose_progress_policy(ProgressMode, int ranks,
                                      std::optional<double> quota = cpu_quota());

/// What a driver polls for that sleeps between its looks, the most urgent first.
enum class PollFor : std::uint8_t {
  kReplayedLaunch,  ///< a batch on a GPU whose launch waits for ranks of other hosts
  kTransfer,        ///< messages that are being moved: large ones need both sides again and again
  kMessages,        ///< messages of other hosts, which cannot ring
};

inline constexpr Duration kShortestSleep = std::chrono::microseconds(20);

/// How long to sleep until the next look, longer from look to look.
/// @param looks before this one that found no work
Duration poll_interval(PollFor, int looks);

/// For messages: "inline progress, 1 core per rank".
std::string describe(const ProgressPolicy&, int ranks, std::optional<double> quota = cpu_quota());

}  // namespace hvd::runtime
