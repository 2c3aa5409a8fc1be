// Counts the costs of a step in the steady state: it allocates no memory, makes no system call,
// does not query the log level, and sends no message.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdlib>
#include <string>

#include "backend/shm/shm_backend.h"
#include "base/log.h"
#include "support/count_allocations.h"
#include "support/count_ucx_calls.h"
#include "support/job_helpers.h"
#include "support/join_nodes.h"
#include "support/local_job.h"
#include "support/local_network.h"
#include "transport/control_plane.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace {

std::atomic<std::uint64_t> system_calls{0};
std::atomic<std::uint64_t> log_checks{0};

}  // namespace

// Counts the system calls that the runtime makes while it works: futexes go through syscall(),
// waiting rounds through sched_yield(). Always forwards six arguments.
extern "C" [[gnu::no_sanitize_address]] long syscall(long number, ...) noexcept {
  system_calls.fetch_add(1);
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  static const auto next = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
              arguments[5]);
}
extern "C" int sched_yield() noexcept {
  system_calls.fetch_add(1);
  static const auto next = reinterpret_cast<int (*)()>(dlsym(RTLD_NEXT, "sched_yield"));
  return next();
}

// Replaces hvd::log_level(), which every HVD_LOG calls first (see the CMakeLists.txt beside this
// file).
extern "C" hvd::LogLevel __real__ZN3hvd9log_levelEv() noexcept;
extern "C" hvd::LogLevel __wrap__ZN3hvd9log_levelEv() noexcept {
  log_checks.fetch_add(1);
  return __real__ZN3hvd9log_levelEv();
}

