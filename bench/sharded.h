#pragma once

#include <iosfwd>
#include <string>

#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"

namespace hvd::bench {

struct ShardedOptions {
  int threads = 0;  ///< of LibTorch's per rank; 0: the cores divided by the ranks of this host
  std::string set = "gpt2";
  int lead = 4;  ///< untimed steps before each timed one
  RepetitionLimits repetitions = {.budget_seconds = 60, .least = 5, .most = 200};
};

/// A training step with Adam, and the bytes of its state, of a ShardedOptimizer beside a
/// DistributedOptimizer. Collective over the ranks of the session; rank 0 prints.
/// @return {"correct": ..., ...}, on every rank
Json run_sharded(const Session& session, const ShardedOptions& options, std::ostream& out);

}  // namespace hvd::bench
