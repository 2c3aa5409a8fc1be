#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace hvd::launcher::test {

/// The seeds of the runs of a campaign, and whether to print successful runs too.
struct CampaignSeeds {
  std::uint64_t first = 0;
  std::uint64_t seeds = 0;
  bool verbose = false;
};

/// Parses the command line. Returns nullopt, after printing the usage, if it is wrong.
inline std::optional<CampaignSeeds> campaign_seeds(int argc, char** argv, std::uint64_t seeds) {
  CampaignSeeds read{.seeds = seeds};
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) {
      read.verbose = true;
    } else if (i + 1 < argc && std::strcmp(argv[i], "--seeds") == 0) {
      read.seeds = std::strtoull(argv[++i], nullptr, 10);
    } else if (i + 1 < argc && std::strcmp(argv[i], "--first") == 0) {
      read.first = std::strtoull(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: %s [--seeds N] [--first SEED] [--verbose]\n", argv[0]);
      return std::nullopt;
    }
  }
  return read;
}

}  // namespace hvd::launcher::test