namespace hvd::testing {
namespace {

constexpr int kRanks = 2;

/// A rank with tensors in all kinds of memory: fused with others, large, in shared memory, and in a
/// group.
struct Rank {
  std::shared_ptr<SharedArena> arena = SharedArena::create();
  std::shared_ptr<runtime::Runtime> runtime = {};
  std::vector<std::vector<float>> memory = {std::vector<float>(10), std::vector<float>(3000),
                                            std::vector<float>(400'001)};
  std::vector<std::vector<float>> cast = {std::vector<float>(11), std::vector<float>(2000),
                                          std::vector<float>(300'001)};
  std::shared_ptr<std::byte> shared = {};
  std::vector<Submission> submissions = {};
  std::vector<Operation> handles = {};

  void make_submissions() {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      submissions.push_back(float_operation(
          memory[i],
          "a name that is too long to be kept without memory of its own, " + std::to_string(i)));
    }
    constexpr std::int64_t kElements = 500'000;
    shared = allocate_shared(arena, kElements * sizeof(float), false);
    Submission in_place;
    in_place.name = "in shared memory";
    in_place.input = {shared.get(), kElements, DataType::kFloat32, {}, {kElements}};
    in_place.output = in_place.input;
    in_place.alone = true;
    in_place.keep_alive = shared;
    submissions.push_back(in_place);
    for (std::size_t i = 0; i < cast.size(); ++i) {  // two of them fused
      submissions.push_back(float_operation(cast[i], "travels as 16 bits, " + std::to_string(i)));
      allreduce_of(submissions.back()).compression = Compression::kFloat16;
      submissions.back().alone = i == 2;
    }
    join_group(submissions.front(), 0);
    join_group(submissions[memory.size() + 1], 1);
    handles.resize(submissions.size());
  }
  /// The group's tensors have two types, so that it runs in two batches.
  static void join_group(Submission& submission, int index) {
    submission.group = "of two types";
    submission.group_size = 2;
    submission.group_index = index;
  }
  void set(float value) {
    for (auto& tensor : memory) std::fill(tensor.begin(), tensor.end(), value);
    for (auto& tensor : cast) std::fill(tensor.begin(), tensor.end(), value);
    std::fill_n(reinterpret_cast<float*>(shared.get()), 500'000, value);
  }
  float last(std::size_t tensor) const {
    if (tensor < memory.size()) return memory[tensor].back();
    return tensor == memory.size() ? reinterpret_cast<const float*>(shared.get())[499'999]
                                   : cast[tensor - memory.size() - 1].back();
  }
};

class SteadyCount : public ::testing::Test {
 protected:
  void SetUp() override {
    make_planes();
    runtime::RuntimeOptions options;
    options.background_thread = false;
    const std::string name = "/hvd-steady-count-" + std::to_string(getpid());
    for (int number = 0; number < kRanks; ++number) {
      Rank& rank = ranks_[number];
      rank.runtime = runtime::Runtime::create(options, std::move(planes_[number]),
                                              {std::make_shared<ShmBackend>(name, rank.arena)},
                                              clock_, rank.arena);
      rank.make_submissions();
    }
  }
  virtual void make_planes() {
    const auto network = LocalNetwork::create({.size = kRanks}, clock_);
    for (int rank = 0; rank < kRanks; ++rank) planes_[rank] = network->plane(rank);
  }

  /// Every rank submits all, and the ranks' engines take turns until all is done.
  void step() {
    for (Rank& rank : ranks_)
      rank.runtime->submit(rank.submissions, rank.handles, Progress::kCaller);
    for (bool done = false; !done;) {
      done = true;
      if (!time_stands_still_) clock_.advance(std::chrono::microseconds(1));
      for (Rank& rank : ranks_) {
        rank.runtime->step();
        for (const Operation& handle : rank.handles) done = done && handle.done();
      }
    }
  }
  void set_and_step() {
    for (int number = 0; number < kRanks; ++number)
      ranks_[number].set(static_cast<float>(number + 1));
    step();
    for (const Rank& rank : ranks_) {
      for (std::size_t tensor = 0; tensor < rank.submissions.size(); ++tensor)
        ASSERT_EQ(rank.last(tensor), 3.0F) << "tensor " << tensor;
    }
  }

  void count_what_steps_cost();

  VirtualClock clock_;
  bool time_stands_still_ = false;  // otherwise a sign of life might be due
  std::unique_ptr<control::ControlPlane> planes_[kRanks];
  Rank ranks_[kRanks];
};

void SteadyCount::count_what_steps_cost() {
  for (int i = 0; i < 12; ++i) set_and_step();
  const std::uint64_t locked = ranks_[0].runtime->metrics().locked_operations;
  ASSERT_GT(locked, 0U) << "the schedule has not been locked";
  time_stands_still_ = true;
  const std::uint64_t allocated = allocations();
  const std::uint64_t called = system_calls.load();
  const std::uint64_t asked = log_checks.load();
  const std::uint64_t carried = ucx_calls().all;
  constexpr int kSteps = 20;
  for (int i = 0; i < kSteps; ++i) set_and_step();
  EXPECT_EQ(ucx_calls().all - carried, 0U);
  EXPECT_EQ(allocations() - allocated, 0U);
  EXPECT_EQ(system_calls.load() - called, 0U);
  EXPECT_EQ(log_checks.load() - asked, 0U) << "log statements on the way";
  EXPECT_EQ(ranks_[0].runtime->metrics().locked_operations - locked,
            kSteps * ranks_[0].submissions.size());
}

TEST_F(SteadyCount, AStepAllocatesNothingAndDoesNotCallTheKernel) { count_what_steps_cost(); }

#if HVD_HAVE_UCX
/// The ranks' messages use the real UCX.
class SteadyCountOverUcx : public SteadyCount {
 protected:
  void make_planes() override {
    const auto nodes = join_nodes(kRanks);
    std::vector<ucx::Workers> workers;
    ucx::JobMembers members{.generation = 3};
    for (int rank = 0; rank < kRanks; ++rank) {
      workers.push_back(ucx::open_workers());
      members.addresses.push_back(workers.back().address());
    }
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      members.rank = static_cast<int>(rank);
      planes_[rank] =
          message::make_control_plane(ucx::make_ucx_carrier(std::move(workers[rank]), members),
                                      nodes[rank], {.use_mail_rings = false});
    }
  }
};

TEST_F(SteadyCountOverUcx, AStepDoesNotCallUcxEither) {
  const std::uint64_t before = ucx_calls().control_messages;
  count_what_steps_cost();
  EXPECT_GT(ucx_calls().control_messages, before) << "the first steps were negotiated";
}
#endif

TEST_F(SteadyCount, TheCountersCount) {
  const std::uint64_t allocated = allocations();
  const std::uint64_t called = system_calls.load();
  const std::uint64_t asked = log_checks.load();
  // The first step is negotiated, and the first replayed step is logged.
  for (int i = 0; i < 12; ++i) step();
  EXPECT_GT(log_checks.load(), asked);
  EXPECT_GT(allocations(), allocated);
  Doorbell doorbell;
  doorbell.sleep(doorbell.ticket(), Doorbell::Sleeper::kStandby, std::chrono::microseconds(1));
  EXPECT_GT(system_calls.load(), called);
}

}  // namespace
}  // namespace hvd::testing
