#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "negotiation/messages.h"

/// Random programs for the protocol simulation: what N ranks submit, in which steps, and where they
/// disagree.
namespace hvd::sim {

/// One operation of one step, which all ranks submit equally except for the listed exceptions.
struct Use {
  wire::Request request = {};
  std::vector<std::int64_t> first_dims = {};  ///< allgather: per rank
  std::map<int, wire::Request> deviating = {};
  std::set<int> skipped_by =
      {};  ///< these ranks submit it in a later step instead, before that step's own use
  std::map<int, Duration> late = {};  ///< these ranks submit it that long after the step began

  /// The request of `rank`.
  wire::Request asked_by(int rank) const;
};

/// Operations that are submitted at once: a group, or a single operation.
using Unit = std::vector<Use>;
using Step = std::vector<Unit>;

struct Scenario {
  std::uint64_t seed = 0;
  int ranks = 2;
  int tree_radix = 0;       ///< 0: every rank reports to rank 0
  Duration longest_hold{};  ///< in the tree
  std::size_t cache_capacity = 1024;
  std::int64_t fusion_threshold = 0;
  Duration longest_delay{};
  Duration longest_think{};
  Duration longest_execution{};
  bool split_groups = false;  ///< members of named groups are submitted one by one, in any order
  std::vector<Step> steps = {};
  std::map<int, std::size_t> leaves_after = {};  ///< rank -> the number of steps it takes part in

  bool anyone_waits_in_vain() const;  ///< some rank skips, is late or leaves early
  std::size_t max_operations_per_step() const;
};

inline constexpr Duration kStallWarning = std::chrono::milliseconds(400);
inline constexpr Duration kStallShutdown = std::chrono::milliseconds(1000);

Scenario make_scenario(std::uint64_t seed);

/// Uniform in [low, high], the same on every platform.
std::int64_t pick(std::mt19937_64& random, std::int64_t low, std::int64_t high);
Duration pick_up_to(std::mt19937_64& random, Duration longest);
bool chance(std::mt19937_64& random, int percent);

}  // namespace hvd::sim
