// The runtime over a deep aggregation tree. Single thread, virtual time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "negotiation/tree.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanks = 14;
constexpr int kRadix = 2;

class RuntimeTreeTest : public ::testing::Test {
 protected:
  RuntimeTreeTest() : data_(kRanks, std::vector<float>(8, 1.0F)) {
    LocalJobOptions options;
    options.size = kRanks;
    options.runtime.background_thread = false;
    options.runtime.control_radix = kRadix;
    options.runtime.schedule_lock = false;  // or there would soon be no messages to count
    options.runtime.peer_timeout = seconds(3);
    options.runtime.stall_warning = seconds(4);
    options.runtime.stall_shutdown = seconds(8);
    options.longest_delay = milliseconds(1);
    for (int rank = 0; rank < kRanks; ++rank)
      options.hosts.push_back("host" + std::to_string(rank / 2));
    topology_ = make_topology(0, options.hosts);
    job_ = std::make_unique<LocalJob>(options, clock_);
  }
  Operation allreduce(int rank, const std::string& name) {
    return submit_one(job_->rank(rank),
                      float_operation(data_[static_cast<std::size_t>(rank)], name));
  }
  std::vector<Operation> allreduce_all(const std::string& name, int but = -1) {
    std::vector<Operation> operations;
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank != but) operations.push_back(allreduce(rank, name));
    }
    return operations;
  }
  bool run(const std::vector<Operation>& operations, Duration timeout = seconds(60)) {
    return job_->run_until(clock_, timeout, [&] {
      return std::all_of(operations.begin(), operations.end(),
                         [](const Operation& o) { return o.done(); });
    });
  }
  std::uint64_t sent(int rank) { return job_->rank(rank).metrics().control_messages_sent; }
  int children(int rank) const {
    return static_cast<int>(control::place_in_tree(topology_, rank, kRadix).children.size());
  }

  VirtualClock clock_;
  Topology topology_;
  std::unique_ptr<LocalJob> job_;
  std::vector<std::vector<float>> data_;
};

// A message up from each rank, and a plan to each child; rank 0 has no parent.
TEST_F(RuntimeTreeTest, AnOrdinaryRoundIsOneMessageUpAndOnePlanToEachChild) {
  for (int round = 0; round < 4; ++round) {
    std::vector<std::uint64_t> before;
    for (int rank = 0; rank < kRanks; ++rank) before.push_back(sent(rank));
    ASSERT_TRUE(run(allreduce_all("w"), milliseconds(100)));
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(sent(rank) - before[static_cast<std::size_t>(rank)],
                1u + static_cast<std::uint64_t>(children(rank)))
          << "rank " << rank;
    }
  }
}

TEST_F(RuntimeTreeTest, AStallIsReportedAndEndsWithTheMissingRank) {
  ASSERT_TRUE(run(allreduce_all("w")));
  const int late = 9;
  const auto waiting = allreduce_all("w", late);
  EXPECT_FALSE(run(waiting, seconds(7)));
  EXPECT_EQ(job_->rank(0).metrics().stalls, 1u);
  ASSERT_TRUE(run(waiting, seconds(3)));
  for (const auto& operation : waiting) {
    EXPECT_EQ(operation.status().code, StatusCode::kStalled);
    EXPECT_THAT(operation.status().message,
                AllOf(HasSubstr("missing: rank 9 (host4)"), Not(HasSubstr("rank 8 "))));
  }
  const Operation too_late = allreduce(late, "w");
  ASSERT_TRUE(run({too_late}, seconds(1)));
  EXPECT_EQ(too_late.status().code, StatusCode::kStalled);
  const auto next = allreduce_all("w");
  ASSERT_TRUE(run(next, seconds(1)));
  for (const auto& operation : next)
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

TEST_F(RuntimeTreeTest, ALateRankDelaysItsOwnOperationOnly) {
  ASSERT_TRUE(run(allreduce_all("slow")));
  ASSERT_TRUE(run(allreduce_all("quick")));
  const auto slow = allreduce_all("slow", kRanks - 1);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(run(allreduce_all("quick"), milliseconds(100)));
  EXPECT_FALSE(run(slow, seconds(3)));
  std::vector<Operation> all = slow;
  all.push_back(allreduce(kRanks - 1, "slow"));
  ASSERT_TRUE(run(all, milliseconds(100)));
  for (const auto& operation : all) EXPECT_TRUE(operation.status().ok());
}

TEST_F(RuntimeTreeTest, TheDeathOfAnInnerRankEndsTheJobWithItsName) {
  ASSERT_TRUE(run(allreduce_all("w")));
  const int dead = 2;
  ASSERT_GT(children(dead), 0);
  const auto waiting = allreduce_all("w", dead);
  job_->kill(dead);
  ASSERT_TRUE(run(waiting, seconds(4)));
  for (const auto& operation : waiting) {
    EXPECT_EQ(operation.status().code, StatusCode::kPeerLost);
    EXPECT_EQ(operation.status().rank, dead);
  }
}

}  // namespace
}  // namespace hvd::testing
