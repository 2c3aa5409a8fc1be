// The public, torch-free interface in a real MPI job; run at several numbers of ranks.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
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

TEST(Job, ASetOfOneRankRunsEveryOperation) {
  for (const char* backend : {"", "mpi"}) {
    Options options;
    if (*backend != '\0') options.backend = backend;
    init(options);
    std::vector<ProcessSet> sets;
    for (int member = 0; member < size(); ++member) sets.push_back(add_process_set({member}));
    const ProcessSet& own = sets[static_cast<std::size_t>(rank())];
    for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kReducescatter, OpKind::kAllgather, OpKind::kAlltoall}) {
      std::vector<float> data(6, static_cast<float>(rank() + 1));
      std::vector<float> result(6);
      Submission submission = allreduce(data, "alone");
      submission.kind = kind;
      submission.process_set = own.id();
      submission.root = rank();
      submission.output.data = reinterpret_cast<std::byte*>(result.data());
      if (kind == OpKind::kAlltoall) submission.splits = {6};
      submission.allocate_output = [view = submission.output](const OutputSizes&) { return view; };
      const Operation operation = submit(std::move(submission));
      operation.wait();
      EXPECT_TRUE(operation.status().ok()) << to_string(kind) << ": " << operation.status().message;
      EXPECT_EQ(result, data) << to_string(kind);
    }
    barrier(own);
    barrier();
    shutdown();
  }
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
