#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "bench/exercise.h"
#include "bench/report.h"
#include "bench/session.h"
#include "bench/statistics.h"
#include "hvd/collectives.h"

namespace hvd::bench {

struct CollectivesOptions {
  std::vector<OpKind> kinds = {OpKind::kAllreduce};
  std::size_t lowest_bytes = 4;
  std::size_t highest_bytes = 256 << 20;
  std::size_t factor = 4;
  RepetitionLimits repetitions = {};
  Progress progress = Progress::kCaller;
  Memory memory = Memory::kOrdinary;
  /// File with the results of gloo_peers.py, which are shown beside hvd's; empty: no file.
  std::string gloo_path;
};

/// Every kind at every size, against its peers. Collective over the ranks of the session; rank 0
/// prints.
/// @return {"correct": ..., "rows": [...]}, on every rank
Json run_collectives(const Session& session, const CollectivesOptions& options, std::ostream& out);

}  // namespace hvd::bench
