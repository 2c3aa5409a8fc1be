#include "tensors/waits.h"

#include <algorithm>
#include <atomic>

#include "hvd/background.h"

namespace hvd {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kSlice(100);
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

}  // namespace libtorch

void set_wait_check(void (*check)()) noexcept { wait_check = check; }

void wait_with_check(const Operation& operation) {
  const auto check = wait_check.load();
  check == nullptr || BackgroundThread::here() ? operation.wait() : operation.wait(kSlice, check);
}

}  // namespace hvd
