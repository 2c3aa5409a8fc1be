#include "base/process_exit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hvd {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Death tests that run in a newly started process: if a process with several threads forks,
/// ThreadSanitizer allows no new threads in the child.
class ExitLimitTest : public ::testing::Test {
 protected:
  ExitLimitTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

void hang() {
  for (;;) ::pause();
}

TEST_F(ExitLimitTest, AHandlerThatDoesNotReturnEndsWithTheProcesssOwnCode) {
  EXPECT_EXIT(
      {
        std::atexit(hang);  // registered first, like CUDA's handlers
        limit_exit(milliseconds(50), "the GPU hangs");
        std::exit(7);
      },
      ::testing::ExitedWithCode(7), "hvd: the GPU hangs");
}

TEST_F(ExitLimitTest, CalledFromAnExitHandlerItLimitsTheRemainingHandlers) {
  EXPECT_EXIT(
      {
        std::atexit(hang);
        std::atexit([] { limit_exit(milliseconds(50), "the GPU hangs"); });
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "the GPU hangs");
}

TEST_F(ExitLimitTest, BufferedOutputIsNotLost) {
  EXPECT_EXIT(
      {
        ::dup2(STDERR_FILENO, STDOUT_FILENO);
        static char buffer[4096];
        std::setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
        std::atexit(hang);
        limit_exit(milliseconds(50), "the GPU hangs");
        std::printf("last words\n");
        std::exit(0);
      },
      ::testing::ExitedWithCode(0), "last words");
}

TEST_F(ExitLimitTest, AProcessThatEndsInTimeIsNotChanged) {
  EXPECT_EXIT(
      {
        limit_exit(std::chrono::minutes(10), "it must not wait for that");
        std::fprintf(stderr, "done\n");
        std::exit(5);
      },
      ::testing::ExitedWithCode(5), AllOf(HasSubstr("done\n"), Not(HasSubstr("must not wait"))));
}

TEST(KeptObjects, AreTakenOnceAndEndTransportsBeforeMemory) {
  std::vector<std::string> ended;
  const auto owner = [&ended](const char* name) {
    return std::shared_ptr<const void>(
        name, [&ended](const void* title) { ended.emplace_back(static_cast<const char*>(title)); });
  };
  keep_until_exit(owner("memory"));
  keep_until_exit(owner("transport"), Kept::kTransport);
  EXPECT_TRUE(ended.empty());
  KeptObjects first = take_kept();
  take_kept().release();
  EXPECT_TRUE(ended.empty()) << "objects were taken twice";
  KeptObjects moved = std::move(first);
  moved.release();
  EXPECT_THAT(ended, ::testing::ElementsAre("transport", "memory"));
}

}  // namespace
}  // namespace hvd
