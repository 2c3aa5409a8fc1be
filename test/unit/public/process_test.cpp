// The effects of hvd on its process. Each test runs in a separate process, as a job of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hvd/background.h>
#include <hvd/hvd.h>
#include <hvd/memory.h>
#include <hvd/store.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <string>
#include <system_error>
#include <thread>

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

/// Returns the result of `body` in a child of this process.
template <class Body>
int in_child(const Body& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The handlers of fork() are installed for the job, not only for shared memory.
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

// A joined rank does not take part in the operations of a background thread.
TEST(Process, JoinWaitsForExchangesInTheBackground) {
  EXPECT_EQ(in_child([] {
              init();
              auto exchange = std::make_unique<BackgroundExchange>();
              std::atomic<bool> ended = false;
              int result = 0;
              {
                const std::jthread ends([&] {
                  std::this_thread::sleep_for(std::chrono::milliseconds(100));
                  ended = true;
                  exchange.reset();
                });
                join();
                if (!ended) result = 1;
              }
              join();
              shutdown();
              return result;
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

/// The error of init(), and its output before the error.
struct Start {
  std::string refusal = "accepted";
  std::string log;
};

Start start_with(const std::string& name, const std::string& value) {
  // The child reports through a file, because it has its own memory.
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

TEST(Process, InitLogsTheVariablesInForceAtInfo) {
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

TEST(Process, InitThrowsOnlyErrorsOfHvd) {
  EXPECT_EQ(in_child([] {
              for (const auto& [name, value] : std::initializer_list<std::array<const char*, 2>>{
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", "1"},
                       {"RANK", "1"},
                       {"WORLD_SIZE", "2"},
                       {"HVD_INIT_METHOD", "env://"}})
                ::setenv(name, value, 1);
              use_agent_store([](const std::string&, std::uint16_t,
                                 std::chrono::milliseconds) -> KeyValueStore {
                throw std::filesystem::filesystem_error(
                    "the agent", std::make_error_code(std::errc::no_such_file_or_directory));
              });
              try {
                init();
              } catch (const Error& error) {
                return std::string(error.what()).find("the agent") == std::string::npos ? 1 : 0;
              } catch (const std::exception&) {
                return 2;
              }
              return 3;
            }),
            0);
}

// Otherwise printed text would go into a connection or into shared memory.
TEST(Process, NothingOfHvdGetsTheNumberOfAStandardStreamThatIsClosed) {
  for (const bool memory_first : {false, true}) {
    EXPECT_EQ(in_child([&] {
                struct stat null {};
                if (::stat("/dev/null", &null) != 0) return 1;
                for (const int descriptor : {0, 1, 2}) ::close(descriptor);
                if (memory_first && !has_shared_memory()) return 2;
                init();
                barrier();
                for (const int descriptor : {0, 1, 2}) {
                  struct stat found {};
                  if (::fstat(descriptor, &found) != 0) return 10 + descriptor;
                  if (found.st_rdev != null.st_rdev) return 20 + descriptor;
                }
                shutdown();
                return 0;
              }),
              0)
        << memory_first;
  }
}

TEST(Process, AnOpenStandardStreamIsUnchanged) {
  EXPECT_EQ(in_child([] {
              struct stat before[3] = {};
              for (const int descriptor : {0, 1, 2})
                if (::fstat(descriptor, &before[descriptor]) != 0) return 1;
              init();
              for (const int descriptor : {0, 1, 2}) {
                struct stat after {};
                if (::fstat(descriptor, &after) != 0) return 2;
                if (after.st_ino != before[descriptor].st_ino) return 3;
              }
              shutdown();
              return 0;
            }),
            0);
}

}  // namespace
}  // namespace hvd::testing
