// The memory of hvd's own buffers on a device: its source, the thread that allocates it, and when
// it is freed.
#include <gtest/gtest.h>

#include <atomic>

#include "hvd/error.h"
#include "support/device_job.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;
using FloatOperation = DeviceOperation<float>;

constexpr int kMembers = 3;
constexpr nccl::NcclOptions kWithRegistration{.registered_bytes = 4096};

/// Every rank submits tensors that are reduced in one call. Their buffer has slightly more than
/// four times `count` floats.
std::vector<Operation> submit_group(DeviceJob& job, const std::string& name, std::size_t count) {
  std::vector<Operation> handles;
  for (int rank = 0; rank < job.size(); ++rank) {
    std::vector<Submission> group;
    for (int tensor = 0; tensor < 4; ++tensor) {
      group.push_back(FloatOperation::in_place(job, rank, name + std::to_string(tensor),
                                               OpKind::kAllreduce, DataType::kFloat32,
                                               Floats(count, static_cast<float>(rank)))
                          .submission);
      group.back().on_done = nullptr;
    }
    for (auto& handle : job.runtime(rank).submit(std::move(group), Progress::kBackground))
      handles.push_back(handle);
  }
  return handles;
}

void reduce_group(DeviceJob& job, const std::string& name, std::size_t count) {
  const std::vector<Operation> handles = submit_group(job, name, count);
  ASSERT_TRUE(job.run(handles));
  for (const Operation& handle : handles)
    ASSERT_TRUE(handle.status().ok()) << handle.status().message;
}

/// Starts a job. Where NCCL has registered no buffers, two of 2 MiB are allocated beforehand.
std::unique_ptr<DeviceJob> start_job(Path path, const DeviceMemory& memory = {},
                                     const nccl::NcclOptions& backend = {},
                                     const FakeNcclOptions& fake = {}) {
  runtime::RuntimeOptions options;
  options.fusion_threshold = 1 << 20;
  return std::make_unique<DeviceJob>(kMembers, path, options, fake, 1, backend, memory);
}

/// Reduces one tensor on all ranks; without compression the values stay float32.
void reduce_one(DeviceJob& job, std::size_t count, Compression compression = Compression::kNone) {
  std::vector<Operation> handles;
  for (int rank = 0; rank < job.size(); ++rank) {
    Submission submission = FloatOperation::in_place(job, rank, "one", OpKind::kAllreduce,
                                                     DataType::kFloat32, Floats(count, 1.0F))
                                .submission;
    submission.parameters = Allreduce{.compression = compression};
    submission.on_done = nullptr;
    handles.push_back(submit_one(job.runtime(rank), std::move(submission)));
  }
  ASSERT_TRUE(job.run(handles));
}

/// Runs an operation that opens a queue, as in a training program.
void reduce_one_number(DeviceJob& job) { reduce_one(job, 1); }

/// Reduces a single tensor that is cast, through a buffer of this size.
void reduce_mebibytes(DeviceJob& job, std::size_t mebibytes) {
  reduce_one(job, mebibytes << 19, Compression::kFloat16);
}

class DeviceMemoryTest : public ::testing::TestWithParam<Path> {};
INSTANTIATE_TEST_SUITE_P(Paths, DeviceMemoryTest, ::testing::Values(Path::kNccl, Path::kStaged),
                         [](const auto& test) {
                           return test.param == Path::kNccl ? "Nccl" : "Staged";
                         });

// A DeviceJob's helper is another thread; this thread drives the engines.
TEST_P(DeviceMemoryTest, IsMadeAndFreedBesideTheThreadThatDrivesTheEngine) {
  const auto job = start_job(GetParam());
  for (const std::size_t mebibytes : {1U, 3U, 4U, 5U}) {
    reduce_mebibytes(*job, mebibytes);
    EXPECT_TRUE(job->gpu().run_all());
  }
  std::vector<FloatOperation> gathers;
  std::vector<Operation> handles;
  for (int rank = 0; rank < kMembers; ++rank) {
    gathers.push_back(FloatOperation::gathering(*job, rank, "g", OpKind::kAllgather,
                                                DataType::kFloat32,
                                                Floats(static_cast<std::size_t>(rank + 1), 1.0F)));
    handles.push_back(submit_one(job->runtime(rank), gathers.back().submission));
  }
  ASSERT_TRUE(job->run(handles));
  for (int rank = 0; rank < kMembers; ++rank) {
    const FakeGpuCounts counts = job->gpu().counts(rank);
    EXPECT_EQ(counts.made, 5);
    EXPECT_GT(counts.freed, 0) << "those that had become too small";
    EXPECT_EQ(counts.made_or_freed_by_maker, 0);
  }
  job->expect_no_faults();
}

