#include <cstdlib>
#include <string>

#include "checkpoint/job_generation.h"
#include "hvd/elastic.h"

namespace hvd::libtorch {

std::string elastic_job_name() {
  const char* const job = std::getenv("HVD_JOB_ID");  // NOLINT(concurrency-mt-unsafe)
  return job == nullptr ? "" : job;
}

JobGeneration present_generation() {
  const std::uint64_t generation = elastic::generation();
  if (generation == 0) return {};
  return {.job = elastic_job_name(), .generation = generation};
}

}  // namespace hvd::libtorch
