#include "bootstrap/gpu_agreement.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace hvd::runtime {
namespace {

GpuReport report(const char* gpu, int version = 23203, int may_share = 0) {
  GpuReport one;
  std::strncpy(one.bus_id, gpu, sizeof one.bus_id - 1);
  one.nccl_version = version;
  one.may_share = may_share;
  return one;
}

TEST(GpuAgreementTest, AGpuForEachRank) {
  const Topology topology = make_topology(0, {"a", "a", "b", "b"});
  EXPECT_TRUE(agree_on_gpus(std::vector{report("0:1"), report("0:2"), report("0:1"), report("0:2")},
                            topology)
                  .nccl);
}

TEST(GpuAgreementTest, WhatKeepsNcclAwayIsSaid) {
  const Topology topology = make_topology(0, {"a", "a"});
  const auto reason = [&](const GpuReport& first, const GpuReport& second) {
    const GpuAgreement agreement = agree_on_gpus(std::vector{first, second}, topology);
    EXPECT_FALSE(agreement.nccl);
    return agreement.reason;
  };
  EXPECT_EQ(reason(report("0:1"), report("")), "rank 1 has no GPU");
  EXPECT_EQ(reason(report("0:1", 0), report("0:2")), "rank 0 has no NCCL that it can use");
  EXPECT_EQ(reason(report("0:1"), report("0:2", 22100)), "rank 1 has NCCL 22100, rank 0 23203");
  EXPECT_EQ(reason(report("0:1"), report("0:1")), "ranks 0 and 1 share the GPU 0:1 of a");
  EXPECT_EQ(reason(report("0:1", 23203, 1), report("0:1")), "ranks 0 and 1 share the GPU 0:1 of a");
}

TEST(GpuAgreementTest, RanksWithDifferentHostIdsShareAGpu) {
  const Topology topology = make_topology(0, {"a", "a", "a"});
  const auto with_host = [](std::uint64_t host) {
    GpuReport one = report("0:1");
    one.nccl_host = host;
    return one;
  };
  EXPECT_TRUE(agree_on_gpus(std::vector{with_host(1), with_host(2), with_host(3)}, topology).nccl);
  // NCCL refuses ranks 0 and 2, whatever rank 1 has.
  EXPECT_EQ(agree_on_gpus(std::vector{with_host(1), with_host(2), with_host(1)}, topology).reason,
            "ranks 0 and 2 share the GPU 0:1 of a");
  EXPECT_FALSE(
      agree_on_gpus(std::vector{with_host(1), with_host(2), report("0:1")}, topology).nccl);
}

TEST(GpuAgreementTest, GpusThatNcclDoesNotUseAreReported) {
  const Topology topology = make_topology(0, {"a", "a"});
  const auto unused = [&](const GpuReport& first, const GpuReport& second) {
    return agree_on_gpus(std::vector{first, second}, topology).gpus_unused;
  };
  EXPECT_FALSE(unused(report("0:1"), report("0:2")));
  EXPECT_FALSE(unused(report(""), report("")));
  EXPECT_TRUE(unused(report(""), report("0:2")));
  EXPECT_TRUE(unused(report("0:1"), report("0:2", 22100)));
}

TEST(GpuAgreementTest, SharedGpusWhereAllHaveAllowedIt) {
  const Topology topology = make_topology(0, {"a", "a"});
  EXPECT_TRUE(
      agree_on_gpus(std::vector{report("0:1", 23203, 1), report("0:1", 23203, 1)}, topology).nccl);
}

}  // namespace
}  // namespace hvd::runtime
