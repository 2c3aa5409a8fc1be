// Jobs whose tensors are on a simulated GPU and whose MPI takes pointers to its memory, or does
// not; through the public interface.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/builtin_backends.h"
#include "device/context.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "mpi/support/fake_cuda_mpi.h"

namespace hvd::testing {
namespace {

using Values = std::vector<std::int32_t>;

/// Which differ by rank.
Values values_of(int rank, std::size_t count) {
  Values values(count);
  std::iota(values.begin(), values.end(), rank * 1'000'003);
  return values;
}

class CudaAware : public ::testing::TestWithParam<int> {
 protected:
  struct Running {
    Operation operation;
    std::shared_ptr<TensorView> output = std::make_shared<TensorView>();
  };

  CudaAware() : gpu_({.seed = static_cast<std::uint64_t>(GetParam())}), api_(gpu_.api(0)) {
    runtime::use_device_api(api_);
    watch_messages(&gpu_);
    ::setenv("HVD_BACKEND", "mpi", 1);
  }
  ~CudaAware() override {
    app_.reset();
    if (is_initialized()) shutdown();
    watch_messages(nullptr);
    pretend_cuda_support(CudaSupport::kAsItIs);
    runtime::use_device_api(nullptr);
    for (const char* name : {"HVD_BACKEND", "HVD_CUDA_AWARE_MPI"}) ::unsetenv(name);
    for (const std::string& fault : gpu_.take_faults()) ADD_FAILURE() << fault;
  }

  void start() {
    init();
    app_.reset();
    device_ = std::make_unique<device::Context>(api_, 0);
    app_ = std::make_unique<device::OwnedStream>(*device_);
    take_device_messages();
  }

  /// Filled by the program's queue; the event is behind that.
  std::pair<TensorView, EventPtr> tensor(const Values& values) {
    const device::DeviceGuard guard(*api_, 0);
    const std::size_t bytes = values.size() * sizeof(std::int32_t);
    const TensorView view = empty(values.size());
    std::byte* const source = gpu_.allocate(std::max<std::size_t>(bytes, 1));
    std::ranges::copy(std::as_bytes(std::span(values)), source);
    api_->copy(view.data, source, bytes, device::Direction::kOnDevice, app_->get());
    return {view, device_->events()->record(app_->get())};
  }
  TensorView empty(std::size_t count) {
    const auto elements = static_cast<std::int64_t>(count);
    return {gpu_.allocate(std::max<std::size_t>(count * sizeof(std::int32_t), 1)),
            elements,
            DataType::kInt32,
            {DeviceType::kCuda, 0},
            {elements}};
  }

  Submission describe(const std::string& name, OperationParameters parameters,
                      const Values& values) {
    Submission submission;
    submission.name = name;
    submission.parameters = std::move(parameters);
    std::tie(submission.input, submission.input_ready) = tensor(values);
    submission.output = submission.input;
    return submission;
  }
  Running submit(Submission submission) {
    Running running;
    *running.output = submission.output;
    submission.allocate_output = [this, output = running.output](const OutputSizes& sizes) {
      return *output = empty(static_cast<std::size_t>(std::accumulate(
                 sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0})));
    };
    running.operation = hvd::submit(std::move(submission));
    return running;
  }
  /// What the program's queue finds there once it has waited.
  void expect(const Running& running, const Values& expected, const std::string& what) {
    running.operation.wait();
    ASSERT_TRUE(running.operation.status().ok())
        << what << ": " << running.operation.status().message;
    const device::DeviceGuard guard(*api_, 0);
    std::byte* const copy = gpu_.allocate(std::max<std::size_t>(running.output->bytes(), 1));
    device_->wait(app_->get(), running.operation.output_ready());
    api_->copy(copy, running.output->data, running.output->bytes(), device::Direction::kOnDevice,
               app_->get());
    EXPECT_TRUE(gpu_.run_all());
    Values found(static_cast<std::size_t>(running.output->count));
    std::copy_n(copy, running.output->bytes(), std::as_writable_bytes(std::span(found)).data());
    EXPECT_TRUE(found == expected) << what << " on rank " << rank();
  }

