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
  /// Tensors of 4 KiB per step.
  int tensors = 20;
  /// Seconds for which the program is idle afterwards.
  double pause_seconds = 3;
};

/// Measures the cost of leaving schedule replay once, and the share of a core that hvd uses while
/// the program does not call it. Collective over the ranks of the session; rank 0 prints. @return
/// {"deviation": {...}, "idle": {...}}
Json run_steady(const Session& session, const SteadyOptions& options, std::ostream& out);

}  // namespace hvd::bench
