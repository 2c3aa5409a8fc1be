// An engine without a runtime: the order of actions in a step, and the work that is left for the
// next one. The test plays some of the other ranks.
#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "support/local_backend.h"
#include "support/local_job.h"
#include "transport/control_plane.h"

namespace hvd::testing {
namespace {

using runtime::Engine;
using runtime::OperationPtr;
using runtime::OperationState;
using runtime::RuntimeOptions;
using std::chrono::microseconds;
using ::testing::ElementsAre;

class EngineTest : public ::testing::Test {
 protected:
  void make(std::vector<std::string> hosts) {
    const int size = static_cast<int>(hosts.size());
    network_ = LocalNetwork::create({.size = size, .host_per_rank = std::move(hosts)}, clock_);
    world_ = std::make_shared<LocalWorld>(size);
  }
  std::unique_ptr<Engine> engine(int rank) {
    return std::make_unique<Engine>(RuntimeOptions{},
                                    runtime::EngineParts{network_->plane(rank),
                                                         {std::make_shared<LocalBackend>(world_)},
                                                         clock_,
                                                         counters_,
                                                         timeline_});
  }
  OperationPtr submit(Engine& engine, const std::string& name) {
    wire::Request request;
    request.name = name;
    request.shape = {4};
    return enqueue(engine, request);
  }
  static void enqueue(Engine& engine, OperationPtr operation) {
    engine.submission_queue().enqueue({&operation, 1});
  }
  OperationPtr enqueue(Engine& engine, const wire::Request& request) {
    Submission submission;
    submission.name = request.name;
    submission.input = {reinterpret_cast<std::byte*>(data_), 4, DataType::kFloat32, {}, {4}};
    submission.output = submission.input;
    const OperationPtr operation(new OperationState(submission, request, {}, clock_.now()));
    enqueue(engine, operation);
    return operation;
  }
  bool step(Engine& engine) {
    clock_.advance(microseconds(1));
    return engine.step();
  }
  std::vector<std::string> kinds(control::ControlPlane& plane) {
    std::vector<std::string> result;
    clock_.advance(microseconds(1));
    while (const auto message = plane.poll()) {
      const wire::AnyMessage decoded = wire::decode(message->bytes);
      result.push_back(std::holds_alternative<wire::Report>(decoded)         ? "report"
                       : std::holds_alternative<wire::ReplayUpdate>(decoded) ? "update"
                                                                             : "other");
    }
    return result;
  }

