// The same batches use memory that NCCL has registered on every rank, and a repeated step registers
// no memory.
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "support/device_job.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;
using FloatOperation = DeviceOperation<float>;

constexpr int kRanks = 3;
constexpr int kTensors = 6;
constexpr nccl::NcclOptions kRegisters{.registered_bytes = 4096};

class DeviceRegistrationTest : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  std::unique_ptr<DeviceJob> start(const FakeNcclOptions& fake = {},
                                   const nccl::NcclOptions& backend = kRegisters) {
    return std::make_unique<DeviceJob>(kRanks, Path::kNccl, runtime::RuntimeOptions{}, fake,
                                       GetParam(), backend);
  }

  /// Reduces a group of tensors in one call, and checks the result.
  static void step(DeviceJob& job, const std::string& name, int tensors, std::size_t count,
                   int ranks = kRanks, Compression compression = Compression::kNone) {
    std::vector<Operation> handles;
    std::vector<FloatOperation> operations;
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<Submission> group;
      for (int tensor = 0; tensor < tensors; ++tensor) {
        operations.push_back(FloatOperation::in_place(
            job, rank, name + std::to_string(tensor), OpKind::kAllreduce, DataType::kFloat32,
            Floats(count, static_cast<float>(rank + tensor))));
        group.push_back(operations.back().submission);
        allreduce_of(group.back()).compression = compression;
      }
      for (auto& handle : job.runtime(rank).submit(std::move(group), Progress::kBackground))
        handles.push_back(handle);
    }
    ASSERT_TRUE(job.run(handles));
    for (const Operation& handle : handles)
      ASSERT_TRUE(handle.status().ok()) << handle.status().message;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      const int tensor = static_cast<int>(i) % tensors;
      const float expected = static_cast<float>(ranks * (ranks - 1) / 2 + ranks * tensor);
      EXPECT_EQ(job.read<float>(static_cast<int>(i) / tensors, *operations[i].output,
                                *operations[i].ready),
                Floats(count, expected));
    }
  }
};

TEST_P(DeviceRegistrationTest, BatchesLieInRegisteredMemoryAndStepsRegisterNoMore) {
  const auto job = start();
  constexpr int kSteps = 12;
  for (int number = 0; number < kSteps; ++number) step(*job, "w", kTensors, 5);
  for (int rank = 0; rank < kRanks; ++rank) {
    const FakeNcclCounts counts = job->nccl().counts(rank);
    EXPECT_EQ(counts.registrations, 2);
    EXPECT_EQ(counts.registered, 2);
    EXPECT_EQ(counts.allocated, 2);
    EXPECT_EQ(counts.from_registered, counts.calls);
    EXPECT_GE(counts.calls, kSteps);
    EXPECT_EQ(job->gpu().counts(rank).synchronize, 0);
  }
  job->expect_no_faults();
}

TEST_P(DeviceRegistrationTest, SingleAndLargeTensorsLieElsewhereOnEveryRank) {
  const auto job = start();
  step(*job, "alone", 1, 5);
  step(*job, "large", kTensors, 1000);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job->nccl().counts(rank).from_registered, 0);
  step(*job, "w", kTensors, 5);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job->nccl().counts(rank).from_registered, 1);
  job->expect_no_faults();
}

/// The last rank joins, the others run the steps and join too. Then each rank has run `expected`
/// collectives in registered memory.
void expect_registered_after_join(DeviceJob& job, const std::function<void()>& steps,
                                  int expected) {
  std::vector<Operation> joins = {submit_one(job.runtime(kRanks - 1), join_operation())};
  steps();
  for (int rank = 0; rank < kRanks - 1; ++rank)
    joins.push_back(submit_one(job.runtime(rank), join_operation()));
  ASSERT_TRUE(job.run(joins));
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(job.nccl().counts(rank).from_registered, expected) << rank;
  job.expect_no_faults();
}

TEST_P(DeviceRegistrationTest, ARankThatHasJoinedUsesRegisteredMemoryWhereTheOthersDo) {
  const auto job = start();
  expect_registered_after_join(
      *job,
      [&] {
        step(*job, "w", kTensors, 5, kRanks - 1);
        step(*job, "alone", 1, 5, kRanks - 1);
        step(*job, "w", kTensors, 5, kRanks - 1);
      },
      2);
}

