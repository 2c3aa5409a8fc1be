#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// A worker that an elastic job has lost.
struct LostWorker {
  std::uint64_t id = 0;
  std::string host = {};
  std::uint64_t generation = 0;  ///< the last one in which it was a rank; 0: it was not a rank yet
  std::string cause = {};
  std::uint64_t replacement = 0;  ///< 0: it was not replaced
};

/// Everything that the last message of an elastic job depends on.
struct ElasticRecord {
  int code = 0;             ///< hvdrun's exit code
  std::string reason = {};  ///< why the job has ended; empty: it is complete
  std::vector<LostWorker> lost = {};
  std::uint64_t tail_worker = 0;  ///< the worker whose last lines follow; 0: none
  std::vector<std::string> stderr_tail = {};
};

/// How a worker's program has ended, as in "killed by signal 9 (SIGKILL)". @param death the
/// program's own notice of its end
std::string describe_end(const Ended& ended, const std::optional<Notice>& death);

/// The last message, for stderr; empty when no worker was lost and the job is complete. Ends in a
/// newline. Pure.
std::string final_message(const ElasticRecord& record);

}  // namespace hvd::launcher
