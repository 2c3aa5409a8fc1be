// The steady state of real jobs: steps run without negotiation, and steps that deviate give the
// right results.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <hvd/memory.h>
#include <hvd/process_set.h>
#include <sys/syscall.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fault/mpi_call_count.h"
#include "support/count_allocations.h"
#include "support/count_system_calls.h"
#include "support/count_ucx_calls.h"
#include "support/float_operation.h"
#include "support/seeds.h"

namespace hvd::testing {
namespace {

/// Longer than the time after which a waiting rank asks the others to leave the replay.
constexpr std::chrono::milliseconds kLonger{1300};

/// A tensor whose values differ by rank, and the sum over all ranks; exact.
struct Tensor {
  std::string name;
  std::vector<float> memory;
  Compression compression = Compression::kNone;  // represents the values exactly, too
  Operation operation = {};

  Tensor(std::string called, std::size_t elements, Compression how = Compression::kNone)
      : name(std::move(called)), memory(elements), compression(how) {}

  void fill(int step) {
    for (std::size_t i = 0; i < memory.size(); ++i)
      memory[i] = static_cast<float>((rank() + 1) * (static_cast<int>(i % 7) + step % 5));
  }
  Submission submission() {
    Submission submission = float_operation(memory, name);
    submission.parameters = Allreduce{.compression = compression};
    return submission;
  }
  void submit(int step, Progress progress = Progress::kCaller) {
    fill(step);
    operation = hvd::submit(submission(), progress);
  }
  void check(int step) {
    operation.wait();
    ASSERT_TRUE(operation.status().ok()) << operation.status().message;
    check_memory(step);
  }
  void check_memory(int step) const {
    const int ranks = size() * (size() + 1) / 2;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < memory.size(); ++i)
      wrong +=
          memory[i] != static_cast<float>(ranks * (static_cast<int>(i % 7) + step % 5)) ? 1 : 0;
    ASSERT_EQ(wrong, 0U) << name << " step " << step;
  }
};

class Steady : public ::testing::Test {
 protected:
  void SetUp() override {
    init();
    one_host_ = local_size() == size();
  }
  void TearDown() override { shutdown(); }

  void steps(int first, int last) {
    for (int step = first; step < last; ++step) {
      for (Tensor& tensor : tensors_) tensor.submit(step);
      for (Tensor& tensor : tensors_) tensor.check(step);
    }
  }
  /// The first rank, which sends for its host, and the last; all ranks in a long run.
  static std::vector<int> some_ranks() {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == 0 || rank == size() - 1 || long_run()) ranks.push_back(rank);
    }
    return ranks;
  }
  static std::uint64_t replayed() { return metrics().locked_operations; }

  bool one_host_ = false;
  std::vector<Tensor> tensors_{{"a", 10}, {"b", 3000}, {"c", 40001}};
};

TEST_F(Steady, RepeatedStepsAreNotNegotiated) {
  steps(0, 30);
  // Messages that were in flight when the replay began still arrive.
  std::this_thread::sleep_for(kLonger);
  steps(30, 130);
  const Metrics before = metrics();
  EXPECT_GT(before.locked_operations, 0U);
  const std::uint64_t called = mpi_calls();
  EXPECT_EQ(called > 0, controller() == "mpi") << "the first steps were negotiated";
  EXPECT_EQ(ucx_calls().all > 0, controller() == "ucx");
  steps(130, 180);
  const Metrics after = metrics();
  const std::uint64_t calls = mpi_calls() - called;
  std::this_thread::sleep_for(kLonger);  // otherwise a rank that has not read its counters yet
                                         // could receive the first leave message
  EXPECT_EQ(after.locked_operations - before.locked_operations, 150U);
  EXPECT_EQ(after.plans_applied, before.plans_applied);
  const std::uint64_t sent = after.control_messages_sent - before.control_messages_sent;
  if (one_host_) {
    EXPECT_EQ(calls, 0U);
    EXPECT_EQ(sent, 0U);
    EXPECT_EQ(after.control_messages_received, before.control_messages_received);
  } else {
    constexpr std::uint64_t kPositions = 50 * 3, kMaxRounds = 2;  // hosts: up to four
    constexpr std::uint64_t kSignsOfLife =
        20;  // sent when ranks of other hosts have waited for long
    EXPECT_LE(sent, (local_rank() == 0 ? kPositions * kMaxRounds : 0) + kSignsOfLife)
        << "the first rank of a host speaks for it";
  }
}