TEST_P(DeviceMemoryTest, AStepThatRepeatsMakesNone) {
  const auto job = start_job(GetParam());
  for (int number = 0; number < 3; ++number) reduce_group(*job, "w", 1000);
  const FakeGpuCounts before = job->gpu().counts(0);
  EXPECT_GT(before.made, 0);
  for (int number = 0; number < 10; ++number) reduce_group(*job, "w", 1000);
  EXPECT_EQ(job->gpu().counts(0).made, before.made);
  EXPECT_EQ(job->gpu().counts(0).freed, before.freed);
}

TEST_P(DeviceMemoryTest, BuffersOfAKnownSizeAreAllocatedWithTheQueue) {
  const auto job = start_job(GetParam());
  reduce_one_number(*job);
  const FakeGpuCounts opened = job->gpu().counts(0);
  EXPECT_EQ(opened.made, 2);
  for (const std::size_t count : {1U, 100U, 5000U, 60000U, 65536U, 65536U, 7U})
    reduce_group(*job, "w" + std::to_string(count), count);
  for (int rank = 0; rank < kMembers; ++rank) {
    EXPECT_EQ(job->gpu().counts(rank).made, opened.made);
    EXPECT_EQ(job->gpu().counts(rank).freed, 0);
    EXPECT_EQ(job->gpu().counts(rank).made_or_freed_by_maker, 0);
  }
  reduce_mebibytes(*job, 3);
  EXPECT_EQ(job->gpu().counts(0).made, opened.made + 1);
  EXPECT_TRUE(job->gpu().run_all());
  job->expect_no_faults();
}

TEST_P(DeviceMemoryTest, WithoutRoomForThoseBuffersBatchesAllocateTheirOwn) {
  int emptied = 0;
  const auto job = start_job(GetParam(), {.empty_cache = [&emptied](int) { ++emptied; }});
  job->gpu().run_out_of_memory(1, 2);  // before and after it is emptied
  reduce_one_number(*job);
  EXPECT_EQ(emptied, 1);
  EXPECT_EQ(job->gpu().counts(1).made, 0);
  reduce_group(*job, "w", 100);
  EXPECT_EQ(job->gpu().counts(0).made, 2);
  EXPECT_EQ(job->gpu().counts(1).made, 1);
  EXPECT_TRUE(job->gpu().run_all());
  job->expect_no_faults();
}

TEST(PinnedMemoryTest, IsMadeWhenTheQueueIsOpenedBesideTheThreadThatDrivesTheEngine) {
  const auto job = start_job(Path::kStaged);
  reduce_one_number(*job);
  const int opened = job->gpu().counts(0).pinned_made;
  EXPECT_GT(opened, 0);
  for (const std::size_t count : {1U, 5000U, 65536U, 65536U})
    reduce_group(*job, "w" + std::to_string(count), count);
  reduce_one(*job, 5 << 20);  // in five pieces
  for (int rank = 0; rank < kMembers; ++rank) {
    EXPECT_EQ(job->gpu().counts(rank).pinned_made, opened);
    EXPECT_EQ(job->gpu().counts(rank).pinned_freed, 0);
  }
  EXPECT_TRUE(job->gpu().run_all());
  job->expect_no_faults();
  job->end();
  for (int rank = 0; rank < kMembers; ++rank) {
    EXPECT_EQ(job->gpu().counts(rank).pinned_freed, opened);
    EXPECT_EQ(job->gpu().counts(rank).made_or_freed_by_maker, 0);
  }
  job->expect_no_faults();
}

// An operation that NCCL does not support is staged, and allocates no memory on the device.
TEST(ReservedMemoryTest, OnlyTheQueueOfGradientsHasAny) {
  const auto job = start_job(Path::kNccl);
  std::vector<Operation> handles;
  for (int rank = 0; rank < kMembers; ++rank) {
    DeviceOperation<std::int16_t> numbers = DeviceOperation<std::int16_t>::in_place(
        *job, rank, "n", OpKind::kAllreduce, DataType::kInt16, {1});
    numbers.submission.on_done = nullptr;
    handles.push_back(submit_one(job->runtime(rank), numbers.submission));
  }
  ASSERT_TRUE(job->run(handles));
  EXPECT_EQ(job->nccl().counts(0).calls, 0);
  EXPECT_EQ(job->gpu().counts(0).made, 0);
  EXPECT_EQ(job->gpu().counts(0).pinned_made, 1);
  reduce_one_number(*job);
  EXPECT_EQ(job->gpu().counts(0).made, 2);
}

/// A framework's allocator. Work in a queue of the framework still uses the memory that it returns.
struct Framework {
  FakeGpu* gpu = nullptr;
  std::atomic<int> made = 0;
  std::atomic<int> given_back = 0;
  std::atomic<int> emptied = 0;

