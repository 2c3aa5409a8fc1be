#include "support/watchdog.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <optional>

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Variable {
 public:
  explicit Variable(const char* value) {
    if (const char* const old = std::getenv(kName)) {
      old_ = old;
    }
    value == nullptr ? unsetenv(kName) : setenv(kName, value, 1);
  }
  ~Variable() { old_ ? setenv(kName, old_->c_str(), 1) : unsetenv(kName); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  static constexpr const char* kName = "HVD_TEST_WATCHDOG_SECONDS";
  std::optional<std::string> old_;
};

TEST(Watchdog, LimitIsNineTenthsOfTheVariable) {
  const Variable variable("20");
  EXPECT_EQ(Watchdog::limit_from_environment(), seconds(18));
}

TEST(Watchdog, NoLimitWithoutAUsableVariable) {
  for (const char* const value :
       {static_cast<const char*>(nullptr), "", "soon", "0", "-3", "nan"}) {
    const Variable variable(value);
    EXPECT_EQ(Watchdog::limit_from_environment(), Duration::zero()) << (value ? value : "(unset)");
  }
}

TEST(Watchdog, DestroyedInTimeDoesNothing) {
  const Watchdog watchdog{Duration(seconds(600))};
  SUCCEED();
}

TEST(WatchdogDeathTest, ReportsTheTestAndEveryNoteThenAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto hang = [] {
    const WatchdogNote gone([] { return std::string("rank 9: was here"); });
    {
      const WatchdogNote ended([] { return std::string("ended note"); });
    }
    const WatchdogNote note([] { return std::string("rank 1: waits for allreduce 'w1'"); });
    const Watchdog watchdog{Duration(milliseconds(20))};
    std::this_thread::sleep_for(seconds(30));
  };
  EXPECT_EXIT(hang(), ::testing::KilledBySignal(SIGABRT),
              "current test: WatchdogDeathTest.ReportsTheTestAndEveryNoteThenAborts\n"
              "watchdog:   rank 9: was here\nwatchdog:   rank 1: waits for allreduce 'w1'");
}

}  // namespace
}  // namespace hvd::testing