TEST_F(Steady, AnOperationInBetweenIsNegotiatedAndReplayResumes) {
  Tensor extra("extra", 50);
  for (int round = 0; round < 5; ++round) {
    steps(0, 12);
    extra.submit(round);
    extra.check(round);
  }
  EXPECT_GT(replayed(), 4U * 8U * 3U);
}

TEST_F(Steady, AnUnnamedOperationInEachStepIsLockedToo) {
  Tensor unnamed("", 17);
  const auto steps_with_it = [&](int count) {
    for (int step = 0; step < count; ++step) {
      steps(step, step + 1);
      unnamed.submit(step);
      unnamed.check(step);
    }
  };
  steps_with_it(30);
  std::this_thread::sleep_for(kLonger);
  const std::uint64_t before = replayed();
  steps_with_it(20);
  EXPECT_EQ(replayed() - before, 20U * 4U);
}

// Each rank shares a set with the rank before it and one with the rank after it.
TEST_F(Steady, RepeatedStepsOfOverlappingSetsAreNotNegotiated) {
  struct Set {
    ProcessSet set;
    Tensor tensor;
    float sum = 0;
  };
  std::vector<Set> sets;
  for (int first = 0; first + 1 < size(); ++first) {
    if (rank() != first && rank() != first + 1) continue;
    sets.push_back({add_process_set({first, first + 1}, {.by_members = true}),
                    Tensor("of a set", 100), static_cast<float>(2 * first + 3)});
  }
  const auto steps_of_sets = [&](int count) {
    for (int step = 0; step < count; ++step) {
      for (Set& one : sets) {
        one.tensor.memory.assign(100, static_cast<float>(rank() + 1));
        Submission submission = one.tensor.submission();
        submission.process_set = one.set.id();
        one.tensor.operation = hvd::submit(std::move(submission), Progress::kCaller);
        one.tensor.operation.wait();
        ASSERT_TRUE(one.tensor.operation.status().ok()) << one.tensor.operation.status().message;
        ASSERT_EQ(one.tensor.memory.back(), one.sum);
      }
      steps(step, step + 1);
    }
  };
  steps_of_sets(30);
  std::this_thread::sleep_for(kLonger);
  steps_of_sets(100);
  const Metrics before = metrics();
  steps_of_sets(50);
  const Metrics after = metrics();
  std::this_thread::sleep_for(kLonger);  // as above
  if (!one_host_) return;
  EXPECT_EQ(after.locked_operations - before.locked_operations, 50U * (3U + sets.size()));
  EXPECT_EQ(after.plans_applied, before.plans_applied);
  EXPECT_EQ(after.control_messages_sent, before.control_messages_sent);
  EXPECT_EQ(after.control_messages_received, before.control_messages_received);
}

TEST_F(Steady, CompressedOperationsAreReplayedToo) {
  tensors_.emplace_back("half", 10, Compression::kFloat16);
  tensors_.emplace_back("brain", 40001, Compression::kBFloat16);
  steps(0, 30);
  std::this_thread::sleep_for(kLonger);
  const std::uint64_t before = replayed();
  steps(30, 50);
  EXPECT_EQ(replayed() - before, 20U * 5U);
  tensors_.back().compression = Compression::kFloat16;  // another operation of the same name
  steps(50, 90);
  EXPECT_GT(replayed() - before, 20U * 5U);
}

TEST_F(Steady, RanksMaySubmitInAnyOrder) {
  for (int step = 0; step < 30; ++step) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[(i + static_cast<std::size_t>(rank() * step)) % tensors_.size()].submit(
          step, Progress::kBackground);
    }
    for (Tensor& tensor : tensors_) tensor.check(step);
  }
  EXPECT_GT(replayed(), 50U);
}

