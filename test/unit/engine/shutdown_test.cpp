#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

TEST(Shutdown, EndsWhenEveryRankHasCalledItAndMayBeCalledAgain) {
  const SteadyClock clock;
  LocalJob job({.size = 3}, clock);
  job.shut_down();
  EXPECT_TRUE(job.rank(0).shutdown());
  std::vector<float> data(1);
  EXPECT_THROW(submit_one(job.rank(1), float_operation(data, "late")), ShutdownError);
}

TEST(Shutdown, OfOneRankEndsTheOthersOperationsAndNamesTheRank) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  std::vector<float> data(4, 1.0F);
  std::jthread leaving([&job] { job.rank(1).shutdown(); });
  const Operation operation = submit_one(job.rank(0), float_operation(data, "w"));
  operation.wait();
  EXPECT_THROW(operation.status().raise_if_error(), ShutdownError);
  EXPECT_THAT(operation.status().message, HasSubstr("rank 1 (localhost) has called shutdown()"));
  job.rank(0).shutdown();
}

TEST(Shutdown, TheEndOfAProcessWithoutItIsReportedAsThat) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  std::vector<float> data(4, 1.0F);
  job.rank(1).mark_ending();
  std::jthread leaving([&job] { job.rank(1).shutdown(); });
  const Operation operation = submit_one(job.rank(0), float_operation(data, "w"));
  operation.wait();
  EXPECT_THROW(operation.status().raise_if_error(), ShutdownError);
  EXPECT_THAT(operation.status().message, HasSubstr("rank 1 (localhost) ended without shutdown()"));
  job.rank(0).shutdown();
}

TEST(Shutdown, AnEndingProcessDoesNotBlameTheOthers) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  ::testing::internal::CaptureStderr();
  job.rank(1).mark_ending();
  std::jthread leaving([&job] { job.rank(1).shutdown(); });
  job.rank(0).abort(
      {StatusCode::kPeerLost,
       "lost rank 0 (host localhost): it ended with an uncaught exception: rank 1 ended", 0});
  leaving.join();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("the other ranks report this rank as lost: rank 0"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("lost rank 0"))) << "of rank 1";
}

TEST(Shutdown, OperationsInFlightAreFinishedFirst) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  std::vector<std::vector<float>> data(2, std::vector<float>(1 << 16, 2.0F));
  std::vector<Operation> operations;
  for (int rank = 0; rank < 2; ++rank)
    operations.push_back(
        submit_one(job.rank(rank), float_operation(data[static_cast<std::size_t>(rank)], "w")));
  job.shut_down();
  for (const auto& operation : operations) {
    ASSERT_TRUE(operation.done());
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  }
  EXPECT_EQ(data[1][12345], 4.0F);
}

TEST(Shutdown, WithoutTheOthersEndsAfterTheTimeout) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  EXPECT_FALSE(job.rank(0).shutdown(std::chrono::milliseconds(100)));
}

/// Two ranks. One of them has left, and its last message was lost on the way.
class LostFarewell : public ::testing::TestWithParam<int> {
 protected:
  LostFarewell()
      : job_({.size = 2, .longest_delay = std::chrono::hours(1000), .seed = 1}, clock_) {}
  int gone() const { return GetParam(); }
  runtime::Runtime& other() { return job_.rank(1 - gone()); }
  void leave() {
    EXPECT_FALSE(job_.rank(gone()).shutdown(std::chrono::milliseconds(50)));
    job_.network().kill(gone());
  }

  const SteadyClock clock_;
  LocalJob job_;
};

constexpr Duration kLongTimeout = std::chrono::minutes(10);

TEST_P(LostFarewell, DoesNotHoldUpShutdown) {
  leave();
  EXPECT_TRUE(other().shutdown(kLongTimeout));
}

TEST_P(LostFarewell, EndsTheOperationsThatNeedTheRank) {
  std::vector<float> data(4, 1.0F);
  const Operation operation = submit_one(other(), float_operation(data, "w"));
  leave();
  operation.wait();
  if (gone() == 0) {
    EXPECT_EQ(operation.status().code, StatusCode::kPeerLost);
    EXPECT_THAT(operation.status().message, HasSubstr("lost rank 0"));
  } else {
    EXPECT_EQ(operation.status().code, StatusCode::kShutdown);
    EXPECT_THAT(operation.status().message, HasSubstr("rank 1 (localhost)"));
  }
  other().shutdown(kLongTimeout);
}

INSTANTIATE_TEST_SUITE_P(Gone, LostFarewell, ::testing::Values(0, 1));

TEST(Shutdown, AHandleOutlivesItsRuntime) {
  const SteadyClock clock;
  Operation operation;
  std::vector<float> data(4, 1.0F);
  {
    LocalJob job({.size = 2}, clock);
    operation = submit_one(job.rank(0), float_operation(data, "w"));
  }
  operation.wait();
  EXPECT_EQ(operation.status().code, StatusCode::kShutdown);
}

}  // namespace
}  // namespace hvd::testing
