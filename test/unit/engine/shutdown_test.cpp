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

TEST(Shutdown, OfOneRankEndsWhatTheOthersWantFromItAndNamesIt) {
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

TEST(Shutdown, OfAProcessThatEndsWithoutItIsToldAsThat) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  std::vector<float> data(4, 1.0F);
  job.rank(1).note_ending();
  std::jthread leaving([&job] { job.rank(1).shutdown(); });
  const Operation operation = submit_one(job.rank(0), float_operation(data, "w"));
  operation.wait();
  EXPECT_THROW(operation.status().raise_if_error(), ShutdownError);
  EXPECT_THAT(operation.status().message, HasSubstr("rank 1 (localhost) ended without shutdown()"));
  job.rank(0).shutdown();
}

TEST(Shutdown, AProcessThatEndsDoesNotBlameWhomItHasBroughtDown) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  ::testing::internal::CaptureStderr();
  job.rank(1).note_ending();
  std::jthread leaving([&job] { job.rank(1).shutdown(); });
  job.rank(0).abort(
      {StatusCode::kPeerLost,
       "lost rank 0 (host localhost): it ended with an uncaught exception: rank 1 ended", 0});
  leaving.join();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("the other ranks have lost this one, rank 0"));
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

TEST(Shutdown, WithoutTheOthersEndsAfterThePatienceIsOver) {
  const SteadyClock clock;
  LocalJob job({.size = 2}, clock);
  EXPECT_FALSE(job.rank(0).shutdown(std::chrono::milliseconds(100)));
}

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
