// Tests the public interface that does not use LibTorch, in a real job. ctest runs it with several
// numbers of ranks.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "support/float_operation.h"
#include "support/mpi_variables.h"

namespace hvd::testing {
namespace {

float sum(float value, const std::string& name) {
  std::vector<float> data(100, value);
  const Operation operation = submit(float_operation(data, name), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
  return data.back();
}

int size_of_job() {
  return testing::first_variable({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HVD_SIZE"}).value_or(1);
}

/// The name of the backend that sends messages over this job's carrier.
const char* message_backend() {
  return testing::mpi_launcher_size() || size_of_job() == 1 ? "mpi" : "ucx";
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(Job, Sigusr1DoesNoHarmBeforeInit) {
  ::testing::internal::CaptureStderr();
  ::raise(SIGUSR1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "hvd: this rank is not initialised: before hvd::init()\n");
}

TEST(Job, CallsBeforeInitFailWithAdvice) {
  EXPECT_FALSE(is_initialized());
  EXPECT_THROW(rank(), NotInitializedError);
  EXPECT_THROW(barrier(), NotInitializedError);
}

TEST(Job, RunsAgainAfterShutdown) {
  for (int round = 0; round < 3; ++round) {
    init();
    EXPECT_THROW(init(), UsageError);
    const int n = size();
    EXPECT_EQ(sum(static_cast<float>(rank() + round), "x"),
              static_cast<float>(n * (n - 1) / 2 + n * round));
    EXPECT_EQ(local_size() * cross_size(), n);
    EXPECT_TRUE(is_homogeneous());
    barrier();
    shutdown();
    shutdown();
    EXPECT_FALSE(is_initialized());
  }
}

TEST(Job, Sigusr1PrintsTheStateOfTheRank) {
  init();
  std::vector<float> data(100, 1);
  const Operation operation = rank() == 0 ? submit(float_operation(data, "lonely")) : Operation();
  std::string text;
  if (rank() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::testing::internal::CaptureStderr();
    ::raise(SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    text = ::testing::internal::GetCapturedStderr();
  }
  barrier();
  const Operation other = rank() == 0 ? operation : submit(float_operation(data, "lonely"));
  other.wait();
  EXPECT_TRUE(other.status().ok());
  if (rank() == 0) {
    EXPECT_NE(text.find("hvd: rank 0 of " + std::to_string(size()) + " (host "), std::string::npos)
        << text;
    if (size() > 1) {
      EXPECT_NE(text.find("1 operations outstanding"), std::string::npos) << text;
      EXPECT_NE(text.find("allreduce 'lonely' float32[100]: 0."), std::string::npos) << text;
      EXPECT_NE(text.find("waits for other ranks"), std::string::npos) << text;
      EXPECT_NE(text.find("and waits for barrier 'barrier.unnamed.0'"), std::string::npos) << text;
    }
  }
  shutdown();
}

// A user may send the signal to all ranks at once. It must not kill a rank in any state.
TEST(Job, Sigusr1DoesNoHarmInShutdownAndAfterIt) {
  init();
  const bool last_to_leave = rank() == size() - 1;
  const std::string self = "hvd: rank " + std::to_string(rank()) + " of ";
  if (last_to_leave) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::atomic<bool> left = false;
  bool in_time = false;  // stays false if this machine is very busy
  std::thread asks([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (last_to_leave) return;
    ::kill(::getpid(), SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    in_time = !left;
  });
  ::testing::internal::CaptureStderr();
  shutdown();
  left = true;
  asks.join();
  const std::string meanwhile = ::testing::internal::GetCapturedStderr();
  if (in_time) {
    EXPECT_NE(meanwhile.find(self), std::string::npos)
        << "the rank did not print its state: " << meanwhile;
  }
  ::testing::internal::CaptureStderr();
  ::raise(SIGUSR1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "hvd: this rank is not initialised: after hvd::shutdown()\n");
}

// MPI is not finalized yet at that moment, and its connections belong to the parent.
TEST(Job, AChildMadeAfterShutdownLeavesMpiAlone) {
  init();
  shutdown();
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) std::exit(0);
  int status = -1;
  const auto begin = std::chrono::steady_clock::now();
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(5)) ::kill(child, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
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
          // Every rank starts at a different tensor.
          const int index = thread * kPerThread + (i + 37 * rank()) % kPerThread;
          auto& tensor = data[static_cast<std::size_t>(index)];
          std::fill(tensor.begin(), tensor.end(), static_cast<float>(index + rank()));
          operations.push_back(submit(float_operation(tensor, "many" + std::to_string(index))));
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
    if (data[static_cast<std::size_t>(index)][63] !=
        static_cast<float>(n * index + n * (n - 1) / 2))
      ++wrong;
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_LT(metrics().backend_calls, static_cast<std::uint64_t>(kThreads * kPerThread))
      << "no operations were fused";
  shutdown();
}

TEST(Job, SetsOfEverySizeWorkSideBySideAndCanBeRemoved) {
  init({.backend =
            size_of_job() > 1 ? std::optional<std::string>(message_backend()) : std::nullopt});
  std::vector<ProcessSet> sets;
  for (int first = 0; first < size(); ++first) {
    std::vector<int> members;
    for (int rank = size() - 1; rank >= first; --rank) members.push_back(rank);  // in any order
    sets.push_back(add_process_set(members));
    EXPECT_EQ(sets.back().id(), first + 1);
    EXPECT_EQ(sets.back().size(), size() - first);
    EXPECT_EQ(sets.back().rank(), rank() < first ? -1 : rank() - first);
    EXPECT_EQ(sets.back().included(), rank() >= first);
  }
  std::vector<std::vector<float>> data;
  std::vector<Operation> operations;
  for (int first = rank(); first >= 0; --first) {
    data.emplace_back(1000, static_cast<float>(rank() + 1));
    Submission submission = float_operation(data.back(), "same name");
    submission.process_set = sets[static_cast<std::size_t>(first)].id();
    operations.push_back(submit(std::move(submission)));
  }
  for (const Operation& operation : operations) {
    operation.wait();
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  }
  const auto triangle = [](int n) { return static_cast<float>(n * (n + 1) / 2); };
  for (int first = rank(), i = 0; first >= 0; --first, ++i) {
    EXPECT_EQ(data[static_cast<std::size_t>(i)].back(), triangle(size()) - triangle(first))
        << "first " << first;
  }
  for (const ProcessSet& set : sets) remove_process_set(set);
  EXPECT_THROW(remove_process_set(sets.front()), UsageError);
  EXPECT_THROW(barrier(sets.back()), UsageError);
  EXPECT_THROW(add_process_set({size()}), UsageError);
  EXPECT_EQ(add_process_set({0}).id(), size() + 1);
  shutdown();
}

/// The sum of `value` over the set.
float sum_in(const ProcessSet& set, float value) {
  std::vector<float> data(1000, value);
  Submission submission = float_operation(data, "sum in set");
  submission.process_set = set.id();
  const Operation operation = submit(std::move(submission), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
  return data.back();
}

// Pairs of neighbours in a ring overlap. Each rank makes both of its pairs at the same time.
TEST(Job, MembersAloneMakeOverlappingSetsAtTheSameTime) {
  init();
  const int next = (rank() + 1) % size();
  const int last = (rank() + size() - 1) % size();
  const auto use_pair = [](int first, int second) {
    for (int round = 0; round < 5; ++round) {
      std::vector<int> ranks = {first};
      if (second != first) ranks.push_back(second);
      const ProcessSet pair =
          add_process_set(ranks, {.by_members = true, .name = "pair " + std::to_string(first)});
      EXPECT_EQ(pair.size(), static_cast<int>(ranks.size()));
      EXPECT_TRUE(pair.included());
      const int both = second != first ? first + second + 2 : first + 1;
      EXPECT_EQ(sum_in(pair, static_cast<float>(rank() + 1)), static_cast<float>(both));
      remove_process_set(pair);
      EXPECT_THROW(barrier(pair), UsageError);
    }
  };
  {
    std::jthread to_next(use_pair, rank(), next);
    if (last != rank()) use_pair(last, rank());
  }
  barrier();
  shutdown();
}

TEST(Job, OtherRanksNeitherCallNorWaitForASetOfSome) {
  init();
  for (int round = 0; round < 20; ++round) {
    if (rank() == 0) {
      const ProcessSet own = add_process_set({0}, {.by_members = true});
      EXPECT_EQ(sum_in(own, 3), 3);
      remove_process_set(own);
    }
    EXPECT_EQ(sum(1, "sum"), static_cast<float>(size()));
  }
  if (rank() == 0) {
    EXPECT_THROW(add_process_set({0}, {.name = "x"}), UsageError);
    EXPECT_THROW(add_process_set({size()}, {.by_members = true}), UsageError);
    if (size() > 1) {
      EXPECT_THROW(add_process_set({1}, {.by_members = true}), UsageError);
    }
  }
  const ProcessSet all = add_process_set({0});  // all ranks have counted the others
  EXPECT_EQ(all.id(), 21);
  shutdown();
}

TEST(Job, MembersThatDisagreeGetAnErrorWithinASecond) {
  init();
  if (size() > 2) {
    std::vector<int> ranks = {0, 1};
    if (rank() == 1) ranks.push_back(2);
    const auto begin = std::chrono::steady_clock::now();
    std::string problem;
    if (rank() < 2) {
      try {
        add_process_set(ranks, {.by_members = true, .name = "x"});
      } catch (const MismatchError& error) {
        problem = error.what();
      }
      EXPECT_NE(problem.find("rank 0 makes [0,1] and not [0,1,2]"), problem.npos) << problem;
      EXPECT_NE(problem.find("rank 1 makes [0,1,2] and not [0,1]"), problem.npos) << problem;
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
      const ProcessSet pair = add_process_set({0, 1}, {.by_members = true, .name = "x"});
      EXPECT_EQ(sum_in(pair, 1), 2) << "the ranks may try again";
    }
  }
  barrier();
  shutdown();
}

TEST(Job, ASetOfOneRankRunsEveryOperation) {
  for (const char* backend : {"", message_backend()}) {
    Options options;
    if (*backend != '\0') options.backend = backend;
    init(options);
    std::vector<ProcessSet> sets;
    for (int member = 0; member < size(); ++member) sets.push_back(add_process_set({member}));
    const ProcessSet& own = sets[static_cast<std::size_t>(rank())];
    for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kReducescatter,
                              OpKind::kAllgather, OpKind::kAlltoall}) {
      std::vector<float> data(6, static_cast<float>(rank() + 1));
      std::vector<float> result(6);
      Submission submission = float_operation(data, "alone");
      submission.parameters =
          testing::AnyParameters{.kind = kind, .root = rank(), .splits = {6}}.of_kind();
      submission.process_set = own.id();
      submission.output.data = reinterpret_cast<std::byte*>(result.data());
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

// On several hosts the operations use different backends, and Adasum combines three kinds.
TEST(Job, AllRanksRunEveryOperation) {
  init();
  const auto ranks = static_cast<std::size_t>(size());
  const auto own = static_cast<float>(rank());
  const float all = static_cast<float>(size() * (size() - 1) / 2);
  const auto run = [](OpKind kind, ReduceOp op, std::vector<float> data, std::size_t received) {
    std::vector<float> result(received);
    Submission submission = float_operation(data, "every");
    const std::vector<std::int64_t> splits(static_cast<std::size_t>(size()),
                                           static_cast<std::int64_t>(data.size()) / size());
    submission.parameters =
        testing::AnyParameters{.kind = kind, .op = op, .root = size() - 1, .splits = splits}
            .of_kind();
    submission.output = {reinterpret_cast<std::byte*>(result.data()),
                         static_cast<std::int64_t>(received),
                         DataType::kFloat32,
                         {},
                         {static_cast<std::int64_t>(received)}};
    submission.allocate_output = [view = submission.output](const OutputSizes&) { return view; };
    const Operation operation = submit(std::move(submission));
    operation.wait();
    EXPECT_TRUE(operation.status().ok())
        << to_string(kind) << ' ' << to_string(op) << ": " << operation.status().message;
    return result;
  };
  std::vector<float> counted(2 * ranks);  // 0, 0, 1, 1, 2, 2, ...: two elements of each rank
  for (std::size_t i = 0; i < counted.size(); ++i) counted[i] = static_cast<float>(i / 2);
  std::vector<float> unit(ranks);
  unit[static_cast<std::size_t>(rank())] = 1;
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(run(OpKind::kAllreduce, ReduceOp::kSum, std::vector<float>(9, own), 9),
              std::vector<float>(9, all));
    EXPECT_EQ(run(OpKind::kAllreduce, ReduceOp::kAdasum, unit, ranks), std::vector<float>(ranks, 1))
        << "orthogonal vectors add up";
    EXPECT_EQ(run(OpKind::kBroadcast, ReduceOp::kSum, std::vector<float>(5, own), 5),
              std::vector<float>(5, static_cast<float>(size() - 1)));
    EXPECT_EQ(run(OpKind::kAllgather, ReduceOp::kSum, {own, own}, 2 * ranks), counted);
    EXPECT_EQ(run(OpKind::kAlltoall, ReduceOp::kSum, std::vector<float>(2 * ranks, own), 2 * ranks),
              counted);
    EXPECT_EQ(run(OpKind::kReducescatter, ReduceOp::kSum, std::vector<float>(3 * ranks, own), 3),
              std::vector<float>(3, all));
  }
  shutdown();
}

TEST(Job, RanksRunOutOfDataOneByOne) {
  init();
  for (int epoch = 0; epoch < 2; ++epoch) {
    const int steps = 3 + rank();  // the last rank has the most
    for (int step = 0; step < steps; ++step) {
      std::vector<float> data(100, static_cast<float>(rank()));
      Submission submission = float_operation(data, step % 2 == 0 ? "gradient" : "");
      submission.parameters = Allreduce{.op = ReduceOp::kAverage};
      const Operation operation = submit(std::move(submission), Progress::kCaller);
      operation.wait();
      ASSERT_TRUE(operation.status().ok()) << operation.status().message;
      const int first = std::max(0, step - 2);  // the lowest rank that still has data
      EXPECT_EQ(data.back(), static_cast<float>(first + size() - 1) / 2) << "step " << step;
    }
    EXPECT_EQ(join(), size() - 1);
  }
  shutdown();
}

// The sums depend on the order of the additions. Each repetition submits in another order, with
// other delays.
TEST(Job, TheSameBitsInAnyOrderAndTiming) {
  constexpr int kTensors = 12;
  init();
  std::vector<std::vector<float>> first;
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 values(static_cast<unsigned>(rank() + 1));
    std::vector<std::vector<float>> data(kTensors);
    for (auto& tensor : data) {
      tensor.resize(10'007);
      for (float& value : tensor)
        value =
            std::ldexp(static_cast<float>(values() % 1000), static_cast<int>(values() % 40) - 20);
    }
    std::mt19937 order(1000 * seed + static_cast<unsigned>(rank()));
    std::vector<int> indices(kTensors);
    std::iota(indices.begin(), indices.end(), 0);
    std::shuffle(indices.begin(), indices.end(), order);
    std::vector<Operation> operations;
    for (const int i : indices) {
      if (order() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(order() % 500));
      operations.push_back(
          submit(float_operation(data[static_cast<std::size_t>(i)], "tensor" + std::to_string(i))));
    }
    for (const Operation& operation : operations) operation.wait();
    if (seed == 0) first = data;
    for (int i = 0; i < kTensors; ++i) {
      const auto index = static_cast<std::size_t>(i);
      ASSERT_EQ(
          std::memcmp(data[index].data(), first[index].data(), data[index].size() * sizeof(float)),
          0)
          << "seed " << seed << " tensor " << i;
    }
  }
  // If every rank's bits equal the minimum over all ranks, all ranks have the same bits.
  for (auto& tensor : first) {
    std::vector<std::int32_t> bits(tensor.size());
    std::memcpy(bits.data(), tensor.data(), tensor.size() * sizeof(float));
    std::vector<std::int32_t> lowest = bits;
    Submission submission;
    submission.name = "bits";
    submission.parameters = Allreduce{.op = ReduceOp::kMin};
    const auto count = static_cast<std::int64_t>(lowest.size());
    submission.input = {
        reinterpret_cast<std::byte*>(lowest.data()), count, DataType::kInt32, {}, {count}};
    submission.output = submission.input;
    const Operation operation = submit(std::move(submission), Progress::kCaller);
    operation.wait();
    EXPECT_EQ(lowest, bits);
  }
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
  // Ranks of other hosts cannot ring this rank's doorbell, so it polls for messages a thousand
  // times a second.
  const bool one_host = cross_size() == 1;
  EXPECT_LT(share, one_host ? 0.01 : 0.10);
  barrier();
  shutdown();
}

// The other ranks do not wait for the rank that cannot begin, and the processes can join another
// job.
TEST(Job, ARankThatCannotBeginIsTheSameErrorOnAllRanks) {
  init();
  const int own = rank();
  const int last = size() - 1;
  shutdown();
  if (own == last) ::setenv("HVD_DEVICE", "1000", 1);
  try {
    init();
    ADD_FAILURE() << "rank " << own << " began";
    shutdown();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("HVD_DEVICE"), std::string::npos) << text;
    const bool named = text.find("rank " + std::to_string(last) + " (") != std::string::npos;
    EXPECT_EQ(named, own != last) << text;
  }
  ::unsetenv("HVD_DEVICE");
  init();
  EXPECT_EQ(sum(1, "x"), static_cast<float>(size()));
  shutdown();
}

TEST(Job, AnUnknownBackendIsRefusedByName) {
  EXPECT_THROW(init({.backend = "carrier pigeon"}), UsageError);
  EXPECT_FALSE(is_initialized());
}

}  // namespace
}  // namespace hvd::testing