TEST_P(DeviceRegistrationTest, ATensorByItselfThatIsCastLiesInRegisteredMemoryOnEveryRank) {
  const auto job = start();
  step(*job, "alone", 1, 5, kRanks, Compression::kFloat16);
  expect_registered_after_join(
      *job, [&] { step(*job, "alone", 1, 5, kRanks - 1, Compression::kFloat16); }, 2);
}

TEST_P(DeviceRegistrationTest, WithoutRegistrationAllWorksAsBefore) {
  for (const FakeNcclOptions& fake : std::vector<FakeNcclOptions>{
           {.version = 21805}, {.register_throws_at = 1}, {.allocate_throws_at = 0}}) {
    const auto job = start(fake);
    for (int number = 0; number < 3; ++number) step(*job, "w", kTensors, 5);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(job->nccl().counts(rank).registered, 0);
      EXPECT_EQ(job->nccl().counts(rank).allocated, 0);
      EXPECT_EQ(job->nccl().counts(rank).from_registered, 0);
      EXPECT_FALSE(job->runtime(rank).failed());
    }
    job->expect_no_faults();
  }
  const auto off = start({}, {});
  step(*off, "w", kTensors, 5);
  EXPECT_EQ(off->nccl().counts(0).registrations, 0);
}

TEST_P(DeviceRegistrationTest, ARemovedProcessSetGivesItsBuffersBack) {
  const auto job = start();
  std::vector<int> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(rank);
  const Submission add{.parameters = AddProcessSet{ranks}};
  std::vector<Operation> handles;
  for (int rank = 0; rank < kRanks; ++rank) handles.push_back(submit_one(job->runtime(rank), add));
  ASSERT_TRUE(job->run(handles));
  const int set = static_cast<int>(handles[0].result());
  handles.clear();
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<Submission> group;
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      group.push_back(FloatOperation::in_place(*job, rank, std::to_string(tensor),
                                               OpKind::kAllreduce, DataType::kFloat32, Floats(5))
                          .submission);
      group.back().process_set = set;
      group.back().on_done = nullptr;
    }
    for (auto& handle : job->runtime(rank).submit(std::move(group), Progress::kBackground))
      handles.push_back(handle);
  }
  ASSERT_TRUE(job->run(handles));
  const Submission remove{.parameters = RemoveProcessSet{set}};
  handles.clear();
  for (int rank = 0; rank < kRanks; ++rank)
    handles.push_back(submit_one(job->runtime(rank), remove));
  ASSERT_TRUE(job->run(handles));
  EXPECT_TRUE(job->gpu().run_all());
  EXPECT_TRUE(job->run_until([&] {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (job->nccl().counts(rank).destroyed < 1) return false;
    }
    return true;
  }));
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(job->nccl().counts(rank).registrations, 2);
    EXPECT_EQ(job->nccl().counts(rank).registered, 0);
    EXPECT_EQ(job->nccl().counts(rank).allocated, 0);
    EXPECT_EQ(job->nccl().counts(rank).from_registered, 1);
  }
  job->expect_no_faults();
}

TEST_P(DeviceRegistrationTest, AfterAFailureTheCommunicatorIsAbortedFirst) {
  const auto job = start();
  step(*job, "w", kTensors, 5);
  job->nccl().break_rank(1, true, "the connection was closed by the remote host");
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<Submission> group;
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      const std::string name = "w" + std::to_string(tensor);
      group.push_back(FloatOperation::in_place(*job, rank, name, OpKind::kAllreduce,
                                               DataType::kFloat32, Floats(5))
                          .submission);
      group.back().on_done = nullptr;
    }
    job->runtime(rank).submit(std::move(group), Progress::kBackground);
  }
  ASSERT_TRUE(job->run_until([&] {
    return job->runtime(0).failed() && job->runtime(1).failed() && job->runtime(2).failed();
  }));
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(job->nccl().wait_for_aborts(rank, 1));
    EXPECT_EQ(job->nccl().counts(rank).registered, 0);
  }
  EXPECT_TRUE(job->gpu().run_all()) << "nothing hangs on the device";
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceRegistrationTest, ::testing::Values(1, 2, 3, 4, 5));

}  // namespace
}  // namespace hvd::testing
