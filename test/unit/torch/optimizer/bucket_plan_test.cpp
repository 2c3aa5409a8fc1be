#include "optimizer/bucket_plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace hvd::libtorch {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

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

TEST(BucketPlan, AnEighthOfAllGradientsButAtMost8MiB) {
  EXPECT_EQ(most_bucket_bytes(8000), 1000U);
  EXPECT_EQ(most_bucket_bytes(std::size_t{64} << 20), std::size_t{8} << 20);
  EXPECT_EQ(most_bucket_bytes(std::size_t{1} << 30), std::size_t{8} << 20);
}

TEST(BucketPlan, FillsBucketsInTheOrderOfArrival) {
  const auto sizes = sizes_of({64, 64, 64, 64, 64});
  const std::vector<std::size_t> order = {4, 2, 0, 1, 3};
  EXPECT_EQ(plan_buckets(order, sizes, 128), (Buckets{{4, 2}, {0, 1}, {3}}));
  EXPECT_EQ(plan_buckets(order, sizes, 1000), (Buckets{{4, 2, 0, 1, 3}}));
}

TEST(BucketPlan, CountsWhatAlignmentTakes) {
  const std::vector<std::size_t> order = {0, 1};
  EXPECT_EQ(plan_buckets(order, sizes_of({4, 64}), 127), (Buckets{{0}, {1}}));
  EXPECT_EQ(plan_buckets(order, sizes_of({4, 64}), 128), (Buckets{{0, 1}}));
}

TEST(BucketPlan, AGradientLargerThanABucketIsAloneInOne) {
  const std::vector<std::size_t> order = {0, 1, 2};
  EXPECT_EQ(plan_buckets(order, sizes_of({64, 1000, 64}), 128), (Buckets{{0}, {1}, {2}}));
  EXPECT_EQ(plan_buckets(order, sizes_of({1000, 64, 64}), 128), (Buckets{{0}, {1, 2}}));
}

TEST(BucketPlan, WhatIsNotInTheOrderIsInNoBucket) {
  EXPECT_EQ(plan_buckets(std::vector<std::size_t>{2}, sizes_of({64, 64, 64}), 128), (Buckets{{2}}));
  EXPECT_TRUE(plan_buckets({}, sizes_of({64}), 128).empty());
}

TEST(BucketPlan, ABucketIsOfOneDtypeAndDevice) {
  std::vector<GradientSize> sizes = sizes_of({64, 64, 64, 64, 64, 64});
  sizes[1].dtype = sizes[3].dtype = 1;
  sizes[4].device = 1;
  const std::vector<std::size_t> order = {0, 1, 2, 3, 4, 5};
  // Those that are full come first; what is left over, by device and dtype.
  EXPECT_EQ(plan_buckets(order, sizes, 128), (Buckets{{0, 2}, {5}, {1, 3}, {4}}));
}

}  // namespace
}  // namespace hvd::libtorch
