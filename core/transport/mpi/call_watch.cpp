#include "transport/mpi/call_watch.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "hvd/error.h"

namespace hvd::mpi {
namespace {

// Eight samples per limit: rare enough to have no measurable cost, and frequent enough that a hang
// is noticed soon after its limit.
constexpr int kSamplesPerLimit = 8;
constexpr Duration kShortestInterval = std::chrono::milliseconds(5);
constexpr Duration kLongestInterval = std::chrono::seconds(2);

Duration interval_for(Duration limit) {
  return std::clamp(limit / kSamplesPerLimit, kShortestInterval, kLongestInterval);
}

}  // namespace

std::string error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS || length <= 0) {
    return hvd::text("MPI error code ", code);
  }
  return std::string(text.data(), static_cast<std::size_t>(length));
}

void check(int code, std::string_view call, int peer) {
  if (code == MPI_SUCCESS) return;
  throw Error(text(call, peer != kNoPeer ? text(" with rank ", peer) : "",
                   " failed: ", error_text(code),
                   "; the job cannot continue; look for the first error in the ranks' logs"));
}

void CallTimer::sample(TimePoint now, std::uint64_t moves) noexcept {
  const Duration passed = std::min(now - std::exchange(last_sample_, now), 2 * interval_);
  total_ += passed;
  const bool same = moves == std::exchange(moves_, moves);
  in_call_ = same && moves % 2 == 1 ? in_call_ + passed : Duration::zero();
}

CallWatch::CallWatch(Duration limit, OnHang on_hang)
    : next_(WatchSettings{limit, true, std::move(on_hang), {}}) {
  try {
    thread_ = start_thread("hvd-watch", [this](const std::stop_token& stop) { run(stop); });
  } catch (const std::system_error& error) {
    HVD_LOG(kWarning) << "cannot start the thread that watches the calls of MPI: " << error.what()
                      << "; a call that never returns will not be detected";
  }
}

CallWatch::~CallWatch() = default;

void CallWatch::watch_calls(Duration limit, OnHang on_hang, LossIsKnown loss_is_known) {
  {
    const MutexLock lock(mutex_);
    next_ = WatchSettings{limit, false, std::move(on_hang), std::move(loss_is_known)};
  }
  changed_.notify_all();
}

void CallWatch::run(const std::stop_token& stop) {
  const std::stop_callback wake(stop, [this] {
    { const MutexLock lock(mutex_); }  // the watch already waits, or will detect the stop request
    changed_.notify_all();
  });
  std::optional<WatchSettings> settings;
  if (const auto hang = watch(stop, settings)) settings->on_hang(*hang);
}

/// Samples until a call hangs or a stop is requested. @param settings replaced by a newer one
std::optional<CallWatch::Hang> CallWatch::watch(const std::stop_token& stop,
                                                std::optional<WatchSettings>& settings) {
  const SteadyClock clock;
  std::optional<CallTimer> timer;
  const MutexLock lock(mutex_);
  while (!stop.stop_requested()) {
    if (next_) {
      settings = std::exchange(next_, std::nullopt);
      timer.emplace(interval_for(settings->limit), clock.now(),
                    call_state.moves.load(std::memory_order_acquire));
    }
    const TimePoint next_sample = clock.now() + timer->interval();
    while (!next_ && !stop.stop_requested() && clock.now() < next_sample)
      changed_.wait_until(mutex_, next_sample);
    if (next_ || stop.stop_requested()) continue;
    timer->sample(clock.now(), call_state.moves.load(std::memory_order_acquire));
    const Duration lasted = settings->starting ? timer->total() : timer->in_call();
    if (timer->in_call() == Duration::zero()) continue;
    if (lasted < settings->limit && !(settings->loss_is_known && settings->loss_is_known()))
      continue;
    const char* const call = call_state.call.load(std::memory_order_relaxed);
    return Hang{call != nullptr ? call : "MPI", call_state.peer.load(std::memory_order_relaxed),
                lasted};
  }
  return std::nullopt;
}

}  // namespace hvd::mpi
