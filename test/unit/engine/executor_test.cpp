// Tests how a batch passes through the executor, with channels and stagings that only record their
// calls.
#include "engine/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>

#include "hvd/error.h"
#include "support/batches.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using runtime::ChannelQueue;
using runtime::Execution;
using runtime::Executor;
using runtime::OperationPtr;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::_;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

using Log = std::vector<std::string>;

class FakeEvent final : public Event {
 public:
  bool query() const override { return reached; }
  void* native() const noexcept override { return nullptr; }
  bool reached = false;
};

/// The behaviour of a channel and its works, set by the test.
struct ChannelScript {
  bool ready = true;
  bool ends = true;  ///< whether a Work ends at its next progress()
  bool repeats = false;
  bool launch_fails = false;
  bool work_fails = false;
  std::shared_ptr<FakeEvent> reduced = {};
  std::optional<ProgressCount> progress_count = {};
  bool has_host = false;
};

class FakeWork final : public Work {
 public:
  FakeWork(Log& log, std::string name, const ChannelScript& script)
      : log_(log), name_(std::move(name)), script_(script) {}
  FakeWork(const FakeWork&) = delete;
  FakeWork& operator=(const FakeWork&) = delete;
  ~FakeWork() override { log_.push_back(name_ + " work destroyed"); }
  bool progress() override {
    if (script_.work_fails) throw PeerLostError("rank 1 is gone", 1);
    return script_.ends;
  }
  bool again(std::span<const std::byte> in, std::span<std::byte> out) override {
    if (!script_.repeats) return false;
    log_.push_back(name_ + " again " + std::to_string(std::min(in.size(), out.size())));
    return true;
  }
  bool repeats() const noexcept override { return script_.repeats; }
  std::optional<ProgressCount> progress_count() const noexcept override {
    return script_.progress_count;
  }
  EventPtr output_ready() const override { return script_.reduced; }

 private:
  Log& log_;
  const std::string name_;
  const ChannelScript& script_;
};

class FakeChannel final : public Channel {
 public:
  FakeChannel(Log& log, std::string name, const ChannelScript& script)
      : log_(log), name_(std::move(name)), script_(script) {
    if (script.has_host) host_ = std::make_unique<FakeChannel>(log_, name_ + "'s host", plain_);
  }
  FakeChannel(const FakeChannel&) = delete;
  FakeChannel& operator=(const FakeChannel&) = delete;
  ~FakeChannel() override { log_.push_back(name_ + " closed"); }
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte>) override {
    if (script_.launch_fails) throw Error("it does not start");
    std::string line = name_ + " launch " + std::string(to_string(collective.kind)) + " " +
                       std::to_string(in.size());
    if (collective.op == ReduceOp::kAdasum) line += " adasum";
    if (collective.input_ready) line += " after an event";
    log_.push_back(line);
    return std::make_unique<FakeWork>(log_, name_, script_);
  }
  bool ready() override { return script_.ready; }
  void abort() noexcept override { log_.push_back(name_ + " abort"); }
  Channel* host() noexcept override { return host_.get(); }

 private:
  Log& log_;
  const std::string name_;
  const ChannelScript& script_;
  const ChannelScript plain_ = {};
  std::unique_ptr<FakeChannel> host_;
};

/// One queue per process set, "queue 0" and so on.
struct QueueScript {
  ChannelScript channel = {};
  bool ordered = false;
  std::shared_ptr<FakeEvent> callers_may_read = {};
  bool staging_fails = false;
  int parts = 1;  ///< number of parts in which a batch is packed and unpacked
};

