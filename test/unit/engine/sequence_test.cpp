// Unnamed operations that are numbered together with those of other kinds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include "support/job_helpers.h"
#include "support/stepped_ranks.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class Sequence : public ::testing::Test {
 protected:
  Operation call(int rank, OpKind kind = OpKind::kAllreduce) {
    Submission submission = float_operation(data_.at(static_cast<std::size_t>(rank)), "", kind);
    submission.in_sequence = true;
    return submit_one(job_.rank(rank), std::move(submission));
  }
  // For longer than a rank waits before it leaves a replay.
  bool run(const std::vector<Operation>& operations) {
    return job_.run_until(clock_, seconds(5), [&] {
      return std::ranges::all_of(operations, [](const Operation& one) { return one.done(); });
    });
  }
  void expect_mismatch(const std::vector<Operation>& operations) {
    ASSERT_TRUE(run(operations)) << "the ranks wait for each other";
    for (const Operation& one : operations) {
      EXPECT_EQ(one.status().code, StatusCode::kMismatch) << one.status().message;
      EXPECT_THAT(one.status().message,
                  HasSubstr("kind of operation differs: rank 0 allreduce, rank 1 broadcast"));
    }
  }

  VirtualClock clock_;
  LocalJob job_{stepped(3), clock_};
  std::array<std::vector<float>, 3> data_ = {{{1}, {2}, {4}}};
};

TEST_F(Sequence, DifferentKindsAreAMismatch) {
  expect_mismatch({call(0), call(1, OpKind::kBroadcast), call(2)});
  const std::vector<Operation> next = {call(0), call(1), call(2)};
  ASSERT_TRUE(run(next));
  for (const Operation& one : next) EXPECT_TRUE(one.status().ok()) << one.status().message;
  EXPECT_EQ(data_[2][0], 7);
}

TEST_F(Sequence, DifferentKindsAreAMismatchAfterAReplayToo) {
  for (int step = 0; step < 20; ++step) {
    for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast})
      ASSERT_TRUE(run({call(0, kind), call(1, kind), call(2, kind)}));
  }
  ASSERT_GT(job_.rank(1).metrics().locked_operations, 0U);
  // Both kinds are in the schedule, so a rank ends the replay when it has waited for a while.
  const std::vector<Operation> operations = {call(0), call(1, OpKind::kBroadcast), call(2)};
  expect_mismatch(operations);
}

}  // namespace
}  // namespace hvd::testing
