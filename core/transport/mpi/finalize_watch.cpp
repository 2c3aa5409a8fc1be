#include "transport/mpi/finalize_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <system_error>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"

namespace hvd::mpi {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);

}  // namespace

FinalizeWatch::FinalizeWatch(const std::vector<ProcessIdentity>& neighbours, int exit_code,
                             std::chrono::milliseconds limit)
    : exit_code_(exit_code), limit_(limit) {
  if (neighbours.empty()) return;
  for (const ProcessIdentity& process : neighbours) neighbours_.emplace_back(process);
  std::fflush(nullptr);  // _exit() does not
  try {
    thread_ = start_thread("hvd-finalize", [this](const std::stop_token& stop) { run(stop); });
  } catch (const std::system_error& error) {
    HVD_LOG(kWarning) << "the end of the process cannot be watched: " << error.what();
  }
}

/// Sleeps. @return whether a stop has been requested
bool FinalizeWatch::stopped_within(const std::stop_token& stop, std::chrono::milliseconds time) {
  const SteadyClock clock;
  const TimePoint end = clock.now() + time;
  const MutexLock lock(mutex_);
  while (!stop.stop_requested() && clock.now() < end) changed_.wait_until(mutex_, end);
  return stop.stop_requested();
}

void FinalizeWatch::run(const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] {
    { const MutexLock lock(mutex_); }  // the thread already waits, or will detect the stop request
    changed_.notify_all();
  });
  const auto has_ended = [](ProcessWatch& process) { return process.ended(); };
  while (std::none_of(neighbours_.begin(), neighbours_.end(), has_ended))
    if (stopped_within(stop, kInterval)) return;
  if (stopped_within(stop, limit_)) return;
  log_message(LogLevel::kWarning,
              text("MPI_Finalize has not returned within ", Duration(limit_),
                   " after another rank of this host has ended, probably without calling it; this "
                   "process ends with code ",
                   exit_code_, "; let every rank end by return or exit()"));
  ::_exit(exit_code_);
}

}  // namespace hvd::mpi
