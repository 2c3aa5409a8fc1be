#include <gtest/gtest.h>

#include "base/expect.h"

#if HVD_CONTRACTS
#error "this file is compiled as a release build is"
#endif

namespace {

// A constant expression calls no function that is not constexpr, so the condition is removed.
constexpr int evaluations() {
  int evaluated = 0;
  HVD_EXPECT(++evaluated < 0, "never");
  return evaluated;
}
static_assert(evaluations() == 0);

TEST(ExpectOff, DoesNotEvaluateTheCondition) {
  int evaluated = 0;
  HVD_EXPECT(++evaluated < 0, "never");
  EXPECT_EQ(evaluated, 0);
}

}  // namespace
