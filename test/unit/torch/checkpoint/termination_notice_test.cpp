#include "checkpoint/termination_notice.h"

#include <gtest/gtest.h>

#include <csignal>
#include <optional>

namespace hvd::libtorch::testing {
namespace {

int calls = 0;
void count_call(int) { ++calls; }

TEST(TerminationNotice, RemembersTheSignalAndCallsTheFormerHandler) {
  const auto original = std::signal(SIGTERM, count_call);
  {
    std::optional<TerminationNotice> first, second;
    first.emplace();
    second.emplace();
    EXPECT_FALSE(TerminationNotice::given());
    std::raise(SIGTERM);
    EXPECT_TRUE(TerminationNotice::given());
    EXPECT_EQ(calls, 1);
    first.reset();
    std::raise(SIGTERM);
    EXPECT_EQ(calls, 2);
    EXPECT_TRUE(TerminationNotice::given());
  }
  EXPECT_EQ(std::signal(SIGTERM, count_call), &count_call) << "the former handler was not restored";
  {
    const TerminationNotice another;
    EXPECT_FALSE(TerminationNotice::given()) << "an earlier signal counts";
  }
  std::signal(SIGTERM, original);
}

TEST(TerminationNotice, TheProcessGoesOnWithoutAHandlerOfItsOwn) {
  const auto original = std::signal(SIGTERM, SIG_DFL);
  {
    const TerminationNotice notice;
    std::raise(SIGTERM);
    EXPECT_TRUE(TerminationNotice::given());
  }
  EXPECT_EQ(std::signal(SIGTERM, original), SIG_DFL);
}

}  // namespace
}  // namespace hvd::libtorch::testing
