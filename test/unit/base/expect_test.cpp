#include "base/expect.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

namespace {

#if !HVD_CONTRACTS
#error "the tests are for builds with HVD_CONTRACTS; set it, or HVD_BUILD_TESTS=OFF"
#endif

TEST(ExpectTest, HasNoEffectWhenTheConditionHolds) {
  int evaluated = 0;
  HVD_EXPECT(++evaluated == 1, "it is the first");
  EXPECT_EQ(evaluated, 1);
}

TEST(ExpectDeathTest, EndsTheProgramWithTheConditionAndItsPlace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int found = 3;
  EXPECT_EXIT(HVD_EXPECT(found == 4, "there are four"), ::testing::KilledBySignal(SIGABRT),
              "expect_test.cpp:[0-9]+: expected that there are four, but not: found == 4");
}

// hvd's own handler notifies the other ranks and hvdrun.
TEST(ExpectDeathTest, TheTerminateHandlerFindsTheCause) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        std::set_terminate([] {
          try {
            std::rethrow_exception(std::current_exception());
          } catch (const std::exception& error) {
            std::fprintf(stderr, "handler: %s\n", error.what());
          }
          std::_Exit(7);
        });
        HVD_EXPECT(false, "it is true");
      },
      ::testing::ExitedWithCode(7), "handler: .*expected that it is true, but not: false");
}

}  // namespace