/// Stages into memory of its own.
class FakeStaging final : public runtime::Staging {
 public:
  FakeStaging(Log& log, std::string name, const QueueScript& script)
      : log_(log), name_(std::move(name)), script_(script), ready_(script.callers_may_read) {}
  const runtime::Staged& stage(const runtime::Batch& batch) override {
    log_.push_back(name_ + " stage " + batch.request().name);
    if (script_.staging_fails) throw Error("the device has failed");
    staged_ = {batch.collective(), memory_, memory_};
    packed_ = unpacked_ = 0;
    return staged_;
  }
  bool pack_part(const runtime::Batch&) override { return ++packed_ == script_.parts; }
  bool unpack_part(const runtime::Batch&) override { return ++unpacked_ == script_.parts; }
  EventPtr unstage(const runtime::Batch& batch, EventPtr reduced) override {
    log_.push_back(name_ + " unstage " + batch.request().name +
                   (reduced != nullptr ? " after an event" : ""));
    return ready_;
  }
  void abandon() noexcept override { log_.push_back(name_ + " abandon"); }
  EventPtr after_both(const EventPtr&, const EventPtr&) override { return ready_; }

 private:
  Log& log_;
  const std::string name_;
  const QueueScript& script_;
  const EventPtr ready_;
  int packed_ = 0;
  int unpacked_ = 0;
  std::array<std::byte, 16> memory_ = {};
  runtime::Staged staged_;
};

class FakeQueues final : public runtime::QueueFactory {
 public:
  FakeQueues(Log& log, std::map<int, QueueScript>& scripts) : log_(log), scripts_(scripts) {}
  std::string choose(const runtime::Batch&) const override { return "fake"; }
  ChannelQueue open(const runtime::Batch& batch) override {
    const int set = batch.spec().process_set;
    const QueueScript& script = scripts_[set];
    const std::string name = std::to_string(set);
    return {"fake", std::make_unique<FakeChannel>(log_, name, script.channel),
            std::make_unique<FakeStaging>(log_, name, script), script.ordered};
  }
  void keep_buffers_for(std::span<const runtime::Batch* const>) override {}

 private:
  Log& log_;
  std::map<int, QueueScript>& scripts_;
};

class ExecutorTest : public ::testing::Test {
 protected:
  ExecutorTest()
      : executor_({topology_, clock_, counters_, timeline_, seconds(10)},
                  std::make_unique<FakeQueues>(log_, queues_),
                  [this](const OperationPtr& operation, const Status& status, const EventPtr& ready,
                         bool in_flight) {
                    log_.push_back(operation->request.name + (status.ok() ? " ended" : " failed") +
                                   (ready != nullptr ? ", ready after an event" : "") +
                                   (in_flight ? ", in flight" : ""));
                    operation->finish(status, ready);
                  }) {}
  static wire::Request request(const std::string& name, int set = 0) {
    wire::Request asked = float_request(name, 4);
    asked.op = ReduceOp::kSum;
    asked.process_set = set;
    return asked;
  }
  void start(const wire::Request& asked) {
    executor_.start(executor_.prepare(agreed_batch({asked}, 2), {float_state(asked, memory_)}));
  }
  std::shared_ptr<Execution> prepare(const wire::Request& asked) {
    return executor_.prepare(agreed_batch({asked}, 2), {OperationPtr()});
  }
  void start_again(const std::shared_ptr<Execution>& execution) {
    execution->put(0, float_state(execution->batch().request(), memory_));
    executor_.start(execution);
  }
  Log take_log() { return std::exchange(log_, {}); }

  Log log_;
  std::map<int, QueueScript> queues_;
  Topology topology_{.rank = 0, .size = 2, .host_names = {"a", "b"}, .host_of_rank = {0, 1}};
  VirtualClock clock_;
  observe::Counters counters_;
  runtime::CurrentTimeline timeline_;
  std::vector<float> memory_ = std::vector<float>(4);
  Executor executor_;
};

