// Small tensors on a GPU gather while the GPU is busy.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/device_gathering.h"
#include "hvd/error.h"
#include "support/device_job.h"

namespace hvd::testing {
namespace {

using runtime::DeviceGathering;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(DeviceGatheringState, LastsUntilALimitOrUntilSomebodyWaits) {
  const TimePoint start(std::chrono::hours(1));
  DeviceGathering gathering;
  EXPECT_FALSE(gathering.under_way());
  EXPECT_FALSE(gathering.let_go()) << "nothing is held back";
  EXPECT_TRUE(gathering.may_last(start));
  gathering.note(start);
  gathering.note(start + milliseconds(15));
  EXPECT_TRUE(gathering.under_way());
  EXPECT_TRUE(gathering.may_last(start + milliseconds(19)));
  EXPECT_FALSE(gathering.may_last(start + milliseconds(20)));
  EXPECT_TRUE(gathering.let_go());
  EXPECT_FALSE(gathering.let_go()) << "once is enough";
  EXPECT_FALSE(gathering.may_last(start));
  EXPECT_TRUE(gathering.under_way()) << "until the plan";
  gathering.end();
  EXPECT_FALSE(gathering.under_way());
  EXPECT_TRUE(gathering.may_last(start + seconds(1)));
}

/// Two ranks, of which each computes on its GPU until the gate opens: what is reduced before is
/// queued behind that.
class DeviceGatheringTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  explicit DeviceGatheringTest(const runtime::RuntimeOptions& options = {})
      : job_(kRanks, Path::kNccl, options) {}
  ~DeviceGatheringTest() override { open_gate(); }

  void shut_gate() {
    for (int rank = 0; rank < kRanks; ++rank) {
      job_.gpu().enqueue(job_.rank(rank).app->get(),
                         {.name = "computation", .ready = [this] { return open_.load(); }});
    }
  }
  void open_gate() { open_ = true; }

  Submission gradient(int rank, const std::string& name, std::size_t elements = 8) {
    Submission submission =
        DeviceOperation<float>::in_place(job_, rank, name, OpKind::kAllreduce, DataType::kFloat32,
                                         std::vector<float>(elements, 1.0F))
            .submission;
    submission.on_done = nullptr;  // which expects that it succeeds
    return submission;
  }
  /// On every rank; then each has stepped until nothing moves.
  std::vector<Operation> reduce(const std::string& name, std::size_t elements = 8) {
    std::vector<Operation> handles;
    for (int rank = 0; rank < kRanks; ++rank)
      handles.push_back(submit_one(job_.runtime(rank), gradient(rank, name, elements)));
    settle();
    return handles;
  }
  /// For much less than what gathers may take.
  void settle() {
    job_.run_until([] { return false; }, milliseconds(1));
  }
  std::uint64_t batches() { return job_.runtime(0).metrics().backend_calls; }
  static bool done(const std::vector<Operation>& handles) {
    return std::ranges::all_of(handles, [](const Operation& o) { return o.done(); });
  }
  /// Two that the device does not get to, and as many more.
  std::vector<std::vector<Operation>> fill_device(int more) {
    shut_gate();
    std::vector<std::vector<Operation>> all;
    for (int i = 0; i < 2 + more; ++i) all.push_back(reduce("gradient " + std::to_string(i)));
    return all;
  }

