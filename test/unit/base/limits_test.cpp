#include "base/limits.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "hvd/error.h"

namespace hvd {
namespace {

using ::testing::HasSubstr;

int open_all() {
  int opened = 0;
  while (::open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0) ++opened;
  return opened;
}

void set_limit(rlim_t soft, rlim_t hard) {
  const rlimit limit = {soft, hard};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

/// Runs the call in a process of its own, which may lose its descriptors.
void in_a_child(void (*call)()) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        call();
        std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(LimitsTest, TheSoftLimitIsRaisedToTheHardOne) {
  in_a_child([] {
    set_limit(100, 300);
    raise_descriptor_limit();
    rlimit limit = {};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    EXPECT_EQ(limit.rlim_cur, 300U);
    EXPECT_EQ(limit.rlim_max, 300U);
  });
}

TEST(LimitsTest, AProcessWithoutDescriptorsGetsTheReserve) {
  in_a_child([] {
    set_limit(100, 100);
    reserve_descriptors();
    reserve_descriptors();  // has no effect
    EXPECT_GT(open_all(), 40);
    EXPECT_FALSE(ran_out_of_descriptors());
    release_descriptors();
    EXPECT_TRUE(ran_out_of_descriptors());
    release_descriptors();
    EXPECT_TRUE(ran_out_of_descriptors()) << "the second call releases nothing";
    EXPECT_EQ(open_all(), 16);
    reserve_descriptors();
    release_descriptors();
    EXPECT_TRUE(ran_out_of_descriptors()) << "no descriptor was left to reserve";
  });
}

TEST(LimitsTest, AProcessWithDescriptorsHasNotRunOut) {
  in_a_child([] {
    set_limit(100, 100);
    reserve_descriptors();
    release_descriptors();
    EXPECT_FALSE(ran_out_of_descriptors());
    EXPECT_NO_THROW(require_descriptors(64));
    EXPECT_GT(open_all(), 64) << "both calls have closed theirs";
  });
}

TEST(LimitsTest, NamesTheLimitWhenTooFewDescriptorsAreLeft) {
  in_a_child([] {
    set_limit(50, 60);
    try {
      require_descriptors(64);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("needs 64 file descriptors to start, and "));
      EXPECT_THAT(error.what(), HasSubstr("its limit is 50 (ulimit -n), the hard limit is 60"));
    }
  });
}

TEST(LimitsTest, KnowsWhichErrorsAreShortages) {
  for (const int error : {EMFILE, ENFILE, ENOMEM, ENOBUFS}) {
    EXPECT_TRUE(is_shortage(error));
    EXPECT_FALSE(describe_shortage(error).empty());
  }
  for (const int error : {0, EPIPE, ECONNRESET, ECONNREFUSED}) EXPECT_FALSE(is_shortage(error));
  EXPECT_THAT(describe_shortage(ENOMEM), HasSubstr("ulimit -l"));
  EXPECT_EQ(shortage_in("accept: Too many open files"), EMFILE);
  EXPECT_EQ(shortage_in("mmap: Cannot allocate memory"), ENOMEM);
  EXPECT_EQ(shortage_in("connect: Connection refused"), 0);
}

}  // namespace
}  // namespace hvd