TEST_F(ExecutorTest, ABatchIsStagedLaunchedUnstagedAndThenEnds) {
  queues_[0].channel.ends = false;
  start(request("x"));
  EXPECT_THAT(take_log(), IsEmpty()) << "nothing happens but in progress()";
  EXPECT_THAT(executor_.running(), ElementsAre(Pair(_, HasSubstr("queued for fake"))));
  EXPECT_TRUE(executor_.progress());
  EXPECT_THAT(take_log(), ElementsAre("0 stage x", "0 launch allreduce 16"));
  EXPECT_THAT(executor_.running(), ElementsAre(Pair(_, HasSubstr("runs on fake"))));
  EXPECT_FALSE(executor_.progress());
  EXPECT_THAT(take_log(), IsEmpty());
  queues_[0].channel.ends = true;
  EXPECT_TRUE(executor_.progress());
  EXPECT_THAT(take_log(), ElementsAre("0 unstage x", "0 work destroyed", "x ended"));
  EXPECT_FALSE(executor_.active());
  EXPECT_EQ(counters_.backend_calls.load(), 1U);
}

TEST_F(ExecutorTest, PackingAndUnpackingTakeSeveralCallsOfWhichEachHasMovedSomething) {
  queues_[0].parts = 3;
  start(request("x"));
  for (int call = 0; call < 2; ++call) EXPECT_TRUE(executor_.progress());
  EXPECT_THAT(take_log(), ElementsAre("0 stage x")) << "a third is still to be packed";
  EXPECT_TRUE(executor_.progress());
  EXPECT_THAT(take_log(), ElementsAre("0 launch allreduce 16"));
  EXPECT_TRUE(executor_.progress());
  EXPECT_THAT(take_log(), IsEmpty());
  EXPECT_TRUE(executor_.progress());
  EXPECT_THAT(take_log(), ElementsAre("0 unstage x", "0 work destroyed", "x ended"));
  EXPECT_FALSE(executor_.progress());
}

TEST_F(ExecutorTest, ABatchThatIsStillPackedIsNotInFlightWhenTheJobFails) {
  queues_[0].parts = 3;
  start(request("x"));
  EXPECT_TRUE(executor_.progress());
  take_log();
  executor_.abort({StatusCode::kInternal, "broken", -1});
  EXPECT_THAT(take_log(), ElementsAre("0 abort", "x failed"));
}

TEST_F(ExecutorTest, TheBatchesOfAQueueFollowEachOther) {
  queues_[0].channel.ends = false;
  start(request("x"));
  start(request("y"));
  start(request("elsewhere", 1));
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("0 stage x", "0 launch allreduce 16", "1 stage elsewhere",
                                      "1 launch allreduce 16", "1 unstage elsewhere",
                                      "1 work destroyed", "elsewhere ended"));
  EXPECT_EQ(executor_.in_flight(), 2U);
  EXPECT_EQ(executor_.batches_ahead(0, DeviceType::kCpu), 2U);
  EXPECT_EQ(executor_.batches_ahead(1, DeviceType::kCpu), 0U) << "of another set";
  EXPECT_EQ(executor_.batches_ahead(0, DeviceType::kCuda), 0U) << "of another device";
  queues_[0].channel.ends = true;
  executor_.progress();
  EXPECT_THAT(take_log(),
              ElementsAre("0 unstage x", "0 work destroyed", "x ended", "0 stage y",
                          "0 launch allreduce 16", "0 unstage y", "0 work destroyed", "y ended"));
}

