#include "reducer/bucket_plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <numeric>
#include <vector>

namespace hvd::libtorch {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::vector<GradientSize> sizes_of(const std::vector<std::size_t>& bytes) {
  std::vector<GradientSize> sizes;
  for (const std::size_t size : bytes) sizes.push_back({.bytes = size});
  return sizes;
}

TEST(BucketPlan, EachGradientIsAligned) {
  EXPECT_EQ(room_in_bucket(0), 0U);
  EXPECT_EQ(room_in_bucket(1), 64U);
  EXPECT_EQ(room_in_bucket(64), 64U);
  EXPECT_EQ(room_in_bucket(65), 128U);
}

TEST(BucketPlan, OnTheHostAnEighthOfAllGradientsButAtMost8MiB) {
  EXPECT_EQ(host_bucket_limits(8000).most, 1000U);
  EXPECT_EQ(host_bucket_limits(64 * kMiB).most, 8 * kMiB);
  EXPECT_EQ(host_bucket_limits(1024 * kMiB).most, 8 * kMiB);
  EXPECT_EQ(host_bucket_limits(1024 * kMiB).last, 0U);
}

TEST(BucketPlan, OnAGpu25MiBAndASmallOneAtTheEnd) {
  EXPECT_EQ(gpu_bucket_limits(100 * kMiB).most, 25 * kMiB);
  EXPECT_EQ(gpu_bucket_limits(10240 * kMiB).most, 25 * kMiB);
  EXPECT_EQ(gpu_bucket_limits(40 * kMiB).most, 10 * kMiB) << "a quarter, so that there are several";
  EXPECT_EQ(gpu_bucket_limits(8000).most, kMiB);
  EXPECT_EQ(gpu_bucket_limits(8000).last, kMiB);
  EXPECT_EQ(gpu_bucket_limits(10240 * kMiB).last, kMiB);
}

TEST(BucketPlan, HasTheSizeThatTheProgramSets) {
  EXPECT_EQ(host_bucket_limits(1024 * kMiB, 3000).most, 3000U);
  EXPECT_EQ(host_bucket_limits(8000, 64 * kMiB).most, 64 * kMiB);
  EXPECT_EQ(gpu_bucket_limits(1024 * kMiB, 64 * kMiB).most, 64 * kMiB);
  EXPECT_EQ(gpu_bucket_limits(1024 * kMiB, 64 * kMiB).last, kMiB);
  EXPECT_EQ(gpu_bucket_limits(1024 * kMiB, 3000).last, 3000U);
}

TEST(BucketPlan, OfAGpusBucketsTheLastIsSmall) {
  // Gradients of 512 KiB, 300 of them: 150 MiB.
  const auto sizes = sizes_of(std::vector<std::size_t>(300, kMiB / 2));
  std::vector<std::size_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  const Buckets buckets = plan_buckets(order, sizes, gpu_bucket_limits(150 * kMiB));
  ASSERT_EQ(buckets.size(), 7U);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(buckets[i].size(), 50U) << i;
  EXPECT_EQ(buckets[5].size(), 48U);
  EXPECT_EQ(buckets[6], (std::vector<std::size_t>{1, 0}));
}

TEST(BucketPlan, TheLastGradientIsAloneIfItIsLargerThanTheLastBucket) {
  const auto sizes = sizes_of({64, 64, 256, 1000});
  const std::vector<std::size_t> order = {0, 1, 2, 3};
  EXPECT_EQ(plan_buckets(order, sizes, {.most = 2000, .last = 128}), (Buckets{{0, 1, 2}, {3}}));
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{3, 2, 1, 0}, sizes, {.most = 2000, .last = 128}),
            (Buckets{{3, 2}, {1, 0}}));
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{3, 1, 2, 0}, sizes, {.most = 2000, .last = 128}),
            (Buckets{{3, 1, 2}, {0}}))
      << "only gradients after the one that does not fit are in the last bucket";
  EXPECT_EQ(plan_buckets(order, sizes, {.most = 2000, .last = 2000}), (Buckets{{0, 1, 2, 3}}));
}

TEST(BucketPlan, EachDtypeHasALastBucket) {
  std::vector<GradientSize> sizes = sizes_of({64, 64, 64, 64, 64, 64});
  sizes[1].dtype = sizes[3].dtype = sizes[5].dtype = 1;
  const std::vector<std::size_t> order = {0, 1, 2, 3, 4, 5};
  EXPECT_EQ(plan_buckets(order, sizes, {.most = 1000, .last = 64}),
            (Buckets{{0, 2}, {1, 3}, {4}, {5}}));
}

TEST(BucketPlan, FillsBucketsInTheOrderOfArrival) {
  const auto sizes = sizes_of({64, 64, 64, 64, 64});
  const std::vector<std::size_t> order = {4, 2, 0, 1, 3};
  EXPECT_EQ(plan_buckets(order, sizes, {.most = 128}), (Buckets{{4, 2}, {0, 1}, {3}}));
  EXPECT_EQ(plan_buckets(order, sizes, {.most = 1000}), (Buckets{{4, 2, 0, 1, 3}}));
}

TEST(BucketPlan, CountsWhatAlignmentTakes) {
  const std::vector<std::size_t> order = {0, 1};
  EXPECT_EQ(plan_buckets(order, sizes_of({4, 64}), {.most = 127}), (Buckets{{0}, {1}}));
  EXPECT_EQ(plan_buckets(order, sizes_of({4, 64}), {.most = 128}), (Buckets{{0, 1}}));
}

TEST(BucketPlan, AGradientLargerThanABucketIsAloneInOne) {
  const std::vector<std::size_t> order = {0, 1, 2};
  EXPECT_EQ(plan_buckets(order, sizes_of({64, 1000, 64}), {.most = 128}), (Buckets{{0}, {1}, {2}}));
  EXPECT_EQ(plan_buckets(order, sizes_of({1000, 64, 64}), {.most = 128}), (Buckets{{0}, {1, 2}}));
}

TEST(BucketPlan, ParametersOutsideOfTheOrderAreInNoBucket) {
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{2}, sizes_of({64, 64, 64}), {.most = 128}),
            (Buckets{{2}}));
  EXPECT_TRUE(plan_buckets({}, sizes_of({64}), {.most = 128}).empty());
}

TEST(BucketPlan, ABucketIsOfOneDtypeAndDevice) {
  std::vector<GradientSize> sizes = sizes_of({64, 64, 64, 64, 64, 64});
  sizes[1].dtype = sizes[3].dtype = 1;
  sizes[4].device = 1;
  const std::vector<std::size_t> order = {0, 1, 2, 3, 4, 5};
  // Full buckets come first, then the rest by device and dtype.
  EXPECT_EQ(plan_buckets(order, sizes, {.most = 128}), (Buckets{{0, 2}, {5}, {1, 3}, {4}}));
}

}  // namespace
}  // namespace hvd::libtorch
