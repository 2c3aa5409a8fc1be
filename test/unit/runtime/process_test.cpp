// What hvd does to the process it is in: each test in a process of its own, alone in its job.
#include <gtest/gtest.h>
#include <hvd/hvd.h>
#include <hvd/memory.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace hvd::testing {
namespace {

/// What `body` returns in a child of this process.
template <class Body>
int in_child(const Body& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The handlers of fork() are for the job, not only for memory that is shared.
TEST(Process, AChildIsInNoJobAlsoWhereThereIsNoSharedMemory) {
  EXPECT_EQ(in_child([] {
              rlimit before{};
              ::getrlimit(RLIMIT_NOFILE, &before);
              rlimit none = before;
              none.rlim_cur = 3;
              ::setrlimit(RLIMIT_NOFILE, &none);
              if (has_shared_memory()) return 1;
              ::setrlimit(RLIMIT_NOFILE, &before);
              init();
              if (in_child([] { return is_initialized() ? 1 : 0; }) != 0) return 2;
              if (!is_initialized()) return 3;
              barrier();
              shutdown();
              return 0;
            }),
            0);
}

TEST(Process, AChildIsInNoJob) {
  EXPECT_EQ(in_child([] {
              init();
              if (!has_shared_memory()) return 1;
              if (in_child([] { return is_initialized() ? 1 : 0; }) != 0) return 2;
              shutdown();
              return 0;
            }),
            0);
}

}  // namespace
}  // namespace hvd::testing
