// Tensors in parts: one launch packs a bucket of gradients from wherever they are, and another
// copies the result back.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "support/device_job.h"
#include "support/sixteen_bit.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;

constexpr std::int64_t kGap = 5;  // elements between two parts, which belong to no part

/// A rank's gradients, each in memory of its own, and the tensor whose parts they are.
template <class Element>
struct Bucket {
  std::vector<GpuTensor<Element>> gradients;
  std::vector<TensorPart> parts;
  Submission submission;
  std::shared_ptr<EventPtr> ready = std::make_shared<EventPtr>();
};

class DevicePartsTest : public ::testing::Test {
 protected:
  void start(int ranks, Path path, std::size_t registered_bytes = 0, std::uint64_t seed = 1) {
    job_.reset();  // before the parts that it uses
    job_.emplace(ranks, path, runtime::RuntimeOptions{}, FakeNcclOptions{}, seed,
                 nccl::NcclOptions{.registered_bytes = registered_bytes});
  }

  /// @param values of each gradient
  template <class Element>
  Bucket<Element> bucket(int rank, DataType type, const std::vector<std::vector<Element>>& values,
                         const Allreduce& how = {}) {
    Bucket<Element> made;
    TensorView all{nullptr, 0, type, {DeviceType::kCuda, 0}, {}};
    for (const std::vector<Element>& of_one : values) {
      auto [tensor, event] = job_->make<Element>(rank, of_one);
      made.gradients.push_back(tensor);
      made.parts.push_back({tensor.memory, all.count, tensor.count});
      all.count += tensor.count + kGap;
      made.submission.input_ready = event;
    }
    all.shape = {all.count};
    made.submission.name = "bucket";
    made.submission.parameters = how;
    made.submission.input = made.submission.output = all;
    made.submission.alone = true;
    made.submission.on_done = [ready = made.ready](const Status& status, const EventPtr& event) {
      EXPECT_TRUE(status.ok()) << status.message;
      *ready = event;
    };
    return made;
  }

  /// Submits the gradients where they are now.
  template <class Element>
  Operation submit(int rank, Bucket<Element>& bucket) {
    bucket.submission.parts = bucket.parts;
    return submit_one(job_->runtime(rank), bucket.submission);
  }

  void expect_exact_count(Path path, std::size_t gradients);

  std::optional<DeviceJob> job_;
};

Floats numbers(std::size_t count, int rank, std::size_t gradient) {
  Floats values;
  for (std::size_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(rank + 1) * static_cast<float>(gradient + 1) +
                     static_cast<float>(i % 97));
  return values;
}

TEST_F(DevicePartsTest, AreReducedWhereTheyAre) {
  const std::vector<std::size_t> counts = {1, 7, 0, 64, 20000, 333};
  for (const Path path : {Path::kNccl, Path::kStaged}) {
    for (const int ranks : {1, 2, 3}) {
      for (const Compression compression : {Compression::kNone, Compression::kFloat16}) {
        start(ranks, path);
        std::vector<Bucket<float>> buckets;
        std::vector<Operation> handles;
        for (int rank = 0; rank < ranks; ++rank) {
          std::vector<Floats> values;
          for (std::size_t g = 0; g < counts.size(); ++g)
            values.push_back(numbers(counts[g], rank, g));
          buckets.push_back(
              bucket(rank, DataType::kFloat32, values,
                     {.op = ReduceOp::kAverage, .prescale = 2, .compression = compression}));
        }
        for (int rank = 0; rank < ranks; ++rank)
          handles.push_back(submit(rank, buckets[static_cast<std::size_t>(rank)]));
        ASSERT_TRUE(job_->run(handles));
        for (int rank = 0; rank < ranks; ++rank) {
          const Bucket<float>& own = buckets[static_cast<std::size_t>(rank)];
          for (std::size_t g = 0; g < counts.size(); ++g) {
            const Floats actual =
                job_->read<float>(rank, own.gradients[g].view(DataType::kFloat32), *own.ready);
            for (std::size_t i = 0; i < counts[g]; ++i) {
              const float expected = static_cast<float>((ranks + 1) * static_cast<int>(g + 1)) +
                                     2 * static_cast<float>(i % 97);
              ASSERT_NEAR(actual[i], expected,
                          compression == Compression::kNone ? 1e-4 : expected * 0x1p-9)
                  << "gradient " << g << ", element " << i;
            }
          }
        }
        job_->expect_no_faults();
      }
    }
  }
}

/// The costs of a step do not depend on the number and the addresses of a bucket's gradients.
void DevicePartsTest::expect_exact_count(Path path, std::size_t gradients) {
  start(2, path, 1 << 20);
  const auto step = [&](int number) {
    std::vector<Bucket<float>> buckets;
    std::vector<Operation> handles;
    for (int rank = 0; rank < 2; ++rank) {
      const std::vector<Floats> values(gradients, Floats(11, static_cast<float>(number + rank)));
      buckets.push_back(bucket(rank, DataType::kFloat32, values, {.op = ReduceOp::kAverage}));
    }
    const FakeGpuCounts before = job_->gpu().counts(0);
    for (int rank = 0; rank < 2; ++rank)
      handles.push_back(submit(rank, buckets[static_cast<std::size_t>(rank)]));
    EXPECT_TRUE(job_->run(handles));
    const FakeGpuCounts after = job_->gpu().counts(0);
    EXPECT_EQ(job_->read<float>(0, buckets[0].gradients.back().view(DataType::kFloat32),
                                *buckets[0].ready),
              Floats(11, static_cast<float>(number) + 0.5F));
    return std::pair(before, after);
  };
  for (int number = 0; number < 5; ++number) step(number);
  for (int number = 5; number < 8; ++number) {
    const auto [before, after] = step(number);
    EXPECT_EQ(after.launches - before.launches, 2) << "one packs and one unpacks";
    EXPECT_EQ(after.allocate, before.allocate);
    EXPECT_EQ(after.synchronize, before.synchronize);
    if (path == Path::kStaged) continue;  // copies pieces to the host and back
    EXPECT_EQ(after.copies, before.copies);
    EXPECT_EQ(after.records - before.records, 3) << "behind packing, reducing and unpacking";
    EXPECT_EQ(after.waits - before.waits, 4)
        << "for the gradients, the buffer's last use, the packing and the reduction";
    EXPECT_EQ(job_->nccl().counts(0).from_registered, job_->nccl().counts(0).calls);
  }
  job_->expect_no_faults();
}