TEST_F(ExecutorTest, OutputIsReadyAfterTheEventOfTheUnpackingNotOfTheCollective) {
  queues_[0].channel.reduced = std::make_shared<FakeEvent>();
  const auto unpacked = queues_[0].callers_may_read = std::make_shared<FakeEvent>();
  const wire::Request asked = request("x");
  const OperationPtr operation = float_state(asked, memory_);
  auto owner = std::make_shared<int>();
  const std::weak_ptr<int> kept = owner;
  operation->submission.keep_alive = std::move(owner);
  executor_.start(executor_.prepare(agreed_batch({asked}, 2), {operation}));
  executor_.retire(0);
  executor_.progress();
  EXPECT_THAT(take_log(),
              ElementsAre("0 stage x", "0 launch allreduce 16", "0 unstage x after an event",
                          "0 work destroyed", "x ended, ready after an event"));
  EXPECT_EQ(operation->output_ready(), unpacked);
  clock_.advance(milliseconds(3));
  queues_[0].channel.reduced->reached = true;
  executor_.progress();
  EXPECT_FALSE(kept.expired()) << "the device has not got to the unpacking";
  EXPECT_THAT(take_log(), IsEmpty()) << "nor is the channel closed";
  unpacked->reached = true;
  clock_.advance(milliseconds(3));
  executor_.progress();
  EXPECT_TRUE(kept.expired());
  EXPECT_THAT(take_log(), ElementsAre("0 closed"));
}

TEST_F(ExecutorTest, OrderedQueuesAreUsedInTheOrderOfThePlan) {
  for (const int set : {0, 1}) queues_[set].ordered = true;
  queues_[1].channel.ready = false;
  start(request("first", 1));
  start(request("second", 0));
  start(request("beside", 2));
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("2 stage beside", "2 launch allreduce 16", "2 unstage beside",
                                      "2 work destroyed", "beside ended"));
  queues_[1].channel.ready = true;
  queues_[1].channel.ends = false;
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("1 stage first", "1 launch allreduce 16"));
  executor_.progress();
  EXPECT_THAT(take_log(), IsEmpty()) << "its turn ends when it is complete";
  queues_[1].channel.ends = true;
  executor_.progress();
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("1 unstage first", "1 work destroyed", "first ended",
                                      "0 stage second", "0 launch allreduce 16", "0 unstage second",
                                      "0 work destroyed", "second ended"));
}

TEST_F(ExecutorTest, ABatchWithoutDataIsNeitherStagedNorLaunched) {
  wire::Request asked = request("x");
  asked.shape = {0};
  start(asked);
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("x ended"));
  EXPECT_EQ(counters_.backend_calls.load(), 0U);
}

TEST_F(ExecutorTest, AReplayedBatchStartsItsLastWorkAgain) {
  queues_[0].channel.repeats = true;
  const auto execution = prepare(request("x"));
  EXPECT_FALSE(execution->running());
  start_again(execution);
  EXPECT_TRUE(execution->running());
  executor_.progress();
  EXPECT_THAT(take_log(),
              ElementsAre("0 stage x", "0 launch allreduce 16", "0 unstage x", "x ended"));
  EXPECT_FALSE(execution->running());
  EXPECT_FALSE(execution->batch().operations().front()) << "it waits for the next one";
  start_again(execution);
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("0 stage x", "0 again 16", "0 unstage x", "x ended"));
  EXPECT_EQ(counters_.backend_calls.load(), 2U);
}

TEST_F(ExecutorTest, AReplayedBatchOfAnotherChannelIsLaunchedEachTime) {
  const auto execution = prepare(request("x"));
  for (int use = 0; use < 2; ++use) {
    start_again(execution);
    executor_.progress();
    EXPECT_THAT(take_log(), ElementsAre("0 stage x", "0 launch allreduce 16", "0 unstage x",
                                        "0 work destroyed", "x ended"));
  }
}

TEST_F(ExecutorTest, AnAbortAbandonsLaunchedBatchesAndEndsTheOthers) {
  queues_[0].channel.ends = false;
  start(request("runs"));
  start(request("waits"));
  start(request("waits elsewhere", 1));
  queues_[1].channel.ready = false;
  executor_.progress();
  take_log();
  executor_.abort({StatusCode::kPeerLost, "rank 1 is gone"});
  EXPECT_THAT(take_log(),
              ElementsAre("0 abort", "0 work destroyed", "0 abandon", "runs failed, in flight",
                          "waits failed", "1 abort", "waits elsewhere failed"));
  EXPECT_FALSE(executor_.active());
}