TEST_F(Steady, AProgramThatBeginsToWaitInBetweenDoesNotHang) {
  steps(0, 10);
  for (int step = 10; step < 20; ++step) {
    for (Tensor& tensor : tensors_) {  // they shared a batch before
      tensor.submit(step);
      tensor.check(step);
    }
  }
  steps(20, 30);
}

TEST_F(Steady, ATensorThatOneRankSubmitsLateIsWaitedFor) {
  steps(0, 10);
  for (const int late : some_ranks()) {
    tensors_[0].submit(late);
    if (rank() == late) std::this_thread::sleep_for(kLonger);
    tensors_[1].submit(late);
    tensors_[2].submit(late);
    for (Tensor& tensor : tensors_) tensor.check(late);
    steps(0, 4);
  }
}

TEST_F(Steady, AStepThatEachRankLeavesOutOnceIsMadeUpForLater) {
  steps(0, 10);
  // Each rank in turn is idle for a while, so that the others are a step ahead.
  for (const int idle : some_ranks()) {
    if (rank() == idle) std::this_thread::sleep_for(kLonger);
    steps(10, 13);
  }
}

TEST_F(Steady, AChangedShapeIsNoticedByAll) {
  steps(0, 10);
  tensors_[1].memory.resize(40);
  steps(10, 20);
  tensors_[1].memory.resize(rank() == 0 ? 41 : 40);
  if (size() == 1) return;
  for (Tensor& tensor : tensors_) tensor.submit(20);
  tensors_[1].operation.wait();
  EXPECT_EQ(tensors_[1].operation.status().code, StatusCode::kMismatch);
  tensors_[0].check(20);
  tensors_[2].check(20);
  tensors_[1].memory.resize(40);
  steps(21, 25);
}

TEST_F(Steady, JoinAndBarrierRunBetweenReplays) {
  for (int epoch = 0; epoch < 3; ++epoch) {
    steps(0, 10);
    barrier();
    join();
  }
}

TEST_F(Steady, MemoryThatRanksShareIsReducedInPlace) {
  for (const std::int64_t elements : {1, 1000, 1025, 70001, 300'003}) {
    const auto memory = allocate_shared(static_cast<std::size_t>(elements) * sizeof(float));
    auto* const values = reinterpret_cast<float*>(memory.get());
    for (int step = 0; step < 6; ++step) {
      for (std::int64_t i = 0; i < elements; ++i)
        values[i] = static_cast<float>((rank() + 1) * (i % 13 + step));
      Submission submission;
      submission.name = "shared" + std::to_string(elements);
      submission.parameters = Allreduce{.op = ReduceOp::kAverage};
      submission.input = {memory.get(), elements, DataType::kFloat32, {}, {elements}};
      submission.output = submission.input;
      submission.alone = true;
      submission.keep_alive = memory;
      const Operation operation = submit(std::move(submission), Progress::kCaller);
      operation.wait();
      ASSERT_TRUE(operation.status().ok());
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < elements; ++i)
        wrong += values[i] != static_cast<float>((i % 13 + step) * (size() + 1)) / 2 ? 1 : 0;
      ASSERT_EQ(wrong, 0) << elements << " elements, step " << step;
    }
  }
}

/// The counts of this process so far.
struct Counted {
  std::uint64_t allocated = 0;
  SystemCalls system = {};
  Metrics runtime = {};
  UcxCalls ucx = {};
  std::uint64_t mpi = 0;
  std::chrono::steady_clock::time_point at = {};

  static Counted now() {
    return {.allocated = allocations(),  // before this function allocates memory
            .system = system_calls(),
            .runtime = metrics(),
            .ucx = ucx_calls(),
            .mpi = mpi_calls(),
            .at = std::chrono::steady_clock::now()};
  }
};

constexpr std::uint64_t kStepsOfWindow = 50;
constexpr int kWindows = 5;