  VirtualClock clock_;
  observe::Counters counters_;
  runtime::CurrentTimeline timeline_;
  std::shared_ptr<LocalNetwork> network_;
  std::shared_ptr<LocalWorld> world_;
  float data_[4] = {1, 2, 3, 4};
};

// No doorbell rings for the plan, so the driver must not sleep.
TEST_F(EngineTest, RankZerosOwnPlanIsWorkLeftUntilTheNextStep) {
  make({"a"});
  const auto alone = engine(0);
  EXPECT_FALSE(alone->transferring());
  const OperationPtr operation = submit(*alone, "x");
  EXPECT_TRUE(step(*alone));
  EXPECT_FALSE(operation->done());
  EXPECT_TRUE(alone->transferring());
  EXPECT_TRUE(alone->needs_polling());
  EXPECT_TRUE(step(*alone));
  EXPECT_TRUE(operation->done());
  EXPECT_FALSE(alone->transferring());
  EXPECT_FALSE(step(*alone));
  EXPECT_EQ(counters_.control_messages_sent.load(), 2U);
  EXPECT_EQ(counters_.control_messages_received.load(), 2U);
  EXPECT_EQ(counters_.control_bytes_sent.load(), 0U) << "there is no other rank";
}

// Packing and unpacking a large batch must not delay a decision.
TEST_F(EngineTest, RankZeroDecidesWhileALargeBatchMoves) {
  make({"a"});
  const auto alone = engine(0);
  constexpr std::int64_t kCount = 4 << 20;
  std::vector<float> values(kCount, 1.0F);
  wire::Request large;
  large.name = "large";
  large.shape = {kCount};
  large.compression = Compression::kBFloat16;  // so it goes through a buffer
  Submission submission;
  submission.name = large.name;
  submission.input = {
      reinterpret_cast<std::byte*>(values.data()), kCount, DataType::kFloat32, {}, {kCount}};
  submission.output = submission.input;
  const OperationPtr moved(new OperationState(submission, large, {}, clock_.now()));
  enqueue(*alone, moved);
  for (int steps = 0; steps < 3; ++steps) step(*alone);
  wire::Request small;
  small.name = "small";
  small.kind = OpKind::kBarrier;
  Submission nothing;
  nothing.name = small.name;
  const OperationPtr decided(new OperationState(nothing, small, {}, clock_.now()));
  enqueue(*alone, decided);
  int steps = 0;
  for (; !decided->done() && steps < 1000; ++steps)
    EXPECT_TRUE(step(*alone)) << "sleeps in between";
  EXPECT_LE(steps, 3);
  EXPECT_FALSE(moved->done());
  while (!moved->done() && steps < 1000) {
    EXPECT_TRUE(step(*alone));
    ++steps;
  }
  EXPECT_TRUE(moved->done());
  EXPECT_GE(steps, 16) << "of at most 1 MiB each";
}

TEST_F(EngineTest, AFailureLeavesNoPlanToPollFor) {
  make({"a"});
  const auto alone = engine(0);
  const OperationPtr operation = submit(*alone, "x");
  step(*alone);
  alone->submission_queue().fail_from_outside({StatusCode::kInternal, "broken", -1});
  while (step(*alone)) {
  }
  EXPECT_TRUE(operation->done());
  EXPECT_EQ(operation->status().message, "broken");
  EXPECT_FALSE(alone->transferring());
}

TEST_F(EngineTest, AfterShortReplaysTheNextOneBeginsLater) {
  make({"a"});
  const auto alone = engine(0);
  const auto run = [&](const std::string& name) {
    const OperationPtr operation = submit(*alone, name);
    for (int i = 0; i < 9 && !operation->done(); ++i) step(*alone);
    return operation->done();
  };
  const auto repeats = [&] { return alone->state_text().find("replaying") != std::string::npos; };
  std::vector<int> steps;
  for (int schedule = 0; schedule < 5; ++schedule) {
    for (steps.push_back(0); !repeats(); ++steps.back()) {
      ASSERT_LT(steps.back(), 50);
      ASSERT_TRUE(run("x"));
    }
    ASSERT_TRUE(run("y"));
  }
  EXPECT_GT(steps.back(), steps[1] + 2) << "the coordinator learns from the replays that were left";
}

TEST_F(EngineTest, OperationsBegunWithAFailingSubmissionEndWithTheCause) {
  make({"a"});
  const auto alone = engine(0);
  const std::vector<OperationPtr> operations{submit(*alone, "x"), submit(*alone, "x"),
                                             submit(*alone, "y")};
  step(*alone);
  EXPECT_TRUE(alone->submission_queue().failed());
  for (const OperationPtr& operation : operations) {
    ASSERT_TRUE(operation->done()) << operation->request.name << " hangs";
    EXPECT_THAT(operation->status().message, ::testing::HasSubstr("while it is in flight"));
  }
}

/// A control plane whose poll() calls the test first.
class BreakingPlane final : public control::ControlPlane {
 public:
  BreakingPlane(std::unique_ptr<control::ControlPlane> inner, std::function<void()> before_poll)
      : inner_(std::move(inner)), before_poll_(std::move(before_poll)) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  void ring(int rank) noexcept override { inner_->ring(rank); }
  const Topology& topology() const noexcept override { return inner_->topology(); }
  void send(int rank, std::span<const std::byte> message) override { inner_->send(rank, message); }
  void send(std::span<const int> ranks, std::span<const std::byte> message) override {
    inner_->send(ranks, message);
  }
  std::optional<control::Message> poll() override {
    before_poll_();
    return inner_->poll();
  }
  bool busy() const noexcept override { return inner_->busy(); }
  bool rung_by_all() const noexcept override { return inner_->rung_by_all(); }
  bool quiet() const noexcept override { return false; }
  Doorbell& doorbell() noexcept override { return inner_->doorbell(); }
  ArrivalFlags* arrival_flags(int rank, int flag) noexcept override {
    return inner_->arrival_flags(rank, flag);
  }
  ArrivalFlags* remote_arrival_flags() noexcept override { return inner_->remote_arrival_flags(); }
  void heartbeat(TimePoint now) noexcept override { inner_->heartbeat(now); }
  std::optional<control::PeerLoss> check_peers(TimePoint now, Duration timeout) override {
    return inner_->check_peers(now, timeout);
  }
  void report_loss(int rank, std::string_view cause) noexcept override {
    inner_->report_loss(rank, cause);
  }
  void farewell() noexcept override { inner_->farewell(); }