TEST_F(ExecutorTest, AnAbortEndsTheTurnsOfOrderedQueues) {
  queues_[0].ordered = true;
  queues_[0].channel.ends = false;
  const auto execution = prepare(request("x"));
  start_again(execution);
  executor_.progress();
  executor_.abort({StatusCode::kInternal, "given up"});
  EXPECT_FALSE(execution->running());
  take_log();
  queues_[0].channel.ends = true;
  start(request("y"));
  executor_.progress();
  EXPECT_THAT(log_, ElementsAre("0 stage y", "0 launch allreduce 16", "0 unstage y",
                                "0 work destroyed", "y ended"));
}

// The launch may have posted messages, or queued work on a device, before it failed.
TEST_F(ExecutorTest, ALaunchThatFailsNamesItsOperationAndIsInFlight) {
  queues_[0].channel.launch_fails = true;
  start(request("x"));
  try {
    executor_.progress();
    ADD_FAILURE() << "expected an error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("allreduce 'x': it does not start"));
  }
  take_log();
  executor_.abort({StatusCode::kInternal, "given up"});
  EXPECT_THAT(take_log(), ElementsAre("0 abort", "0 abandon", "x failed, in flight"));
}

// On the host, packing ends with the call. On a device it may have been queued before the error.
TEST_F(ExecutorTest, ABatchWhoseStagingFailsIsInFlightOnADeviceOnly) {
  for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda}) {
    const int set = device == DeviceType::kCpu ? 0 : 1;
    queues_[set].staging_fails = true;
    wire::Request asked = request("x", set);
    asked.device = device;
    start(asked);
    EXPECT_THROW(executor_.progress(), Error);
    take_log();
    executor_.abort({StatusCode::kInternal, "given up"});
    if (device == DeviceType::kCpu) {
      EXPECT_THAT(take_log(), ElementsAre("0 abort", "x failed"));
    } else {
      EXPECT_THAT(take_log(),
                  ElementsAre("0 abort", "1 abort", "1 abandon", "x failed, in flight"));
    }
  }
}

TEST_F(ExecutorTest, ALossIsStillALossWithTheNameOfTheOperation) {
  queues_[0].channel.work_fails = true;
  start(request("x"));
  try {
    executor_.progress();
    ADD_FAILURE() << "expected an error";
  } catch (const PeerLostError& error) {
    EXPECT_THAT(error.what(), HasSubstr("allreduce 'x': rank 1 is gone"));
    EXPECT_EQ(error.rank(), 1);
  }
  take_log();
  executor_.abort({StatusCode::kPeerLost, "rank 1 is gone"});
  EXPECT_THAT(take_log(),
              ElementsAre("0 abort", "0 work destroyed", "0 abandon", "x failed, in flight"));
}

TEST_F(ExecutorTest, AdasumIsMadeOfCollectivesWhereTheChannelTakesTheHostsMemory) {
  for (const bool has_host : {false, true}) {
    const int set = has_host ? 1 : 0;
    queues_[set].channel.has_host = has_host;
    queues_[set].channel.ends = false;
    wire::Request asked = request("x", set);
    asked.op = ReduceOp::kAdasum;
    start(asked);
    executor_.progress();
  }
  EXPECT_THAT(log_, ElementsAre("0 stage x", HasSubstr("0 launch alltoall"), "1 stage x",
                                "1 launch allreduce 16 adasum"));
}

