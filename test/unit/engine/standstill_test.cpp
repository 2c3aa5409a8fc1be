// Collectives under way whose messages do not arrive, although the ranks answer each other. Single
// thread, virtual time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "backend/flat/flat_backend.h"
#include "support/fake_carrier.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Two ranks on two hosts. The control plane is the local one, and data travels over a network that
/// the tests stall.
class StandstillTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kElements = 4096;
  void start(Duration limit) {
    control_ = LocalNetwork::create({.size = 2, .host_per_rank = {"a", "b"}}, clock_);
    LocalJobOptions options;
    options.runtime.background_thread = false;
    options.runtime.stall_warning = limit;
    options.runtime.stall_shutdown = limit;
    options.world = [this](int rank) {
      const flat::FlatTuning tuning{.slice_bytes = 1024, .windows = 1, .direct_bytes = 0};
      return RankWorld{control_->plane(rank),
                       {std::make_shared<flat::FlatBackend>(data_network_->carrier(rank), tuning)}};
    };
    job_ = std::make_unique<LocalJob>(options, clock_);
  }
  Operation allreduce(int rank) {
    std::vector<float>& data = data_[static_cast<std::size_t>(rank)];
    data.assign(kElements, static_cast<float>(rank + 1));
    return submit_one(job_->rank(rank), float_operation(data, "x"));
  }
  static bool over(const std::vector<Operation>& operations) {
    return std::all_of(operations.begin(), operations.end(),
                       [](const Operation& operation) { return operation.done(); });
  }
  bool run(const std::vector<Operation>& operations) {
    return job_->run_until(clock_, seconds(1), [&] { return over(operations); });
  }
  /// Advances the time in steps that are too short for a rank to seem stopped.
  void pass(Duration time, const std::vector<Operation>& until = {}) {
    const TimePoint end = clock_.now() + time;
    while (clock_.now() < end && (until.empty() || !over(until))) {
      clock_.advance(std::min<Duration>(seconds(2), end - clock_.now()));
      for (int round = 0; round < 20; ++round) job_->step_all();
    }
  }
  static void expect_ok(const std::vector<Operation>& operations) {
    for (const Operation& operation : operations) {
      ASSERT_TRUE(operation.done());
      EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    }
  }
  /// Runs until the ranks repeat "x" without plans.
  void repeat() {
    for (int step = 0; step < 20; ++step) ASSERT_TRUE(run({allreduce(0), allreduce(1)}));
    ASSERT_GT(job_->rank(0).metrics().locked_operations, 0U);
  }

  VirtualClock clock_;
  std::shared_ptr<LocalNetwork> control_;
  std::shared_ptr<FakeNetwork> data_network_ = FakeNetwork::create(2);
  std::unique_ptr<LocalJob> job_;
  std::vector<std::vector<float>> data_ = std::vector<std::vector<float>>(2);
};

TEST_F(StandstillTest, AConnectionThatDoesNotDeliverEndsTheJobAndBothRanksAreNamed) {
  for (const bool replayed : {false, true}) {
    start(minutes(10));
    if (replayed) repeat();
    data_network_->stalled = true;
    const std::vector<Operation> operations{allreduce(0), allreduce(1)};
    pass(minutes(9), operations);
    EXPECT_FALSE(over(operations));
    pass(minutes(2), operations);
    ASSERT_TRUE(over(operations)) << "the ranks wait forever";
    for (const Operation& operation : operations) {
      EXPECT_EQ(operation.status().code, StatusCode::kPeerLost);
      EXPECT_EQ(operation.status().rank, -1);
      EXPECT_THAT(operation.status().message,
                  AllOf(HasSubstr("allreduce 'x'"), HasSubstr("rank 0 (host a)"),
                        HasSubstr("rank 1 (host b)"), HasSubstr("HVD_STALL_SHUTDOWN")));
    }
    data_network_->stalled = false;
  }
}

TEST_F(StandstillTest, AConnectionThatIsSlowIsNoFailure) {
  start(minutes(10));
  const std::vector<Operation> operations{allreduce(0), allreduce(1)};
  int pieces = 0;
  for (; pieces < 100 && !over(operations); ++pieces) {
    data_network_->stalled = true;
    pass(minutes(9), operations);
    data_network_->stalled = false;
    for (const int rank : {0, 1}) job_->rank(rank).step();
  }
  expect_ok(operations);
  EXPECT_GE(pieces, 3) << "it has to take longer than the limit";
}

// The late rank computes or saves a checkpoint, while the other rank waits for its own submissions.
TEST_F(StandstillTest, ARankThatSubmitsAnHourLaterInARepeatedStepIsNotLost) {
  start(hours(2));
  repeat();
  std::vector<Operation> operations{allreduce(0)};
  pass(hours(1));
  EXPECT_FALSE(operations[0].done());
  data_network_->stalled = true;
  operations.push_back(allreduce(1));
  pass(minutes(90));
  EXPECT_FALSE(over(operations)) << "two and a half hours after the first rank submitted it";
  data_network_->stalled = false;
  ASSERT_TRUE(run(operations));
  expect_ok(operations);
  EXPECT_EQ(data_[0][kElements - 1], 3.0F);
}

TEST_F(StandstillTest, WithoutALimitARankWaitsForEver) {
  start(Duration::zero());
  data_network_->stalled = true;
  const std::vector<Operation> operations{allreduce(0), allreduce(1)};
  pass(hours(3), operations);
  EXPECT_FALSE(over(operations));
  data_network_->stalled = false;
  ASSERT_TRUE(run(operations));
  expect_ok(operations);
}

}  // namespace
}  // namespace hvd::testing
