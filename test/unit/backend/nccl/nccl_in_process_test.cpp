#include <gtest/gtest.h>

#include <string>

#include "backend/nccl/library.h"

// NCCL's function, so that this program looks like one with a static NCCL of its own. No other
// function is here, so hvd finds this NCCL to be incomplete.
extern "C" int ncclCommInitRankConfig() { return 0; }

namespace hvd {
namespace {

TEST(NcclInProcessTest, TheNcclOfTheProcessIsUsedBeforeThatOfTheSystem) {
  std::string reason;
  EXPECT_EQ(nccl::load_library(reason), nullptr);
  EXPECT_NE(reason.find("already in the process"), std::string::npos) << reason;
  EXPECT_NE(reason.find("without ncclGetVersion"), std::string::npos) << reason;
}

}  // namespace
}  // namespace hvd