TEST_F(DevicePartsTest, AStepIsOneLaunchEachWayHoweverManyThereAre) {
  for (const Path path : {Path::kNccl, Path::kStaged}) {
    for (const std::size_t gradients : {1, 160}) expect_exact_count(path, gradients);
  }
}

TEST_F(DevicePartsTest, ARankThatHasJoinedUsesRegisteredMemoryWhereTheOthersDo) {
  start(3, Path::kNccl, 1 << 20);
  std::vector<Operation> joins = {submit_one(job_->runtime(2), join_operation())};
  std::vector<Bucket<float>> buckets;
  std::vector<Operation> handles;
  for (int rank = 0; rank < 2; ++rank)
    buckets.push_back(
        bucket<float>(rank, DataType::kFloat32, {numbers(50, rank, 0), numbers(9, rank, 1)}));
  for (int rank = 0; rank < 2; ++rank)
    handles.push_back(submit(rank, buckets[static_cast<std::size_t>(rank)]));
  ASSERT_TRUE(job_->run(handles));
  EXPECT_EQ(
      job_->read<float>(0, buckets[0].gradients[1].view(DataType::kFloat32), *buckets[0].ready)[3],
      2.0F + 4.0F + 2 * 3.0F);
  for (int rank = 0; rank < 2; ++rank)
    joins.push_back(submit_one(job_->runtime(rank), join_operation()));
  ASSERT_TRUE(job_->run(joins));
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(job_->nccl().counts(rank).from_registered, 1) << rank;
  job_->expect_no_faults();
}

TEST_F(DevicePartsTest, ARankThatSubmitsItInOnePieceGetsAnError) {
  start(2, Path::kNccl);
  Bucket<float> parts = bucket<float>(0, DataType::kFloat32, {Floats(10)});
  parts.submission.on_done = nullptr;
  DeviceOperation<float> whole = DeviceOperation<float>::in_place(
      *job_, 1, "bucket", OpKind::kAllreduce, DataType::kFloat32, Floats(15));
  whole.submission.on_done = nullptr;
  const std::vector<Operation> handles = {submit(0, parts),
                                          submit_one(job_->runtime(1), whole.submission)};
  ASSERT_TRUE(job_->run(handles));
  for (const Operation& handle : handles)
    EXPECT_EQ(handle.status().code, StatusCode::kMismatch) << handle.status().message;
}

class DevicePartsAverageTest : public DevicePartsTest,
                               public ::testing::WithParamInterface<std::pair<DataType, int>> {};

TEST_P(DevicePartsAverageTest, Of16BitNumbersIsOffToNeitherSideAndNeedsNoLaunchOfItsOwn) {
#if defined(HVD_SANITIZED)
  constexpr std::size_t kValues = 1 << 14;
#else
  constexpr std::size_t kValues = 1 << 20;
#endif
  const auto [type, ranks] = GetParam();
  start(ranks, Path::kNccl, std::size_t{4} << 20);
  const SixteenBitAverage average = sixteen_bit_average(type, ranks, kValues);
  std::vector<Bucket<std::uint16_t>> buckets;
  std::vector<Operation> handles;
  for (int rank = 0; rank < ranks; ++rank) {
    buckets.push_back(bucket<std::uint16_t>(
        rank, type, {average.inputs[static_cast<std::size_t>(rank)]}, {.op = ReduceOp::kAverage}));
  }
  for (int rank = 0; rank < ranks; ++rank)
    handles.push_back(submit(rank, buckets[static_cast<std::size_t>(rank)]));
  ASSERT_TRUE(job_->run(handles));
  const std::vector<std::uint16_t> result =
      job_->read<std::uint16_t>(0, buckets[0].gradients[0].view(type), *buckets[0].ready);
  EXPECT_LT(std::abs(mean_relative_error(type, result, average.mean)), std::ldexp(1.0, -12));
  EXPECT_EQ(job_->gpu().counts(0).launches, 2) << "one packs, divides in fp32, and one unpacks";
  EXPECT_EQ(job_->nccl().counts(0).reductions,
            (std::vector<nccl::Reduction>{nccl::Reduction::kSum}));
  job_->expect_no_faults();
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, DevicePartsAverageTest,
    ::testing::Values(std::pair(DataType::kBFloat16, 3), std::pair(DataType::kBFloat16, 6),
                      std::pair(DataType::kFloat16, 3), std::pair(DataType::kFloat16, 6)),
    [](const auto& test) {
      return std::string(to_string(test.param.first)) + "By" + std::to_string(test.param.second);
    });

}  // namespace
}  // namespace hvd::testing
