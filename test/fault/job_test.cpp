// The public, torch-free interface in a real MPI job; run at several numbers of ranks.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <numeric>
#include <thread>

namespace hvd::testing {
namespace {

Submission allreduce(std::vector<float>& memory, const std::string& name) {
  Submission submission;
  submission.name = name;
  submission.input = {reinterpret_cast<std::byte*>(memory.data()), static_cast<std::int64_t>(memory.size()), DataType::kFloat32, {},
                      {static_cast<std::int64_t>(memory.size())}};
  submission.output = submission.input;
  return submission;
}

float sum(float value, const std::string& name) {
  std::vector<float> data(100, value);
  const Operation operation = submit(allreduce(data, name), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
  return data.back();
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(Job, NothingWorksBeforeInitAndItSaysWhatToDo) {
  EXPECT_FALSE(is_initialized());
  EXPECT_THROW(rank(), NotInitializedError);
  EXPECT_THROW(barrier(), NotInitializedError);
}

TEST(Job, RunsAgainAfterShutdown) {
  for (int round = 0; round < 3; ++round) {
    init();
    EXPECT_THROW(init(), UsageError);
    const int n = size();
    EXPECT_EQ(sum(static_cast<float>(rank() + round), "x"), static_cast<float>(n * (n - 1) / 2 + n * round));
    EXPECT_EQ(local_size() * cross_size(), n);
    EXPECT_TRUE(is_homogeneous());
    barrier();
    shutdown();
    shutdown();
    EXPECT_FALSE(is_initialized());
  }
}

TEST(Job, Sigusr1PrintsWhatTheRankIsDoing) {
  init();
  std::vector<float> data(100, 1);
  const Operation operation = rank() == 0 ? submit(allreduce(data, "lonely")) : Operation();
  std::string text;
  if (rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::testing::internal::CaptureStderr();
    ::raise(SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    text = ::testing::internal::GetCapturedStderr();
  }
  barrier();
  const Operation other = rank() == 0 ? operation : submit(allreduce(data, "lonely"));
  other.wait();
  EXPECT_TRUE(other.status().ok());
  if (rank() == 0) {
    EXPECT_NE(text.find("hvd: rank 0 of " + std::to_string(size()) + " (host "), std::string::npos) << text;
    if (size() > 1) {
      EXPECT_NE(text.find("1 operations outstanding"), std::string::npos) << text;
      EXPECT_NE(text.find("allreduce 'lonely' float32[100]: 0."), std::string::npos) << text;
      EXPECT_NE(text.find("waits for other ranks"), std::string::npos) << text;
      EXPECT_NE(text.find("and waits for barrier 'barrier.unnamed.0'"), std::string::npos) << text;
    }
  }
  shutdown();
  // The default action is back.
  struct sigaction current {};
  ASSERT_EQ(::sigaction(SIGUSR1, nullptr, &current), 0);
  EXPECT_EQ(current.sa_handler, SIG_DFL);
}

TEST(Job, ManyOperationsInFlightFromSeveralThreadsInDifferentOrder) {
  init();
  constexpr int kThreads = 4;
  constexpr int kPerThread = 250;
  std::vector<std::vector<float>> data(kThreads * kPerThread, std::vector<float>(64));
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        std::vector<Operation> operations;
        for (int i = 0; i < kPerThread; ++i) {
          // Every rank starts at another place.
          const int index = thread * kPerThread + (i + 37 * rank()) % kPerThread;
          auto& tensor = data[static_cast<std::size_t>(index)];
          std::fill(tensor.begin(), tensor.end(), static_cast<float>(index + rank()));
          operations.push_back(submit(allreduce(tensor, "many" + std::to_string(index))));
        }
        for (const auto& operation : operations) {
          operation.wait();
          if (!operation.status().ok()) ++wrong;
        }
      });
    }
  }
  const int n = size();
  for (int index = 0; index < kThreads * kPerThread; ++index) {
    if (data[static_cast<std::size_t>(index)][63] != static_cast<float>(n * index + n * (n - 1) / 2)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_LT(metrics().backend_calls, static_cast<std::uint64_t>(kThreads * kPerThread)) << "nothing was fused";
  shutdown();
}

TEST(Job, IdleRanksUseNoCpu) {
  init();
  EXPECT_EQ(sum(1, "x"), static_cast<float>(size()));
  barrier();
  const double before = cpu_seconds();
  constexpr double kIdle = 5;
  std::this_thread::sleep_for(std::chrono::duration<double>(kIdle));
  const double share = (cpu_seconds() - before) / kIdle;
  if (rank() == 0) std::printf("an idle rank uses %.3f %% of a core\n", 100 * share);
  // Ranks of other hosts cannot ring this one, so it looks for messages a thousand times a second.
  const bool one_host = cross_size() == 1;
  EXPECT_LT(share, one_host ? 0.01 : 0.10);
  barrier();
  shutdown();
}

TEST(Job, AnUnknownBackendIsRefusedByName) {
  EXPECT_THROW(init({.backend = "carrier pigeon"}), UsageError);
  EXPECT_FALSE(is_initialized());
}

}  // namespace
}  // namespace hvd::testing
