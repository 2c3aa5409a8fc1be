#include "bootstrap/agreement.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "hvd/error.h"

namespace hvd::runtime {
namespace {

RankStatement statement(const char* gpu, int version = 23203, int may_share = 0) {
  RankStatement one;
  std::strncpy(one.gpu_bus_id, gpu, sizeof one.gpu_bus_id - 1);
  one.nccl_version = version;
  one.may_share = may_share;
  return one;
}

TEST(GpuAgreement, AGpuForEachRank) {
  const Topology topology = make_topology(0, {"a", "a", "b", "b"});
  EXPECT_TRUE(
      compare(std::vector{statement("0:1"), statement("0:2"), statement("0:1"), statement("0:2")},
              topology)
          .nccl);
}

TEST(GpuAgreement, NamesTheObstacleToNccl) {
  const Topology topology = make_topology(0, {"a", "a"});
  const auto reason = [&](const RankStatement& first, const RankStatement& second) {
    const Agreement agreement = compare(std::vector{first, second}, topology);
    EXPECT_FALSE(agreement.nccl);
    return agreement.reason;
  };
  EXPECT_EQ(reason(statement("0:1"), statement("")), "rank 1 has no GPU");
  EXPECT_EQ(reason(statement("0:1", 0), statement("0:2")), "rank 0 has no NCCL that it can use");
  EXPECT_EQ(reason(statement("0:1"), statement("0:2", 22100)),
            "rank 1 has NCCL 22100, rank 0 23203");
  EXPECT_EQ(reason(statement("0:1"), statement("0:1")), "ranks 0 and 1 share the GPU 0:1 of a");
  EXPECT_EQ(reason(statement("0:1", 23203, 1), statement("0:1")),
            "ranks 0 and 1 share the GPU 0:1 of a");
}

TEST(GpuAgreement, RanksWithDifferentHostIdsShareAGpu) {
  const Topology topology = make_topology(0, {"a", "a", "a"});
  const auto with_host = [](std::uint64_t host) {
    RankStatement one = statement("0:1");
    one.nccl_host = host;
    return one;
  };
  EXPECT_TRUE(compare(std::vector{with_host(1), with_host(2), with_host(3)}, topology).nccl);
  // NCCL refuses ranks 0 and 2, whatever rank 1 has.
  EXPECT_EQ(compare(std::vector{with_host(1), with_host(2), with_host(1)}, topology).reason,
            "ranks 0 and 2 share the GPU 0:1 of a");
  EXPECT_FALSE(compare(std::vector{with_host(1), with_host(2), statement("0:1")}, topology).nccl);
}

TEST(GpuAgreement, GpusThatNcclDoesNotUseAreReported) {
  const Topology topology = make_topology(0, {"a", "a"});
  const auto unused = [&](const RankStatement& first, const RankStatement& second) {
    return compare(std::vector{first, second}, topology).gpus_unused;
  };
  EXPECT_FALSE(unused(statement("0:1"), statement("0:2")));
  EXPECT_FALSE(unused(statement(""), statement("")));
  EXPECT_TRUE(unused(statement(""), statement("0:2")));
  EXPECT_TRUE(unused(statement("0:1"), statement("0:2", 22100)));
}

TEST(GpuAgreement, SharedGpusWhereAllHaveAllowedIt) {
  const Topology topology = make_topology(0, {"a", "a"});
  EXPECT_TRUE(
      compare(std::vector{statement("0:1", 23203, 1), statement("0:1", 23203, 1)}, topology).nccl);
}

TEST(Agreement, NamesARankThatCannotBegin) {
  const Topology topology = make_topology(0, {"a", "b"});
  std::vector<RankStatement> statements(2);
  std::strcpy(statements[1].failure, "no such GPU");
  try {
    compare(statements, topology);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "hvd::init: rank 1 (b) could not begin: no such GPU");
  }
}

TEST(SettingsAgreement, NamesTheFirstRankThatDiffers) {
  const Topology topology = make_topology(0, {"a", "a", "b"});
  const auto error = [&](int rank, const RuntimeOptions& options) -> std::string {
    std::vector<RankStatement> statements(3, statement_of(RuntimeOptions{}));
    statements[static_cast<std::size_t>(rank)] = statement_of(options);
    try {
      compare(statements, topology);
      return "none";
    } catch (const UsageError& failure) {
      return failure.what();
    }
  };
  RuntimeOptions options;
  EXPECT_EQ(error(2, options), "none");
  options.backend = "mpi";
  EXPECT_EQ(error(2, options),
            "hvd::init: HVD_BACKEND must be the same on every rank: it is unset on rank 0 (a) and "
            "mpi on rank 2 (b); set it for all, for instance with 'hvdrun -x HVD_BACKEND=VALUE'");
  options = {};
  options.cache_capacity = 0;
  EXPECT_NE(error(2, options).find("HVD_CACHE_CAPACITY"), std::string::npos);
  options = {};
  options.control_radix = 4;
  EXPECT_NE(error(1, options).find("4 on rank 1"), std::string::npos);
}

}  // namespace
}  // namespace hvd::runtime
