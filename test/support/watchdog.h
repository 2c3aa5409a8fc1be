#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>

#include "base/clock.h"

namespace hvd::testing {

/// Ends a test program that hangs, a little before ctest would, and reports the state of every
/// rank.
///
/// Thread-safe. One per process, owned by run_all_tests(); tests reach it only through
/// WatchdogNote.
class Watchdog {
 public:
  /// Starts the clock. When `limit` passes before destruction, prints the report to stderr and
  /// aborts.
  explicit Watchdog(Duration limit);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// 90 % of HVD_TEST_WATCHDOG_SECONDS; zero when it is unset, empty or not a positive number.
  static Duration limit_from_environment();

 private:
  void watch(const std::stop_token& stop, Duration limit);

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::jthread thread_;  // last: uses everything above
};

/// While it exists, the watchdog's report contains the result of `describe()`: "rank 2: waits for
/// allreduce 'w1', 3 of 4 posted".
///
/// `describe` runs on the watchdog's thread while the ranks hang, so it must not wait for a lock
/// that a stuck rank may hold: read atomics, or try_lock.
class WatchdogNote {
 public:
  explicit WatchdogNote(std::function<std::string()> describe);
  ~WatchdogNote();
  WatchdogNote(const WatchdogNote&) = delete;
  WatchdogNote& operator=(const WatchdogNote&) = delete;

 private:
  int id_;
};

/// The body of main(): parses GoogleTest's flags, starts the watchdog if the environment sets a
/// limit, and runs the tests. A main() with other work around the tests (MPI_Init) calls it in
/// between and installs its own listeners first.
int run_all_tests(int* argc, char** argv);

}  // namespace hvd::testing
