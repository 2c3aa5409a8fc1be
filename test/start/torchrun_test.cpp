// Programs without LibTorch, started by the real torchrun, whose ranks find each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "start/torchrun.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The agent does not share its store, so rank 0 serves the port.
TEST(Torchrun, RankZeroServesWhereTheAgentDoesNot) {
  const auto end =
      run_torchrun({HVD_START_PROGRAM, "work"}, {{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"}});
  EXPECT_EQ(end.code, 0) << end.output;
  EXPECT_EQ(count(end.output, "OK 0 2 0 2 ucx tcp://"), 2) << end.output;
  EXPECT_EQ(count(end.output, "OK 1 2 1 2 ucx tcp://"), 2) << end.output;
}

TEST(Torchrun, TheAgentsStoreNeedsLibTorchAndTheErrorNamesAlternatives) {
  const auto end = run_torchrun({HVD_START_PROGRAM, "init"});
  EXPECT_NE(end.code, 0);
  EXPECT_THAT(end.output, AllOf(HasSubstr("UsageError"), HasSubstr("tcp://HOST:PORT"),
                                HasSubstr("hvd::torch")));
}

}  // namespace
}  // namespace hvd::testing
