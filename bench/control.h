#pragma once

#include <iosfwd>
#include <vector>

#include "bench/report.h"
#include "bench/session.h"

namespace hvd::bench {

struct ControlOptions {
  /// Timed operations per way of waiting and kind of name.
  int repetitions = 1000;
  /// Pause before each operation that measures the wake-up of a sleeping thread, so that the thread
  /// sleeps.
  double pause_ms = 1.0;
  /// Numbers of ranks to simulate.
  std::vector<int> worlds = {64, 256, 1024, 4096, 16384};
  int tensors = 161;
};

/// Latency of an allreduce of 8 bytes by the kind of negotiation and by the thread that drives the
/// engine, and the cost of the coordinator in simulated worlds. Collective over the ranks of the
/// session; rank 0 prints.
/// @return {"latency": [...], "worlds": [...]}; the worlds on rank 0 only
Json run_control(const Session& session, const ControlOptions& options, std::ostream& out);

}  // namespace hvd::bench
