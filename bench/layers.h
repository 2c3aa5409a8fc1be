#pragma once

#include <iosfwd>

#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"

namespace hvd::bench {

struct LayersOptions {
  int threads = 0;     ///< of LibTorch's per rank; 0: the cores divided by the ranks of this host
  int batch_size = 8;  ///< images per rank
  RepetitionLimits repetitions = {.budget_seconds = 10, .least = 10, .most = 200};
};

/// SyncBatchNorm2d, one layer alone, in sizes of ResNet-50's, beside what it is made of. Collective
/// over the ranks of the session; rank 0 prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
Json run_layers(const Session& session, const LayersOptions& options, std::ostream& out);

}  // namespace hvd::bench
