#pragma once

#include <cstdint>
#include <string>

#include "public/elastic_stage.h"

namespace hvd::testing {

/// Which worker is to end at a point.
enum class Role : std::uint8_t {
  kFirst,     ///< rank 0 of its last generation
  kSurvivor,  ///< another one that has survived a change
  kJoiner,    ///< one that has not
};

/// A moment in the life of a worker.
struct KillPoint {
  elastic::Stage stage = {};
  Role role = {};

  /// For Board::point.
  std::int64_t number() const {
    return 1 + 3 * static_cast<std::int64_t>(stage) + static_cast<std::int64_t>(role);
  }
  std::string name() const {
    static constexpr const char* kStages[] = {"ready",     "assigned", "connecting", "giving",
                                              "receiving", "synced",   "committing", "at the end"};
    static constexpr const char* kRoles[] = {"rank 0", "a survivor", "a joiner"};
    return std::string(kRoles[static_cast<int>(role)]) + " " + kStages[static_cast<int>(stage)];
  }
};

}  // namespace hvd::testing
