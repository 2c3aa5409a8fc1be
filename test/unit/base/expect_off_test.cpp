#include <gtest/gtest.h>

#include "base/expect.h"

#if HVD_CONTRACTS
#error "this file is compiled as a release build is"
#endif

namespace {

// The macro removes the condition. Otherwise this would not be a constant expression, because a
// broken contract calls a function that is not constexpr.
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
