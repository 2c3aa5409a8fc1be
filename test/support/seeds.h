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

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). The
/// library's distributions may differ between platforms; this does not.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : state_(seed * 0x9e3779b97f4a7c15U + stream) {
    next();
  }
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  int below(int limit) { return static_cast<int>(next() % static_cast<std::uint64_t>(limit)); }
  bool chance(int percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

}  // namespace hvd::testing