TEST_F(ExecutorTest, AnAlltoallAgreesOnItsSizesInTheHostsMemoryAndIsNotStaged) {
  for (const int set : {0, 1}) {
    queues_[set].channel.has_host = set == 1;
    queues_[set].callers_may_read = std::make_shared<FakeEvent>();
    wire::Request asked = request("x", set);
    asked.kind = OpKind::kAlltoall;
    const OperationPtr operation = float_state(asked, memory_);
    operation->submission.parameters = Alltoall{{2, 2}};
    operation->submission.allocate_output = [](const OutputSizes&) { return TensorView{}; };
    executor_.start(executor_.prepare(agreed_batch({asked}, 2), {operation}));
    executor_.progress();
  }
  EXPECT_THAT(log_,
              ElementsAre("0 launch alltoall 16", "0 launch alltoall 16 after an event",
                          "0 work destroyed", "0 work destroyed", "x ended",
                          "1's host launch alltoall 16", "1 launch alltoall 16 after an event",
                          "1's host work destroyed", "1 work destroyed", "x ended"));
  EXPECT_EQ(counters_.backend_calls.load(), 3U) << "not those of the channel beside";
}

TEST_F(ExecutorTest, ABatchThatGetsNoFurtherForTooLongIsAnError) {
  queues_[0].channel.ends = false;
  queues_[0].channel.progress_count = ProgressCount{3, 1};
  start(request("x"));
  executor_.progress();
  executor_.check_progress(clock_.now());
  clock_.advance(seconds(9));
  executor_.check_progress(clock_.now());
  queues_[0].channel.progress_count = ProgressCount{4, 1};  // slow, and not at a standstill
  executor_.check_progress(clock_.now());
  clock_.advance(seconds(9));
  executor_.check_progress(clock_.now());
  clock_.advance(seconds(2));
  try {
    executor_.check_progress(clock_.now());
    FAIL() << "no error";
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.rank(), -1) << "either end of the connection may be the cause";
    EXPECT_STREQ(error.what(),
                 "allreduce 'x' has made no progress on rank 0 (host a) for 11 s on fake, although "
                 "every rank has submitted it; it waits for rank 1 (host b); expected progress "
                 "within 10 s (HVD_STALL_SHUTDOWN); a connection between ranks does not deliver, "
                 "although the ranks show signs of life");
  }
}

TEST_F(ExecutorTest, NoLimitHoldsForABatchThatIsNotUnderWay) {
  queues_[0].channel.progress_count = ProgressCount{3, 1};
  queues_[0].channel.ready = false;
  start(request("x"));
  for (int look = 0; look < 3; ++look) {
    executor_.progress();
    executor_.check_progress(clock_.now());
    clock_.advance(seconds(100));
  }
  queues_[0].channel.ends = false;
  queues_[0].channel.ready = true;
  executor_.progress();
  executor_.check_progress(clock_.now());  // the time begins here
  clock_.advance(seconds(9));
  executor_.check_progress(clock_.now());
  queues_[0].channel.progress_count.reset();  // it waits for this rank's device
  clock_.advance(seconds(100));
  executor_.check_progress(clock_.now());
}

TEST_F(ExecutorTest, EachUseOfAReplayedBatchHasItsOwnTime) {
  queues_[0].channel.progress_count = ProgressCount{3, 1};
  queues_[0].channel.repeats = true;
  const auto execution = prepare(request("x"));
  for (int use = 0; use < 5; ++use) {
    queues_[0].channel.ends = false;
    start_again(execution);
    executor_.progress();
    executor_.check_progress(clock_.now());
    clock_.advance(seconds(6));
    executor_.check_progress(clock_.now());
    queues_[0].channel.ends = true;
    executor_.progress();
  }
}

TEST_F(ExecutorTest, ARemovedSetsChannelIsClosedOnceItIsIdle) {
  queues_[0].channel.ends = false;
  start(request("x"));
  start(request("y", 1));
  executor_.progress();
  take_log();
  for (const int set : {0, 1}) executor_.retire(set);
  EXPECT_THAT(take_log(), ElementsAre("1 closed"));
  queues_[0].channel.ends = true;
  executor_.progress();
  EXPECT_THAT(take_log(), ElementsAre("0 unstage x", "0 work destroyed", "x ended", "0 closed"));
}

}  // namespace
}  // namespace hvd::testing
