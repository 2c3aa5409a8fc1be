#pragma once

#include <cstdint>
#include <filesystem>
#include <iosfwd>

#include "bench/report.h"
#include "bench/session.h"

namespace hvd::bench {

struct CheckpointOptions {
  int threads = 0;  ///< of LibTorch's per rank; 0: the cores divided by the ranks of this host
  std::int64_t megabytes = 500;  ///< of the state, 10^6 bytes
  int rounds = 5;
  int step_ms = 100;  ///< of computation per step
  std::filesystem::path folder = ".";
};

/// Measures how much saving slows the steps of a training, in the foreground and in the background.
/// Collective over the ranks of the session; rank 0 prints. Leaves no files in `folder`.
/// @return {"correct": ..., ...}, on every rank
/// @throws CheckpointError
Json run_checkpoint(const Session& session, const CheckpointOptions& options, std::ostream& out);

}  // namespace hvd::bench
