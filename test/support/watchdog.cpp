#include "support/watchdog.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace hvd::testing {
namespace {

struct Registry {
  std::mutex mutex;
  int next_note = 0;
  std::map<int, std::function<std::string()>> notes;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

std::string current_test() {
  const ::testing::TestInfo* const info = ::testing::UnitTest::GetInstance()->current_test_info();
  return info == nullptr ? "none" : std::string(info->test_suite_name()) + "." + info->name();
}

[[noreturn]] void report_and_abort(Duration limit) {
  // A note that hangs must not hang the watchdog: SIGALRM's default action ends the process.
  alarm(5);
  const std::lock_guard lock(registry().mutex);
  const double seconds = std::chrono::duration<double>(limit).count();
  std::fprintf(stderr, "\nwatchdog: pid %d has run for %.1f s; current test: %s\n",
               static_cast<int>(getpid()), seconds, current_test().c_str());
  for (const auto& [id, describe] : registry().notes) {
    std::fprintf(stderr, "watchdog:   %s\n", describe().c_str());
  }
  if (registry().notes.empty()) {
    std::fprintf(stderr, "watchdog:   no rank left a note about what it was doing\n");
  }
  std::fflush(stderr);
  std::abort();
}

}  // namespace

Watchdog::Watchdog(Duration limit)
    : thread_([this, limit](const std::stop_token& stop) { watch(stop, limit); }) {}

Watchdog::~Watchdog() = default;  // the jthread asks its thread to stop and joins it

void Watchdog::watch(const std::stop_token& stop, Duration limit) {
  pthread_setname_np(pthread_self(), "watchdog");
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, stop, limit, [] { return false; });
  if (!stop.stop_requested()) {
    report_and_abort(limit);
  }
}

Duration Watchdog::limit_from_environment() {
  const char* const text = std::getenv("HVD_TEST_WATCHDOG_SECONDS");
  if (text == nullptr) {
    return Duration::zero();
  }
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (end == text || !(seconds > 0) || seconds > 1e6) {
    return Duration::zero();
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(0.9 * seconds));
}

WatchdogNote::WatchdogNote(std::function<std::string()> describe) {
  const std::lock_guard lock(registry().mutex);
  id_ = registry().next_note++;
  registry().notes.emplace(id_, std::move(describe));
}

WatchdogNote::~WatchdogNote() {
  const std::lock_guard lock(registry().mutex);
  registry().notes.erase(id_);
}

int run_all_tests(int* argc, char** argv) {
  ::testing::InitGoogleTest(argc, argv);
  const Duration limit = Watchdog::limit_from_environment();
  if (limit <= Duration::zero()) {
    return RUN_ALL_TESTS();
  }
  const Watchdog watchdog(limit);
  return RUN_ALL_TESTS();
}

}  // namespace hvd::testing

// ThreadSanitizer of Clang 14 does not support pthread_mutex_clocklock(), and reports that the
// unlock that follows is of a mutex that is not locked.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "mutex:hvd::host::LifeWatch\n"; }