  void broadcasts(const std::string& prefix, const std::vector<int>& members, int set) {
    // Several at once, to be fused, and one by itself.
    for (const int root : members) {
      const std::string from = prefix + "from " + std::to_string(root);
      std::vector<Submission> submissions;
      for (const std::size_t count : {std::size_t{1}, std::size_t{1003}, std::size_t{100'003}}) {
        submissions.push_back(describe(from + " " + std::to_string(count), Broadcast{root},
                                       values_of(rank(), count)));
        submissions.back().process_set = set;
      }
      const std::vector<Submission> kept = submissions;
      const std::vector<Operation> operations = submit_all(std::move(submissions));
      for (std::size_t i = 0; i < operations.size(); ++i) {
        const Running running{operations[i], std::make_shared<TensorView>(kept[i].output)};
        expect(running, values_of(root, static_cast<std::size_t>(kept[i].output.count)),
               kept[i].name);
      }
      Submission apart =
          describe(from + " into another", Broadcast{root}, values_of(rank(), 70'001));
      apart.process_set = set;
      apart.output = empty(70'001);
      expect(submit(std::move(apart)), values_of(root, 70'001), from + " into another");
    }
  }

  // Rows differ by rank, and one rank has none.
  static std::size_t rows_of(int rank) {
    return rank == 1 ? 0 : 1 + static_cast<std::size_t>(rank) * 50'021;
  }

  void gathers(const std::string& prefix, const std::vector<int>& members, int set) {
    Values all;
    for (const int member : members)
      std::ranges::copy(values_of(member, rows_of(member)), std::back_inserter(all));
    for (const bool everywhere : {true, false}) {
      const std::string name = prefix + (everywhere ? "allgather" : "gather");
      const OperationParameters parameters =
          everywhere ? OperationParameters(Allgather{}) : Gather{members.back()};
      Submission submission = describe(name, parameters, values_of(rank(), rows_of(rank())));
      submission.process_set = set;
      const bool receives = everywhere || rank() == members.back();
      Running running = submit(std::move(submission));
      running.operation.wait();
      if (!receives) *running.output = empty(0);
      expect(running, receives ? all : Values(), name);
    }
  }

  static std::size_t rows_between(int from, int to) {
    return from == to ? 20'011 : static_cast<std::size_t>((from + 2 * to) % 3) * 40'009;
  }

  void exchanges(const std::string& prefix, const std::vector<int>& members, int set) {
    Values sent;
    Values expected;
    std::vector<std::int64_t> splits;
    for (const int member : members) {
      const std::size_t rows = rows_between(rank(), member);
      splits.push_back(static_cast<std::int64_t>(rows));
      std::ranges::copy(values_of(10 * rank() + member, rows), std::back_inserter(sent));
      std::ranges::copy(values_of(10 * member + rank(), rows_between(member, rank())),
                        std::back_inserter(expected));
    }
    Submission submission = describe(prefix + "alltoall", Alltoall{std::move(splits)}, sent);
    submission.process_set = set;
    expect(submit(std::move(submission)), expected, prefix + "alltoall");
  }

  void move_everything() {
    std::vector<int> all(static_cast<std::size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    for (const std::string round : {"first ", "again "}) {
      broadcasts(round, all, 0);
      gathers(round, all, 0);
      exchanges(round, all, 0);
    }
    if (size() < 3) return;
    const std::vector<int> some(all.begin() + 1, all.end());
    const ProcessSet set = add_process_set(some);
    if (rank() == 0) return;
    broadcasts("some ", some, set.id());
    gathers("some ", some, set.id());
    exchanges("some ", some, set.id());
  }

  void expect_everything_staged() {
    move_everything();
    EXPECT_GT(gpu_.counts(0).copies_to_host, 0);
    EXPECT_EQ(take_device_messages(), 0);
  }

  void reduce_something() {
    const std::size_t count = 6000 * static_cast<std::size_t>(size());
    Values sums(count);
    for (int from = 0; from < size(); ++from) {
      const Values values = values_of(from, count);
      std::transform(sums.begin(), sums.end(), values.begin(), sums.begin(), std::plus<>());
    }
    expect(submit(describe("sum", Allreduce{}, values_of(rank(), count))), sums, "allreduce");
    Submission scattered = describe("scattered", Reducescatter{}, values_of(rank(), count));
    scattered.output = empty(6000);
    const auto own = sums.begin() + 6000 * rank();
    expect(submit(std::move(scattered)), Values(own, own + 6000), "reducescatter");
  }

  FakeGpu gpu_;
  std::shared_ptr<device::Api> api_;
  std::unique_ptr<device::Context> device_;
  std::unique_ptr<device::OwnedStream> app_;
};

TEST_P(CudaAware, WhatIsOnlyMovedIsNotStaged) {
  pretend_cuda_support(CudaSupport::kYes);
  start();
  move_everything();
  EXPECT_EQ(gpu_.counts(0).copies_to_host, 0);
  EXPECT_GT(take_device_messages(), 0);
  EXPECT_EQ(gpu_.counts(0).synchronize, 0);
}

TEST_P(CudaAware, ReductionsAreStaged) {
  pretend_cuda_support(CudaSupport::kYes);
  start();
  reduce_something();
  EXPECT_GT(gpu_.counts(0).copies_to_host, 0);
  EXPECT_EQ(take_device_messages(), 0);
  move_everything();
  EXPECT_GT(take_device_messages(), 0);
}

TEST_P(CudaAware, OneRankWhoseMpiIsNotLetsAllStage) {
  start();
  const bool last = rank() == size() - 1;
  shutdown();
  pretend_cuda_support(last ? CudaSupport::kNo : CudaSupport::kYes);
  start();
  expect_everything_staged();
}

TEST_P(CudaAware, OffOnOneRankLetsAllStage) {
  pretend_cuda_support(CudaSupport::kYes);
  start();
  const bool first = rank() == 0;
  shutdown();
  if (first) ::setenv("HVD_CUDA_AWARE_MPI", "off", 1);
  start();
  expect_everything_staged();
}

TEST_P(CudaAware, SharedMemoryIsTouchedByTheCpuSoItStages) {
  pretend_cuda_support(CudaSupport::kYes);
  ::setenv("HVD_BACKEND", "shm", 1);
  start();
  move_everything();
  reduce_something();
  EXPECT_GT(gpu_.counts(0).copies_to_host, 0);
  EXPECT_GT(gpu_.pinned(), 0) << "in memory that the others reduce where it lies";
  EXPECT_EQ(take_device_messages(), 0);
}

TEST_P(CudaAware, AsTheMpiAtHandSays) {
  start();
  move_everything();
  EXPECT_EQ(take_device_messages() > 0, real_cuda_support());
  EXPECT_EQ(gpu_.counts(0).copies_to_host == 0, real_cuda_support());
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaAware, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace hvd::testing