/// Checks the work of the steps between two counts, on one host. The only work that is allowed is
/// waiting, and the signs of life that a waiting rank sends and checks 20 times a second.
void expect_nothing(const Counted& before, const Counted& after) {
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(after.at - before.at);
  const auto signs_of_life = static_cast<std::uint64_t>(1 + took.count() / 50);
  if (size() > 1) {  // a rank that is alone has another backend
    EXPECT_EQ(after.allocated - before.allocated, 0U);
  }
  EXPECT_EQ(after.mpi, before.mpi);
  const std::uint64_t polls = after.ucx.polls - before.ucx.polls;
  EXPECT_EQ(after.ucx.all - before.ucx.all, polls);
  EXPECT_LE(polls, 4 * signs_of_life) << "there are four workers";
  EXPECT_EQ(after.runtime.control_messages_sent, before.runtime.control_messages_sent);
  EXPECT_EQ(after.runtime.control_messages_received, before.runtime.control_messages_received);
  SystemCalls system = added(before.system, after.system);
  if (size() > 1) {
    system.erase(SYS_sched_yield);
    system.erase(SYS_futex);
    std::uint64_t of_signs = 0;  // calls for the pidfds of other ranks and for workers
    for (const int number : {SYS_poll, SYS_epoll_wait})
      of_signs += std::exchange(system[number], 0);
    EXPECT_LE(of_signs, signs_of_life * static_cast<std::uint64_t>(4 + size()));
    std::erase_if(system, [](const auto& calls) { return calls.second == 0; });
  }
  EXPECT_EQ(describe(system), "none");
}

/// The number of message rounds until all hosts have received data from all others.
std::uint64_t rounds_among_hosts() {
  std::set<std::string> hosts;
  const char* const names = std::getenv("HVD_TEST_HOSTS");
  std::istringstream list(names == nullptr ? "" : names);
  for (std::string host; std::getline(list, host, ',');) hosts.insert(host);
  std::uint64_t rounds = 0;
  while (std::size_t{1} << rounds < hosts.size()) ++rounds;
  return rounds;
}

// Must be the last test of the program: the calls of later tests would be counted too, which takes
// time.
TEST_F(Steady, RepeatedStepsMakeNoCalls) {
  const std::string uncounted = begin_to_count_system_calls();
  std::vector<Submission> submissions;
  for (Tensor& tensor : tensors_) submissions.push_back(tensor.submission());
  std::vector<Operation> handles(submissions.size());
  const auto repeat = [&](std::uint64_t count) {
    for (std::uint64_t step = 0; step < count; ++step) {
      submit_all(submissions, handles, Progress::kCaller);
      for (const Operation& handle : handles) handle.wait();
    }
  };
  repeat(30);
  std::this_thread::sleep_for(kLonger);  // as above
  repeat(30);
  std::vector<std::uint64_t> of_control, of_ucx, of_data;
  for (int window = 0; window < kWindows; ++window) {
    for (Tensor& tensor : tensors_) tensor.fill(window);
    Counted before = Counted::now();
    before.allocated = allocations();  // without those of Counted::now()
    repeat(kStepsOfWindow);
    const Counted after = Counted::now();
    EXPECT_EQ(after.runtime.locked_operations - before.runtime.locked_operations,
              kStepsOfWindow * handles.size());
    if (one_host_) expect_nothing(before, after);
    of_control.push_back(after.runtime.control_messages_sent -
                         before.runtime.control_messages_sent);
    of_ucx.push_back(after.ucx.control_messages - before.ucx.control_messages);
    of_data.push_back(after.ucx.data_messages - before.ucx.data_messages);
  }
  repeat(2);  // otherwise a rank that still counts could receive the first leave message
  if (one_host_) {
    if (!uncounted.empty()) GTEST_SKIP() << "system calls are not counted here: " << uncounted;
    return;
  }
  const std::uint64_t expected = local_rank() == 0 ? kStepsOfWindow * rounds_among_hosts() : 0;
  EXPECT_EQ(*std::ranges::min_element(of_control), expected)
      << "some windows contain a heartbeat as well";
  EXPECT_EQ(*std::ranges::min_element(of_ucx), controller() == "ucx" ? expected : 0U);
  for (const std::uint64_t messages : of_data) {
    EXPECT_EQ(messages, of_data.front());
    EXPECT_EQ(messages % kStepsOfWindow, 0U) << messages;
  }
  if (controller() != "ucx" || local_rank() == 0) {  // the other ranks may send no messages
    EXPECT_EQ(of_data.front() > 0, controller() == "ucx");
  }
}

}  // namespace
}  // namespace hvd::testing
