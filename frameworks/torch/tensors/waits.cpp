#include "tensors/waits.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "hvd/background.h"

namespace hvd {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kSlice(100);
constexpr std::chrono::microseconds kPoll(50);  // interval between two polls of an event
std::atomic<void (*)()> wait_check = nullptr;

void run_check() {
  const auto check = wait_check.load();
  if (check != nullptr && !BackgroundThread::here()) check();
}

}  // namespace

namespace libtorch {

bool wait_in_slices(const Handle& handle, steady_clock::time_point deadline) {
  for (;;) {
    const auto left = deadline - steady_clock::now();
    if (handle.wait_for(std::clamp<steady_clock::duration>(left, milliseconds(0), kSlice)))
      return true;
    if (left <= milliseconds(0)) return false;
    run_check();
  }
}

bool wait_in_slices(const EventPtr& event, steady_clock::time_point deadline) {
  auto next_check = steady_clock::now() + kSlice;
  while (event != nullptr && !event->query()) {
    const auto now = steady_clock::now();
    if (now >= deadline) return false;
    if (now >= next_check) {
      run_check();
      next_check = now + kSlice;
    }
    std::this_thread::sleep_for(std::min<steady_clock::duration>(deadline - now, kPoll));
  }
  return true;
}

}  // namespace libtorch

void set_wait_check(void (*check)()) noexcept { wait_check = check; }

void wait_with_check(const Operation& operation) {
  const auto check = wait_check.load();
  check == nullptr || BackgroundThread::here() ? operation.wait() : operation.wait(kSlice, check);
}

}  // namespace hvd
