#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "member/messages.h"

namespace hvd::member {

/// A worker that will be in the next generation.
struct Entrant {
  WorkerId worker = 0;
  std::string host = {};
  /// Orders the workers by the time of their admission: those of an earlier generation first, and
  /// within a generation by rank.
  std::uint64_t serial = 0;
  StateSummary state = {};
  bool can_load = false;
  std::string address = {};
};

/// The members of a generation by rank, the root and the receivers.
struct Regroup {
  Assign assign = {};
  bool touched = false;  ///< no worker has a whole state: all receive the root's current state
  /// Workers whose whole state differed from that of most others with the same commit.
  std::vector<WorkerId> differed = {};
};

/// Decides which worker has which rank in a generation, and whose state all receive.
///
/// The ranks of a host are contiguous and in the order of their admission, and the host of the
/// longest-serving rank is first. The root is a worker with the highest commit; among these,
/// workers with a whole state come first, and among those the workers with the most common state. A
/// commit that a survivor has made is therefore never undone, and a state that differs is replaced.
/// If no worker has a state, rank 0 makes one. Returns no value if rank 0 cannot and the job is
/// past its start.
/// @param first whether this is the first generation, in which the program's initial state is valid
/// @pre there is an entrant
std::optional<Regroup> regroup(Generation, std::vector<Entrant>, bool first);

}  // namespace hvd::member