 private:
  const std::unique_ptr<control::ControlPlane> inner_;
  const std::function<void()> before_poll_;
};

// The messages about its failure may wait for connections.
TEST_F(EngineTest, AfterAFailureItContinuesToSendThoughConnectionsBreak) {
  make({"a", "b"});
  std::function<void()> before_poll = [] {};
  int polls = 0;
  auto plane = std::make_unique<BreakingPlane>(network_->plane(0), [&] {
    ++polls;
    before_poll();
  });
  Engine failing(RuntimeOptions{}, runtime::EngineParts{std::move(plane),
                                                        {std::make_shared<LocalBackend>(world_)},
                                                        clock_,
                                                        counters_,
                                                        timeline_});
  failing.submission_queue().fail_from_outside({StatusCode::kInternal, "broken", -1});
  step(failing);
  ASSERT_TRUE(failing.submission_queue().failed());
  before_poll = [] { throw BrokenConnection("sending to rank 1 failed", 1); };
  polls = 0;
  for (int round = 1; round <= 3; ++round) {
    EXPECT_FALSE(step(failing)) << "or the thread that drives would never sleep";
    EXPECT_EQ(polls, round);
  }
  before_poll = [] { throw Error("the transport is gone"); };
  polls = 0;
  for (int round = 0; round < 3; ++round) step(failing);
  EXPECT_EQ(polls, 1) << "nothing more can be sent";
}

/// Rank 1 is an engine, the first of its host; the test plays rank 0, the coordinator.
class PlayedCoordinator : public EngineTest {
 protected:
  void SetUp() override {
    make({"a", "b"});
    coordinator_ = network_->plane(0);
    engine_ = engine(1);
  }
  void send(const wire::Bytes& bytes) { coordinator_->send(1, bytes); }
  static wire::Plan plan(std::uint64_t sequence) {
    wire::Plan made;
    made.sequence = sequence;
    return made;
  }
  /// The first plan: "x", in full.
  static wire::Plan plan_of_x() {
    wire::Plan first = plan(1);
    wire::Response tensor;
    tensor.request.name = "x";
    tensor.request.shape = {4};
    first.batches.push_back({{tensor}, {}});  // it does not end, as rank 0 takes no part
    return first;
  }
  /// Has both ranks repeat "x".
  void repeat_x() {
    submit(*engine_, "x");
    step(*engine_);
    wire::Plan first = plan_of_x();
    first.replay = {{{0}}};
    send(wire::encode(first));
    step(*engine_);
    kinds(*coordinator_);
  }

