// The queue of submissions and the state of an operation.
#include "engine/operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "hvd/error.h"
#include "support/contracts.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using runtime::OperationPtr;
using runtime::OperationState;
using runtime::SubmissionQueue;
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

void enqueue(SubmissionQueue& queue, std::vector<OperationPtr> operations) {
  queue.enqueue(operations);
}

std::vector<std::string> names(const std::vector<OperationPtr>& operations) {
  std::vector<std::string> result;
  for (const OperationPtr& one : operations) result.push_back(one->request.name);
  return result;
}

TEST(SubmissionQueue, OperationsArePoppedOnceInTheirOrder) {
  SubmissionQueue queue{control::ProcessSetTable(2)};
  EXPECT_FALSE(queue.has_submissions());
  const std::vector<OperationPtr> first{operation("a"), operation("b")}, second{operation("c")};
  enqueue(queue, first);
  enqueue(queue, second);
  EXPECT_TRUE(queue.has_submissions());
  EXPECT_THAT(names(queue.queued()), ElementsAre("a", "b", "c"));
  std::vector<OperationPtr> taken;
  queue.pop_all(taken, SubmissionQueue::Callbacks::kAll);
  EXPECT_THAT(names(taken), ElementsAre("a", "b", "c"));
  EXPECT_FALSE(queue.has_submissions());
  std::vector<OperationPtr> again;
  queue.pop_all(again, SubmissionQueue::Callbacks::kAll);
  EXPECT_THAT(names(again), IsEmpty());
}

TEST(SubmissionQueue, WithoutCallbacksNoOperationIsPoppedWhileOneHasACallback) {
  SubmissionQueue queue{control::ProcessSetTable(2)};
  const std::vector<OperationPtr> quiet{operation("a")}, calling{operation("b", 0, true)};
  std::vector<OperationPtr> taken;
  enqueue(queue, quiet);
  queue.pop_all(taken, SubmissionQueue::Callbacks::kNone);
  EXPECT_THAT(names(taken), ElementsAre("a"));
  taken.clear();
  enqueue(queue, calling);
  enqueue(queue, quiet);
  queue.pop_all(taken, SubmissionQueue::Callbacks::kNone);
  EXPECT_THAT(names(taken), IsEmpty());
  EXPECT_TRUE(queue.has_submissions()) << "another driver must pop them";
  queue.pop_all(taken, SubmissionQueue::Callbacks::kAll);
  EXPECT_THAT(names(taken), ElementsAre("b", "a"));
  taken.clear();
  enqueue(queue, quiet);
  queue.pop_all(taken, SubmissionQueue::Callbacks::kNone);
  EXPECT_THAT(names(taken), ElementsAre("a"))
      << "the operation with a callback is no longer queued";
}

TEST(SubmissionQueue, EmptyPlacesAreIgnoredAndWhatIsLeftIsReleased) {
  const OperationPtr left = operation("left");
  left->finish({}, nullptr);
  {
    SubmissionQueue queue{control::ProcessSetTable(2)};
    enqueue(queue, {OperationPtr()});
    EXPECT_FALSE(queue.has_submissions());
    enqueue(queue, {OperationPtr(), operation("a"), OperationPtr(), left});
    EXPECT_THAT(names(queue.queued()), ElementsAre("a", "left"));
  }
  EXPECT_EQ(left->request.name, "left");
}

TEST(SubmissionQueue, ThreadsEnqueueWhileOnePops) {
  constexpr int kThreads = 3, kEach = 2000;
  SubmissionQueue queue{control::ProcessSetTable(2)};
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&queue, thread] {
      for (int i = 0; i < kEach; i += 2) {
        enqueue(queue,
                {operation(std::to_string(thread), i), operation(std::to_string(thread), i + 1)});
      }
    });
  }
  std::array<int, kThreads> next = {};
  for (int popped = 0; popped < kThreads * kEach;) {
    std::vector<OperationPtr> taken;
    queue.pop_all(taken, SubmissionQueue::Callbacks::kNone);
    for (const OperationPtr& one : taken) {
      const auto thread = static_cast<std::size_t>(std::stoi(one->request.name));
      ASSERT_EQ(one->request.process_set, next[thread]++) << "of thread " << thread;
    }
    popped += static_cast<int>(taken.size());
    if (taken.empty()) std::this_thread::yield();
  }
}

TEST(SubmissionQueue, OfSeveralFailuresFromOutsideTheFirstCounts) {
  SubmissionQueue queue{control::ProcessSetTable(2)};
  EXPECT_FALSE(queue.outside_failure().has_value());
  queue.fail_from_outside({StatusCode::kInternal, "first", 1});
  queue.fail_from_outside({StatusCode::kInternal, "second", 0});
  ASSERT_TRUE(queue.outside_failure().has_value());
  EXPECT_EQ(queue.outside_failure()->message, "first");
  EXPECT_FALSE(queue.failed()) << "the engine has not acted on it yet";
  queue.set_failed({StatusCode::kPeerLost, "lost", 1});
  EXPECT_TRUE(queue.failed());
  EXPECT_EQ(queue.failure().message, "lost");
}

TEST(SubmissionQueue, ARequestForTheStateIsConsumedOnce) {
  SubmissionQueue queue{control::ProcessSetTable(2)};
  EXPECT_FALSE(queue.consume_dump_request());
  queue.request_state_dump();
  EXPECT_TRUE(queue.consume_dump_request());
  EXPECT_FALSE(queue.consume_dump_request());
}

TEST(SubmissionQueueDeathTest, HasACauseOnceItHasFailed) {
  SubmissionQueue queue{control::ProcessSetTable(2)};
  EXPECT_BROKEN_CONTRACT(static_cast<void>(queue.failure()), "the engine has failed");
  queue.set_failed({StatusCode::kInternal, "it broke", -1});
  EXPECT_EQ(queue.failure().message, "it broke");
}

TEST(OperationStateDeathTest, HasAStatusOnceItHasEnded) {
  const OperationPtr waiting = operation("a");
  EXPECT_BROKEN_CONTRACT(static_cast<void>(waiting->status()), "the operation has ended");
  waiting->finish({}, nullptr);
  EXPECT_TRUE(waiting->status().ok());
}

}  // namespace
}  // namespace hvd::testing
