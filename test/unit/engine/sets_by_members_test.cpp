// Process sets that their members make alone, in whole jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/stepped_ranks.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

class SetsByMembers : public ::testing::Test {
 protected:
  bool run(const std::vector<Operation>& operations, Duration timeout = seconds(5)) {
    return job_.run_until(clock_, timeout, [&] {
      return std::ranges::all_of(operations, [](const Operation& one) { return one.done(); });
    });
  }
  Operation add(int rank, std::vector<int> ranks) {
    return submit_one(job_.rank(rank), {.parameters = AddProcessSet{std::move(ranks), true}});
  }
  Operation remove(int rank, int process_set) {
    return submit_one(job_.rank(rank), {.parameters = RemoveProcessSet{process_set}});
  }
  /// All ranks repeat an operation until they no longer negotiate it.
  void replay() {
    std::vector<float> data[3] = {{1}, {1}, {1}};
    const auto replayed = [this] { return job_.rank(2).metrics().locked_operations; };
    const std::uint64_t before = replayed();
    for (int step = 0; step < 20 && replayed() < before + 3; ++step) {
      std::vector<Operation> operations;
      for (int rank = 0; rank < 3; ++rank)
        operations.push_back(submit_one(job_.rank(rank), float_operation(data[rank], "w")));
      ASSERT_TRUE(run(operations));
    }
    ASSERT_GE(replayed(), before + 3);
  }

  VirtualClock clock_;
  LocalJob job_{stepped(3), clock_};
};

TEST_F(SetsByMembers, ARankOutsideThatIsIdleInAReplayDelaysNothing) {
  replay();
  const std::vector<Operation> added = {add(0, {0, 1}), add(1, {0, 1})};
  ASSERT_TRUE(run(added, std::chrono::milliseconds(100)));
  for (const Operation& one : added) EXPECT_EQ(one.result(), 1) << one.status().message;
  const std::vector<Operation> removed = {remove(0, 1), remove(1, 1)};
  ASSERT_TRUE(run(removed, std::chrono::milliseconds(100)));
  for (const Operation& one : removed) EXPECT_TRUE(one.status().ok()) << one.status().message;
  replay();
}

TEST_F(SetsByMembers, ARankOutsideSendsNoMessageForIt) {
  const std::uint64_t before = job_.rank(2).metrics().control_messages_sent;
  ASSERT_TRUE(run({add(0, {0, 1}), add(1, {0, 1})}));
  ASSERT_TRUE(run({remove(0, 1), remove(1, 1)}));
  EXPECT_EQ(job_.rank(2).metrics().control_messages_sent, before);
  EXPECT_EQ(job_.rank(2).metrics().plans_applied, 2U);
}

TEST_F(SetsByMembers, AMemberThatDiesEndsIt) {
  const Operation added = add(0, {0, 1});
  job_.kill(1);
  ASSERT_TRUE(run({added}, seconds(1)));
  EXPECT_EQ(added.status().code, StatusCode::kPeerLost);
  EXPECT_EQ(added.status().rank, 1);
  EXPECT_THAT(added.status().message, HasSubstr("add_process_set '[0,1]'"));
}

TEST_F(SetsByMembers, OperationsOfARemovedSetEndWithIt) {
  const std::vector<Operation> added = {add(0, {0, 1}), add(1, {0, 1})};
  ASSERT_TRUE(run(added));
  std::vector<float> data = {1};
  Submission submission = float_operation(data, "w");
  submission.process_set = 1;
  const Operation waiting = submit_one(job_.rank(0), std::move(submission));
  ASSERT_TRUE(run({remove(0, 1), remove(1, 1), waiting}));
  EXPECT_EQ(waiting.status().code, StatusCode::kUsage);
  EXPECT_THROW(remove(0, 1), UsageError);
}

}  // namespace
}  // namespace hvd::testing
