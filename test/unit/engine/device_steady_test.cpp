// Counts the costs of a repeated step on a device.
#include <gtest/gtest.h>

#include <thread>

#include "support/device_job.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;

class DeviceSteadyTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  static constexpr int kTensors = 20;

  explicit DeviceSteadyTest(Path path = Path::kNccl) : job_(kRanks, path) {
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        gradients_.push_back(
            job_.make<float>(rank, Floats(static_cast<std::size_t>(17 * tensor + 1), 1.0F)).first);
      }
    }
  }

  /// Backward writes the gradients on the program's queue, they are averaged, and the optimizer
  /// reads them there.
  void step(int number) {
    std::vector<Operation> handles;
    std::vector<std::shared_ptr<EventPtr>> ready;
    for (int rank = 0; rank < kRanks; ++rank) {
      DeviceJob::Rank& one = job_.rank(rank);
      const device::DeviceGuard guard(one.device->api(), 0);
      std::vector<Submission> submissions;
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        const auto& gradient = gradients_[static_cast<std::size_t>(rank * kTensors + tensor)];
        const float value = static_cast<float>(number + rank * 2);
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        one.device->api().fill(gradient.memory, static_cast<std::size_t>(gradient.count), 4, bits,
                               one.app->get());
      }
      const EventPtr written = one.device->events()->record(one.app->get());
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        Submission submission;
        submission.name = "gradient " + std::to_string(tensor);
        submission.parameters = Allreduce{.op = ReduceOp::kAverage, .compression = compression_};
        submission.input = submission.output =
            gradients_[static_cast<std::size_t>(rank * kTensors + tensor)].view(DataType::kFloat32);
        submission.input_ready = written;
        submission.alone = alone_;
        ready.push_back(std::make_shared<EventPtr>());
        submission.on_done = [event = ready.back()](const Status&, const EventPtr& done) {
          *event = done;
        };
        submissions.push_back(std::move(submission));
      }
      for (auto& handle : job_.runtime(rank).submit(std::move(submissions), Progress::kBackground))
        handles.push_back(handle);
    }
    ASSERT_TRUE(job_.run(handles));
    for (int rank = 0; rank < kRanks; ++rank) {
      DeviceJob::Rank& one = job_.rank(rank);
      const device::DeviceGuard guard(one.device->api(), 0);
      for (int tensor = 0; tensor < kTensors; ++tensor)
        one.device->wait(one.app->get(),
                         *ready[static_cast<std::size_t>(rank * kTensors + tensor)]);
    }
  }

  void expect_two_launches_per_batch(int batches_per_step);

  DeviceJob job_;
  std::vector<GpuTensor<float>> gradients_;
  Compression compression_ = Compression::kNone;
  bool alone_ = false;
};

void DeviceSteadyTest::expect_two_launches_per_batch(int batches_per_step) {
  for (int number = 0; number < 5; ++number) step(number);
  const FakeGpuCounts before = job_.gpu().counts(0);
  const int threads_before = job_.nccl().counts(0).threads;
  const std::uint64_t batches_before = job_.runtime(0).metrics().backend_calls;
  constexpr int kSteps = 20;
  for (int number = 5; number < 5 + kSteps; ++number) step(number);
  const FakeGpuCounts after = job_.gpu().counts(0);
  const auto batches = static_cast<int>(job_.runtime(0).metrics().backend_calls - batches_before);
  EXPECT_EQ(batches, kSteps * batches_per_step);
  EXPECT_EQ(after.synchronize, 0);
  EXPECT_EQ(job_.nccl().counts(0).threads - threads_before,
            nccl_launches_on_thread() ? 0 : batches);
  EXPECT_EQ(after.allocate, before.allocate);
  EXPECT_EQ(after.copies, before.copies);
  EXPECT_EQ(after.launches - before.launches - kSteps * kTensors, 2 * batches)
      << "besides the program's own fills";
  EXPECT_TRUE(job_.gpu().run_all());
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto& last = gradients_[static_cast<std::size_t>(rank * kTensors + 7)];
    EXPECT_EQ(job_.read<float>(rank, last.view(DataType::kFloat32), nullptr)[3], 25.0F);
  }
  job_.expect_no_faults();
}

TEST_F(DeviceSteadyTest, NoSynchronisingCallNoAllocationNoCopyTwoLaunchesPerBatch) {
  expect_two_launches_per_batch(1);
}

TEST_F(DeviceSteadyTest, TheSameWhenTheBatchIsCastOnTheWay) {
  compression_ = Compression::kBFloat16;
  expect_two_launches_per_batch(1);
}

TEST_F(DeviceSteadyTest, TheSameWhenEachTensorIsCastByItself) {
  compression_ = Compression::kFloat16;
  alone_ = true;
  expect_two_launches_per_batch(kTensors);
}

TEST_F(DeviceSteadyTest, TheHostRunsAheadOfTheDevice) {
  step(0);
  // The operations are done for the host, and only the engine has queried the device.
  EXPECT_EQ(job_.gpu().counts(0).synchronize, 0);
  EXPECT_TRUE(job_.gpu().run_all());
  job_.expect_no_faults();
}

TEST_F(DeviceSteadyTest, MemoryIsKeptUntilTheDeviceIsDone) {
  auto owner = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owner;
  std::vector<Operation> handles;
  for (int rank = 0; rank < kRanks; ++rank) {
    auto operation = DeviceOperation<float>::in_place(job_, rank, "kept", OpKind::kAllreduce,
                                                      DataType::kFloat32, Floats(10, 1.0F));
    operation.submission.keep_alive = owner;
    handles.push_back(submit_one(job_.runtime(rank), operation.submission));
  }
  owner.reset();
  bool all_done_before_freed = false;
  ASSERT_TRUE(job_.run_until([&] {
    const bool done =
        std::all_of(handles.begin(), handles.end(), [](const Operation& o) { return o.done(); });
    all_done_before_freed = all_done_before_freed || (done && !watch.expired());
    return done;
  }));
  EXPECT_TRUE(all_done_before_freed) << "done for the host is not done for the device";
  EXPECT_TRUE(job_.gpu().run_all());
  EXPECT_TRUE(job_.run_until([&] { return watch.expired(); })) << "and then it is let go";
}

TEST_F(DeviceSteadyTest, ShutdownWaitsForTheDeviceAndLeavesItInOrder) {
  step(1);
  {
    const std::jthread time([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        job_.clock().advance(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    });
    job_.job().shut_down();
  }
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_FALSE(job_.runtime(rank).failed());
  EXPECT_TRUE(job_.gpu().run_all());
  job_.expect_no_faults();
}

}  // namespace
}  // namespace hvd::testing
