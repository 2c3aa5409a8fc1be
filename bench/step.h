#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"
#include "bench/step_contender.h"

namespace hvd::bench {

struct StepOptions {
  std::vector<std::string> sets = {"resnet50", "gpt2", "small1000", "mnist"};
  std::vector<std::string> contenders = {"one", "alone",    "hvd",    "mpi-chunked",
                                         "mpi", "mpi-flat", "reducer"};
  bool compute = false;
  Update update = Update::kSgd;
  int batch_size = 64;
  RepetitionLimits repetitions = {.budget_seconds = 20, .least = 20, .most = 500};
  /// Untimed steps before each timed one: a contender comes back to memory and to a schedule that
  /// others have disturbed.
  int lead = 1;
  /// 0: the cores divided by the ranks of this host
  int threads = 0;
  /// File with the results of gloo_peers.py, which are shown beside hvd's; empty: no file.
  std::string gloo_path;
};

/// A training step of every parameter set, by every contender. Collective over the ranks of the
/// session; rank 0 prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
/// @throws std::invalid_argument, std::runtime_error
Json run_step(const Session& session, const StepOptions& options, std::ostream& out);

}  // namespace hvd::bench
