#include "observe/supervisor_notice.h"

#include <gtest/gtest.h>

#include <string>

#include "support/fake_supervisor.h"

namespace hvd::runtime {
namespace {

TEST(WithoutBacktrace, KeepsTheMessage) {
  EXPECT_EQ(observe::without_backtrace("no memory"), "no memory");
  EXPECT_EQ(observe::without_backtrace("two\nlines\n"), "two\nlines");
  EXPECT_EQ(observe::without_backtrace(
                "no memory\nException raised from f at ../a.cpp:3 (most recent call "
                "first):\nframe #0: g\n"),
            "no memory");
  EXPECT_EQ(observe::without_backtrace("no memory\nC++ CapturedTraceback:\n#4 f"), "no memory");
  EXPECT_EQ(observe::without_backtrace("no memory\nframe #0: f"), "no memory");
  EXPECT_EQ(observe::without_backtrace(std::string(100'000, 'x')).size(), 1500U);
}

// This is a single test, because a process opens its connection only once.
TEST(Notice, OncePerLife) {
  testing::FakeSupervisor supervisor;
  observe::notify_supervisor(observe::NoticeKind::kInitialised, 0, "");
  observe::notify_supervisor(observe::NoticeKind::kLoss, 4, "lost rank 1", 1);
  observe::notify_supervisor(observe::NoticeKind::kLoss, 4, "lost rank 2");
  observe::notify_supervisor(observe::NoticeKind::kThrow, 134, "it broke");
  observe::notify_supervisor(observe::NoticeKind::kInitialised, 0, "");
  observe::notify_supervisor(observe::NoticeKind::kLoss, 5, std::string(100'000, 'x'));
  EXPECT_EQ(supervisor.next(), "init 0 -1\n");
  EXPECT_EQ(supervisor.next(), "loss 4 1\nlost rank 1");
  EXPECT_EQ(supervisor.next(), "throw 134 -1\nit broke");
  EXPECT_EQ(supervisor.next(), "init 0 -1\n");
  EXPECT_EQ(supervisor.next(), "loss 5 -1\n" + std::string(1500, 'x'));
  EXPECT_EQ(supervisor.next(), "");
}

}  // namespace
}  // namespace hvd::runtime
