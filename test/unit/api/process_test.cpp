// What hvd does to the process it is in: each test in a process of its own, alone in its job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hvd/hvd.h>
#include <hvd/memory.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

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

/// What init() says, and what it prints before that.
struct Start {
  std::string refusal = "accepted";
  std::string log;
};

Start start_with(const std::string& name, const std::string& value) {
  // Through a file, as the child has the memory of its own.
  const std::string path = ::testing::TempDir() + "hvd-process-test-" + std::to_string(::getpid());
  in_child([&] {
    ::setenv(name.c_str(), value.c_str(), 1);
    if (std::freopen(path.c_str(), "w", stderr) == nullptr) return 1;
    try {
      init();
      shutdown();
    } catch (const UsageError& error) {
      std::fprintf(stderr, "\nREFUSED %s", error.what());
    }
    std::fflush(stderr);
    return 0;
  });
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  std::filesystem::remove(path);
  const auto refused = text.find("\nREFUSED ");
  return {refused == std::string::npos ? "accepted" : text.substr(refused + 9),
          text.substr(0, refused)};
}

TEST(Process, InitRefusesAnyVariableThatItCannotUnderstand) {
  EXPECT_THAT(start_with("HVD_LOG_LEVEL", "foo").refusal,
              HasSubstr("HVD_LOG_LEVEL: expected 'trace', 'debug'"));
  EXPECT_THAT(start_with("HVD_SHM_ALLOCATOR", "banana").refusal,
              HasSubstr("HVD_SHM_ALLOCATOR: expected 1, yes, true or on"));
  EXPECT_EQ(start_with("HVD_SHM_ALLOCATOR", "Yes").refusal, "accepted");
}

TEST(Process, InitNamesAVariableThatIsMisspelt) {
  const Start start = start_with("HVD_FUSION_TRESHOLD", "1");
  EXPECT_EQ(start.refusal, "accepted");
  EXPECT_THAT(start.log, HasSubstr("did you mean HVD_FUSION_THRESHOLD?"));
}

TEST(Process, InitSaysAtInfoWhatIsInForce) {
  EXPECT_THAT(start_with("HVD_LOG_LEVEL", "INFO").log, HasSubstr("settings: HVD_LOG_LEVEL=INFO"));
  EXPECT_THAT(start_with("HVD_CACHE_CAPACITY", "5").log, ::testing::IsEmpty());
}

TEST(Process, ADeviceThatIsNotThereIsRefused) {
  EXPECT_THAT(
      start_with("HVD_DEVICE", "1000").refusal,
      ::testing::AnyOf(
          HasSubstr("HVD_DEVICE=1000: expected a GPU, but this process sees none; unset it"),
          HasSubstr("the number that this process sees")));
}

}  // namespace
}  // namespace hvd::testing