  std::unique_ptr<control::ControlPlane> coordinator_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(PlayedCoordinator, AnOperationSubmittedBeforeAReplayWaitsInTheReplayOnly) {
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  submit(*engine_, "x");
  step(*engine_);
  wire::Plan first = plan_of_x();
  send(wire::encode(first));
  step(*engine_);
  EXPECT_EQ(count(engine_->state_text(), "waits for other ranks"), 0);
  submit(*engine_, "x");
  step(*engine_);
  wire::Plan second = plan(2);
  second.replay = {{{0}}};
  send(wire::encode(second));
  step(*engine_);
  ASSERT_FALSE(engine_->submission_queue().failed())
      << engine_->submission_queue().failure().message;
  ASSERT_THAT(engine_->state_text(), ::testing::HasSubstr("replaying"));
  EXPECT_EQ(count(engine_->state_text(), "waits for other ranks"), 1);
}

TEST_F(PlayedCoordinator, AShutdownWaitsForRunningBatches) {
  const OperationPtr operation = submit(*engine_, "x");
  step(*engine_);
  send(wire::encode(plan_of_x()));
  step(*engine_);
  engine_->submission_queue().request_shutdown();
  step(*engine_);
  wire::Plan last = plan(2);
  last.shutdown = true;
  send(wire::encode(last));
  for (int round = 0; round < 3; ++round) step(*engine_);
  ASSERT_FALSE(engine_->submission_queue().failed())
      << engine_->submission_queue().failure().message;
  EXPECT_EQ(counters_.plans_applied.load(), 2U);
  EXPECT_FALSE(operation->done());
  EXPECT_FALSE(engine_->submission_queue().shut_down())
      << "memory of an operation under way would be freed";
}

// Both plans arrive in one receive(), after another thread has checked the sets.
TEST_F(PlayedCoordinator, AnOperationOfASetThatWasRemovedBeforeTheScheduleBeganEndsAlone) {
  const auto set_plan = [&](std::uint64_t sequence, const wire::Request& request) {
    wire::Plan made = plan(sequence);
    made.batches.push_back({{wire::Response{request}}, {}});
    return made;
  };
  wire::Request add;
  add.name = "add";
  add.kind = OpKind::kAddProcessSet;
  add.new_set = {0, 1};
  enqueue(*engine_, add);
  step(*engine_);
  send(wire::encode(set_plan(1, add)));
  step(*engine_);
  wire::Request remove;
  remove.name = "remove";
  remove.kind = OpKind::kRemoveProcessSet;
  remove.removed_set = 1;
  enqueue(*engine_, remove);
  submit(*engine_, "x");
  step(*engine_);
  send(wire::encode(set_plan(2, remove)));
  wire::Plan third = plan_of_x();
  third.sequence = 3;
  third.replay = {{{0}}};
  send(wire::encode(third));
  step(*engine_);
  ASSERT_FALSE(engine_->submission_queue().failed())
      << engine_->submission_queue().failure().message;
  ASSERT_THAT(engine_->state_text(), ::testing::HasSubstr("replaying"));
  wire::Request late;
  late.name = "late";
  late.process_set = 1;
  late.shape = {4};
  const OperationPtr operation = enqueue(*engine_, late);
  for (int round = 0; round < 3; ++round) step(*engine_);
  EXPECT_FALSE(engine_->submission_queue().failed())
      << engine_->submission_queue().failure().message;
  ASSERT_TRUE(operation->done());
  EXPECT_EQ(operation->status().code, StatusCode::kUsage) << operation->status().message;
}

// Otherwise memory beyond this rank's tensors would be read and written.
TEST_F(PlayedCoordinator, APlanThatRunsSomethingElseUnderTheNameOfAnOperationEndsTheJob) {
  const OperationPtr operation = submit(*engine_, "x");
  step(*engine_);
  wire::Plan first = plan_of_x();
  auto& tensor = std::get<wire::Response>(first.batches[0].tensors[0]);
  tensor.request.dtype = DataType::kFloat64;
  tensor.request.shape = {1048576};
  send(wire::encode(first));
  step(*engine_);
  EXPECT_TRUE(engine_->submission_queue().failed());
  ASSERT_TRUE(operation->done());
  EXPECT_EQ(operation->status().code, StatusCode::kInternal);
  EXPECT_EQ(
      operation->status().message,
      "allreduce 'x' on rank 1: the plan has another dtype than this rank submitted: expected "
      "float32, got float64; run the same build of hvd on every rank");
  EXPECT_THAT(kinds(*coordinator_), ElementsAre("report", "other")) << "rank 0 is notified";
}

// See MUT_REPORT in test/models/dissemination_barrier.pml.
TEST_F(PlayedCoordinator, OtherHostsGetTheUpdateBeforeTheCoordinatorGetsAReport) {
  repeat_x();
  ASSERT_FALSE(engine_->submission_queue().failed())
      << engine_->submission_queue().failure().message;
  ASSERT_THAT(engine_->state_text(), ::testing::HasSubstr("replaying"));
  submit(*engine_, "something else");
  step(*engine_);
  EXPECT_THAT(kinds(*coordinator_), ElementsAre("update", "report"));
}

// Plans arrive before the update that reports that ranks have left the replay.
TEST_F(PlayedCoordinator, EarlyPlansAreAppliedAfterTheUpdate) {
  repeat_x();
  for (const std::uint64_t sequence : {2, 3}) send(wire::encode(plan(sequence)));
  step(*engine_);
  step(*engine_);
  EXPECT_EQ(counters_.plans_applied.load(), 1U);
  send(wire::encode(wire::ReplayUpdate{.position = 1, .round = 0, .leaves = true}));
  for (int i = 0; i < 3; ++i) step(*engine_);
  ASSERT_FALSE(engine_->submission_queue().failed())
      << engine_->submission_queue().failure().message;
  EXPECT_EQ(counters_.plans_applied.load(), 3U);
  send(wire::encode(plan(4)));
  step(*engine_);
  EXPECT_EQ(counters_.plans_applied.load(), 4U) << "at once";
}

}  // namespace
}  // namespace hvd::testing
