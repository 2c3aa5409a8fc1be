#include "engine/progress_policy.h"
#include "base/text.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

namespace hvd::runtime {
namespace {

/// The number of cores that this rank can rely on. A rank does not see the CPU affinity of the
/// others. If the machine has enough cores to give each rank of the host as many as this one, this
/// rank's cores are assumed to be its own; otherwise all ranks are assumed to share them.
int cores_per_rank(int ranks, std::optional<double> quota) {
  const int online = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const int usable =
      sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : online;
  const int unlimited = usable * ranks <= online ? usable : usable / ranks;
  return quota ? std::min(unlimited, static_cast<int>(*quota / ranks)) : unlimited;
}

Duration longest_interval(PollFor purpose) {
  switch (purpose) {
    case PollFor::kReplayedLaunch:
      return std::chrono::microseconds(50);
    case PollFor::kTransfer:
      return std::chrono::microseconds(100);
    case PollFor::kMessages:
      return std::chrono::milliseconds(1);
  }
  return kShortestSleep;
}

}  // namespace

Duration poll_interval(PollFor purpose, int polls) {
  const int doublings = std::min(polls / 4, 10);
  return std::min(kShortestSleep * (1 << doublings), longest_interval(purpose));
}

ProgressPolicy choose_progress_policy(ProgressMode mode, int ranks, std::optional<double> quota) {
  const int cores = cores_per_rank(ranks, quota);
  return {mode == ProgressMode::kInline || (mode == ProgressMode::kAuto && cores < 2), cores >= 1};
}

std::string describe(const ProgressPolicy& progress_policy, int ranks,
                     std::optional<double> quota) {
  const int cores = cores_per_rank(ranks, quota);
  return text(progress_policy.inline_progress ? "inline" : "background", " progress, ",
              cores == 0 ? "less than one core" : text(cores, cores == 1 ? " core" : " cores"),
              " per rank");
}

}  // namespace hvd::runtime
