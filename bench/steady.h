#pragma once

#include <iosfwd>

#include "bench/report.h"
#include "bench/session.h"

namespace hvd::bench {

struct SteadyOptions {
  /// Steps of a run; in every other run one of them has an operation that the others do not have.
  int steps = 1000;
  /// Pairs of runs.
  int rounds = 5;
  /// Of 4 KiB, per step.
  int tensors = 20;
  /// Seconds for which the program then does nothing.
  double pause_seconds = 3;
};

/// What leaving schedule replay once costs, and what hvd uses of a core while the program is busy
/// with something else. Collective over the ranks of the session; rank 0 prints. @return
/// {"deviation": {...}, "idle": {...}}
Json run_steady(const Session& session, const SteadyOptions& options, std::ostream& out);

}  // namespace hvd::bench