  std::atomic<bool> open_ = false;
  DeviceJob job_;
};

TEST_F(DeviceGatheringTest, ADeviceThatIsBusyGetsWhatHasGathered) {
  const auto handles = fill_device(8);
  EXPECT_TRUE(done(handles[0]) && done(handles[1])) << "one that runs, and one that waits";
  for (std::size_t i = 2; i < handles.size(); ++i) EXPECT_FALSE(done(handles[i])) << i;
  EXPECT_EQ(batches(), 2U);
  open_gate();
  EXPECT_TRUE(job_.gpu().run_all());
  settle();
  for (const auto& each : handles) EXPECT_TRUE(done(each));
  EXPECT_EQ(batches(), 3U);
  EXPECT_TRUE(job_.gpu().run_all());
  EXPECT_EQ(job_.gpu().counts(0).synchronize, 0);
  job_.expect_no_faults();
}

TEST_F(DeviceGatheringTest, AnIdleOneGetsItAtOnce) {
  for (int i = 0; i < 5; ++i) {
    const auto handles = reduce("gradient " + std::to_string(i));
    EXPECT_TRUE(done(handles));
    EXPECT_EQ(batches(), static_cast<std::uint64_t>(i + 1));
    EXPECT_TRUE(job_.gpu().run_all());
  }
  job_.expect_no_faults();
}

TEST_F(DeviceGatheringTest, NothingGathersForLongerThanALimit) {
  const auto handles = fill_device(3);
  const Duration passed = milliseconds(5);  // more than it has taken to submit them
  job_.clock().advance(DeviceGathering::kLongest - 2 * passed);
  settle();
  EXPECT_EQ(batches(), 2U);
  job_.clock().advance(2 * passed);
  settle();
  EXPECT_EQ(batches(), 3U);
  for (const auto& each : handles) EXPECT_TRUE(done(each));
}

TEST_F(DeviceGatheringTest, WhatIsAskedForAloneOrOnTheHostDoesNotGather) {
  fill_device(0);
  std::vector<Operation> handles;
  for (int rank = 0; rank < kRanks; ++rank) {
    Submission submission = gradient(rank, "alone");
    submission.alone = true;
    handles.push_back(submit_one(job_.runtime(rank), submission));
  }
  settle();
  EXPECT_TRUE(done(handles)) << "nothing would be fused with it";
  handles.clear();
  std::vector<std::vector<float>> memory(kRanks, std::vector<float>(4, 1.0F));
  for (int rank = 0; rank < kRanks; ++rank) {
    handles.push_back(submit_one(job_.runtime(rank),
                                 float_operation(memory[static_cast<std::size_t>(rank)], "host")));
  }
  settle();
  EXPECT_TRUE(done(handles)) << "the GPU has nothing to do with it";
}

class SmallThreshold : public DeviceGatheringTest {
 protected:
  SmallThreshold() : DeviceGatheringTest({.fusion_threshold = 1024}) {}
};
using DeviceGatheringThresholdTest = SmallThreshold;

TEST_F(DeviceGatheringThresholdTest, AFullBatchDoesNotWait) {
  fill_device(0);
  const auto half = reduce("half", 128);
  EXPECT_FALSE(done(half));
  const auto rest = reduce("rest", 128);
  EXPECT_TRUE(done(half) && done(rest));
  EXPECT_EQ(batches(), 3U);
}

TEST_F(DeviceGatheringTest, WhoWaitsIsNotHeldBack) {
  const auto handles = fill_device(1);
  ASSERT_FALSE(done(handles[2]));
  std::atomic<int> came_back = 0;
  {
    // Time goes on for a few milliseconds and no more, so it is not the limit.
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        handles[2][static_cast<std::size_t>(rank)].wait();
        ++came_back;
      });
    }
    const auto limit = std::chrono::steady_clock::now() + seconds(20);
    for (int i = 0; came_back < kRanks && std::chrono::steady_clock::now() < limit; ++i) {
      if (i < 10) job_.clock().advance(DeviceGathering::kLongest / 20);
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(came_back, kRanks) << "wait() has waited for the device";
    open_gate();
  }
  EXPECT_EQ(batches(), 3U);
}

TEST_F(DeviceGatheringTest, ShutdownLetsGo) {
  const auto handles = fill_device(1);
  ASSERT_FALSE(done(handles[2]));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&, rank] { EXPECT_TRUE(job_.runtime(rank).shutdown()); });
    const auto limit = std::chrono::steady_clock::now() + seconds(20);
    for (int i = 0; !done(handles[2]) && std::chrono::steady_clock::now() < limit; ++i) {
      if (i < 10) job_.clock().advance(DeviceGathering::kLongest / 20);
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_TRUE(done(handles[2])) << "shutdown() has waited for the device";
    open_gate();
    std::jthread time([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        job_.clock().advance(milliseconds(1));
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    ranks.clear();
  }
  for (const Operation& handle : handles[2]) EXPECT_TRUE(handle.status().ok());
}

TEST_F(DeviceGatheringTest, ADeviceThatFailsLetsGo) {
  const auto handles = fill_device(1);
  ASSERT_FALSE(done(handles[2]));
  job_.nccl().break_rank(0, true, "the connection was closed by the remote host");
  ASSERT_TRUE(job_.run_until([&] { return done(handles[2]); }, DeviceGathering::kLongest / 2));
  for (const Operation& handle : handles[2])
    EXPECT_EQ(handle.status().code, StatusCode::kPeerLost) << handle.status().message;
}

}  // namespace
}  // namespace hvd::testing
