// What any thread may touch of an engine, its outstanding operations and its sense of time.
#include "engine/operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/peers.h"
#include "hvd/error.h"
#include "support/contracts.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using runtime::EngineFront;
using runtime::OperationPtr;
using runtime::OperationState;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

OperationPtr operation(const std::string& name, int process_set = 0, bool calls_back = false) {
  Submission submission;
  submission.name = name;
  if (calls_back) submission.on_done = [](const Status&, const EventPtr&) {};
  wire::Request request;
  request.name = name;
  request.process_set = process_set;
  return OperationPtr(new OperationState(submission, request, {}, {}));
}

std::vector<std::string> names(const std::vector<OperationPtr>& operations) {
  std::vector<std::string> result;
  for (const OperationPtr& one : operations) result.push_back(one->request.name);
  return result;
}

TEST(EngineFront, OperationsAreTakenOnceInTheirOrder) {
  EngineFront front{control::ProcessSetTable(2)};
  EXPECT_FALSE(front.has_submissions());
  const std::vector<OperationPtr> first{operation("a"), operation("b")}, second{operation("c")};
  front.enqueue(first);
  front.enqueue(second);
  EXPECT_TRUE(front.has_submissions());
  EXPECT_THAT(names(front.submissions()), ElementsAre("a", "b", "c"));
  std::vector<OperationPtr> taken;
  front.take(taken, EngineFront::Callbacks::kAll);
  EXPECT_THAT(names(taken), ElementsAre("a", "b", "c"));
  EXPECT_FALSE(front.has_submissions());
  std::vector<OperationPtr> again;
  front.take(again, EngineFront::Callbacks::kAll);
  EXPECT_THAT(names(again), IsEmpty());
}

TEST(EngineFront, WithoutCallbacksNothingIsTakenWhileOneIsAmongThem) {
  EngineFront front{control::ProcessSetTable(2)};
  const std::vector<OperationPtr> quiet{operation("a")}, calling{operation("b", 0, true)};
  std::vector<OperationPtr> taken;
  front.enqueue(quiet);
  front.take(taken, EngineFront::Callbacks::kNone);
  EXPECT_THAT(names(taken), ElementsAre("a"));
  taken.clear();
  front.enqueue(calling);
  front.enqueue(quiet);
  front.take(taken, EngineFront::Callbacks::kNone);
  EXPECT_THAT(names(taken), IsEmpty());
  EXPECT_TRUE(front.has_submissions()) << "somebody else is to take them";
  front.take(taken, EngineFront::Callbacks::kAll);
  EXPECT_THAT(names(taken), ElementsAre("b", "a"));
  taken.clear();
  front.enqueue(quiet);
  front.take(taken, EngineFront::Callbacks::kNone);
  EXPECT_THAT(names(taken), ElementsAre("a")) << "the one with a callback has gone";
}

TEST(EngineFront, OfSeveralFailuresFromOutsideTheFirstCounts) {
  EngineFront front{control::ProcessSetTable(2)};
  EXPECT_FALSE(front.outside_failure().has_value());
  front.fail_from_outside({StatusCode::kInternal, "first", 1});
  front.fail_from_outside({StatusCode::kInternal, "second", 0});
  ASSERT_TRUE(front.outside_failure().has_value());
  EXPECT_EQ(front.outside_failure()->message, "first");
  EXPECT_FALSE(front.failed()) << "the engine has not acted on it yet";
  front.set_failed({StatusCode::kPeerLost, "lost", 1});
  EXPECT_TRUE(front.failed());
  EXPECT_EQ(front.failure().message, "lost");
}

TEST(EngineFront, ARequestForTheStateIsTakenOnce) {
  EngineFront front{control::ProcessSetTable(2)};
  EXPECT_FALSE(front.take_dump_request());
  front.request_state_dump();
  EXPECT_TRUE(front.take_dump_request());
  EXPECT_FALSE(front.take_dump_request());
}

TEST(StepTime, LeavesOutWhatTheProcessWasStoppedFor) {
  VirtualClock clock;
  const TimePoint start = clock.now();
  runtime::StepTime time(clock, seconds(1));
  clock.advance(seconds(2));  // a long sleep, but not twice as long as the longest
  EXPECT_EQ(time.step(), start) << "no step has begun since";
  time.begin_step();
  EXPECT_EQ(time.step(), start + seconds(2));
  EXPECT_EQ(time.awake(), clock.now());
  clock.advance(seconds(10));
  time.begin_step();
  EXPECT_EQ(time.awake(), start + seconds(3)) << "one second may have been sleep";
  EXPECT_EQ(time.awake(time.step()), time.awake());
  EXPECT_EQ(time.on_the_clock(time.awake()), clock.now());
}

TEST(EngineFrontDeathTest, HasACauseOnceItHasFailed) {
  EngineFront front{control::ProcessSetTable(2)};
  EXPECT_BROKEN_CONTRACT(static_cast<void>(front.failure()), "the engine has failed");
  front.set_failed({StatusCode::kInternal, "it broke", -1});
  EXPECT_EQ(front.failure().message, "it broke");
}

TEST(OperationStateDeathTest, SaysHowItEndedOnceItHas) {
  const OperationPtr waiting = operation("a");
  EXPECT_BROKEN_CONTRACT(static_cast<void>(waiting->status()), "the operation has ended");
  waiting->finish({}, nullptr);
  EXPECT_TRUE(waiting->status().ok());
}

}  // namespace
}  // namespace hvd::testing
