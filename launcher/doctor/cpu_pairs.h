#pragma once

#include <optional>
#include <string>
#include <vector>

#include "doctor/facts.h"

namespace hvd::launcher::doctor {

/// The caches that several of these CPUs share, the smallest first.
/// @param synthetic hwloc's description of a machine to use instead of this one
Fact<std::vector<SharedCache>> shared_caches(
    const std::vector<int>& allowed, const std::optional<std::string>& synthetic = std::nullopt);

/// One pair of CPUs for each distance that occurs between the allowed ones, the closest first,
/// without a time.
Fact<std::vector<CpuPair>> pairs_by_distance(
    const std::vector<int>& allowed, const std::optional<std::string>& synthetic = std::nullopt);

/// The time that a flag takes from one CPU to the other and back, measured for about 40 ms by two
/// bound threads: the fastest of many samples, so that other processes on these CPUs do not count.
Fact<double> flag_round_trip_ns(int first, int second);

}  // namespace hvd::launcher::doctor
