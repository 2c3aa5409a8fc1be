#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace hvd::testing {

/// Whether tests run in full length: HVD_TEST_LONG, which test/run.sh --long sets.
inline bool long_run() { return std::getenv("HVD_TEST_LONG") != nullptr; }

/// How many seeds a simulation runs: `part`, or `full` in a long run. HVD_SIM_SEEDS=n lowers either
/// to n, for builds that are slow.
inline std::uint64_t seeds(std::uint64_t part, std::uint64_t full) {
  const std::uint64_t wanted = long_run() ? full : part;
  const char* const most = std::getenv("HVD_SIM_SEEDS");
  return most != nullptr ? std::min<std::uint64_t>(wanted, std::strtoull(most, nullptr, 10))
                         : wanted;
}

}  // namespace hvd::testing
