#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"

namespace hvd::bench {

struct CarriersOptions {
  std::vector<std::size_t> sizes = {8, std::size_t{1} << 20, std::size_t{64} << 20};
  int rounds = 20;
  /// Limits for one contender at one size in one round.
  RepetitionLimits repetitions = {.budget_seconds = 0.3, .least = 3, .most = 300};
  int tensors = 161;  ///< of the first negotiation
};

/// hvd over MPI and over UCX, and what the two carriers do without hvd, all of it in turns.
/// Collective over the two ranks of the session, which has joined over UCX and does so again in the
/// end; rank 0 prints.
/// @return {"correct": ..., "rows": [...], "first_negotiation": {...}}, on every rank
/// @throws std::runtime_error with more or fewer ranks, or a session over MPI
Json run_carriers(const Session& session, const CarriersOptions& options, std::ostream& out);

}  // namespace hvd::bench