  DeviceMemory memory() {
    return {.allocate =
                [this](int device, std::size_t bytes) {
                  EXPECT_EQ(device, 0);
                  ++made;
                  const std::shared_ptr<device::Api> api = gpu->api(kMembers);
                  const device::DeviceGuard guard(*api, device);
                  const device::Stream stream = api->create_stream();
                  std::byte* const memory = gpu->allocate(bytes);
                  gpu->enqueue(stream,
                               {"the framework's last use", {{memory, bytes, true}}, {}, [] {}});
                  return DeviceBlock{{memory,
                                      [this](std::byte* mine) {
                                        ++given_back;
                                        gpu->release(mine);
                                      }},
                                     stream.handle};
                },
            .empty_cache = [this](int) { ++emptied; }};
  }
};

TEST_P(DeviceMemoryTest, MemoryComesFromTheFrameworkAndReturnsThere) {
  Framework framework;
  auto job = start_job(GetParam(), framework.memory());
  framework.gpu = &job->gpu();
  for (int number = 0; number < 3; ++number) reduce_group(*job, "w", 1000);
  reduce_group(*job, "v", 50000);
  EXPECT_TRUE(job->gpu().run_all());
  EXPECT_EQ(framework.made, 2 * kMembers);
  EXPECT_EQ(framework.emptied, 0);
  for (int rank = 0; rank < kMembers; ++rank) EXPECT_EQ(job->gpu().counts(rank).made, 0);
  job->expect_no_faults();
  job->end();
  EXPECT_EQ(framework.given_back, framework.made);
  job->expect_no_faults();
}

TEST_P(DeviceMemoryTest, TheFrameworksCacheIsEmptiedWhenMemoryIsShort) {
  int emptied = 0;
  const auto job = start_job(GetParam(), {.empty_cache = [&emptied](int) { ++emptied; }});
  job->gpu().run_out_of_memory(1, 1);
  reduce_group(*job, "w", 1000);
  EXPECT_EQ(emptied, 1);
  job->expect_no_faults();
}

TEST_P(DeviceMemoryTest, AJobWithoutMemoryEndsOnEveryRankWithAdvice) {
  int emptied = 0;
  const auto job = start_job(GetParam(), {.empty_cache = [&emptied](int) { ++emptied; }});
  job->gpu().run_out_of_memory(1, -1);
  const std::vector<Operation> handles = submit_group(*job, "w", 65536);
  ASSERT_TRUE(job->run(handles));
  for (int rank = 0; rank < kMembers; ++rank) {
    const std::string message = job->runtime(rank).failure().message;
    EXPECT_NE(message.find("device 0 has no memory for a buffer of 1048576 bytes (1 MiB)"),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("cudaMalloc failed: out of memory"), std::string::npos) << message;
    EXPECT_NE(message.find("HVD_FUSION_THRESHOLD"), std::string::npos) << message;
    EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
  }
  EXPECT_EQ(emptied, 2) << "for buffers made ahead of use, and for those of the batch";
}

TEST(RegisteredMemoryTest, IsMadeAndFreedBesideTheThreadThatDrivesTheEngine) {
  const auto job = start_job(Path::kNccl, {}, kWithRegistration);
  reduce_group(*job, "w", 100);
  for (int rank = 0; rank < kMembers; ++rank) {
    EXPECT_EQ(job->nccl().counts(rank).allocated, 2);
    EXPECT_EQ(job->nccl().counts(rank).memory_calls_by_maker, 0);
    EXPECT_EQ(job->gpu().counts(rank).made, 0) << "all batches fit into it";
  }
}

TEST(RegisteredMemoryTest, TheFrameworksCacheIsEmptiedForIt) {
  int emptied = 0;
  const auto job =
      start_job(Path::kNccl, {.empty_cache = [&emptied](int) { ++emptied; }}, kWithRegistration,
                {.allocate_throws_at = 1, .allocate_throws_times = 1});
  reduce_group(*job, "w", 100);
  EXPECT_TRUE(job->gpu().run_all());
  EXPECT_EQ(emptied, 1);
  for (int rank = 0; rank < kMembers; ++rank)
    EXPECT_EQ(job->nccl().counts(rank).from_registered, job->nccl().counts(rank).calls);
}

TEST(RegisteredMemoryTest, AJobWithoutRoomForItGoesOnWithout) {
  int emptied = 0;
  const auto job = start_job(Path::kNccl, {.empty_cache = [&emptied](int) { ++emptied; }},
                             kWithRegistration, {.allocate_throws_at = 1});
  reduce_group(*job, "w", 100);
  EXPECT_TRUE(job->gpu().run_all());
  EXPECT_EQ(emptied, 1);
  for (int rank = 0; rank < kMembers; ++rank) {
    EXPECT_EQ(job->nccl().counts(rank).from_registered, 0);
    EXPECT_EQ(job->nccl().counts(rank).calls, 1);
  }
  job->expect_no_faults();
}

}  // namespace
}  // namespace hvd::testing
