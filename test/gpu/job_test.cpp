// Whole jobs with tensors on a GPU, through the public interface, under mpirun. Several ranks may
// share a GPU or use simulated GPUs. The settings are in CMakeLists.txt.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gpu/gpu_job.h"
#include "gpu/program_device.h"
#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "support/watchdog.h"

namespace hvd {
namespace {

using testing::ProgramDevice;

class GpuMemory {
 public:
  explicit GpuMemory(std::size_t floats)
      : data_(ProgramDevice::allocate(floats * sizeof(float) + 1)), floats_(floats) {}
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() { ProgramDevice::release(data_); }
  void write(const std::vector<float>& values, void* stream) {
    ProgramDevice::copy_in(data_, values.data(), values.size() * sizeof(float), stream);
  }
  std::vector<float> read(void* stream) const {
    std::vector<float> values(floats_);
    ProgramDevice::copy_out(values.data(), data_, floats_ * sizeof(float), stream);
    return values;
  }
  TensorView view() const {
    const auto count = static_cast<std::int64_t>(floats_);
    return {data_, count, DataType::kFloat32, {DeviceType::kCuda, *gpu_index()}, {count}};
  }

 private:
  std::byte* const data_;
  const std::size_t floats_;
};

class GpuJobTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(gpu_index().has_value());
    ProgramDevice::use(*gpu_index());
    stream_ = ProgramDevice::create_stream();
  }
  void TearDown() override {
    ProgramDevice::destroy_stream(stream_);
    for (const std::string& fault : ProgramDevice::drain_faults()) ADD_FAILURE() << fault;
  }

  Submission in_place(const GpuMemory& memory, const std::string& name,
                      std::shared_ptr<EventPtr> ready,
                      OperationParameters parameters = Allreduce{}) const {
    Submission submission;
    submission.name = name;
    submission.parameters = std::move(parameters);
    submission.input = submission.output = memory.view();
    submission.input_ready = record_event(stream_);
    submission.on_done = [ready = std::move(ready)](const Status&, const EventPtr& event) {
      *ready = event;
    };
    return submission;
  }
  void finish(const std::vector<Operation>& operations,
              const std::vector<std::shared_ptr<EventPtr>>& ready) {
    for (const Operation& operation : operations) {
      operation.wait();
      EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    }
    for (const auto& event : ready) wait_for_event(stream_, *event);
  }

  /// Allocates an output with one number per row.
  static auto rows_into(std::unique_ptr<GpuMemory>& memory) {
    return [&memory](const OutputSizes& sizes) {
      memory = std::make_unique<GpuMemory>(static_cast<std::size_t>(
          std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0})));
      return memory->view();
    };
  }

  static bool rank_0_says(bool answer) {
    auto told = static_cast<float>(answer);
    Submission submission;
    submission.name = "answer";
    submission.parameters = Broadcast{};
    submission.input =
        submission.output = {reinterpret_cast<std::byte*>(&told), 1, DataType::kFloat32, {}, {1}};
    const Operation operation = submit(submission);
    operation.wait();
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    return operation.status().ok() && told != 0;
  }

  std::vector<float> own_values(std::size_t count) const {
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), static_cast<float>(1000 * rank()));
    return values;
  }
  /// Sums one number of each rank over the ranks of a set.
  float sum_over(const ProcessSet& set, float value, const std::string& name) {
    GpuMemory tensor(3);
    tensor.write(std::vector<float>(3, value), stream_);
    auto ready = std::make_shared<EventPtr>();
    Submission submission = in_place(tensor, name, ready);
    submission.process_set = set.id();
    finish({submit(submission)}, {ready});
    return tensor.read(stream_)[2];
  }

  void* stream_ = nullptr;
};

TEST_F(GpuJobTest, FusedAveragesOfManySizes) {
  const std::size_t most = ProgramDevice::max_floats();
  std::size_t sizes[] = {1, 7, 1000, 65539, 1 << 20, 3 << 20};
  for (std::size_t& floats : sizes) floats = std::min(floats, most);
  std::vector<std::unique_ptr<GpuMemory>> tensors;
  std::vector<Submission> submissions;
  std::vector<std::shared_ptr<EventPtr>> ready;
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    tensors.push_back(std::make_unique<GpuMemory>(sizes[i]));
    std::vector<float> values(sizes[i]);
    std::iota(values.begin(), values.end(), static_cast<float>(rank()));
    tensors.back()->write(values, stream_);
    ready.push_back(std::make_shared<EventPtr>());
    submissions.push_back(in_place(*tensors.back(), "t" + std::to_string(i), ready.back(),
                                   Allreduce{.op = ReduceOp::kAverage, .prescale = 2}));
  }
  finish(submit_all(std::move(submissions)), ready);
  for (std::size_t i = 0; i < std::size(sizes); ++i) {
    const std::vector<float> values = tensors[i]->read(stream_);
    const float mean_of_ranks = static_cast<float>(size() - 1) / 2;
    for (std::size_t e = 0; e < values.size(); e += 97)
      EXPECT_FLOAT_EQ(values[e], 2 * (static_cast<float>(e) + mean_of_ranks)) << i << " " << e;
  }
}

TEST_F(GpuJobTest, BroadcastFromTheLastRank) {
  GpuMemory tensor(4099);
  tensor.write(std::vector<float>(4099, static_cast<float>(rank() + 1)), stream_);
  auto ready = std::make_shared<EventPtr>();
  Submission submission = in_place(tensor, "b", ready, Broadcast{size() - 1});
  finish({submit(submission)}, {ready});
  EXPECT_EQ(tensor.read(stream_), std::vector<float>(4099, static_cast<float>(size())));
}

TEST_F(GpuJobTest, RaggedAllgather) {
  GpuMemory own(static_cast<std::size_t>(rank() + 1));
  own.write(std::vector<float>(static_cast<std::size_t>(rank() + 1), static_cast<float>(rank())),
            stream_);
  std::unique_ptr<GpuMemory> all;
  auto ready = std::make_shared<EventPtr>();
  Submission submission = in_place(own, "g", ready, Allgather{});
  submission.allocate_output = rows_into(all);
  finish({submit(submission)}, {ready});
  std::vector<float> expected;
  for (int from = 0; from < size(); ++from)
    expected.insert(expected.end(), static_cast<std::size_t>(from + 1), static_cast<float>(from));
  EXPECT_EQ(all->read(stream_), expected);
}

TEST_F(GpuJobTest, RaggedReducescatter) {
  const std::int64_t rows = 2 * size() + 1;
  GpuMemory all(static_cast<std::size_t>(rows));
  all.write(own_values(static_cast<std::size_t>(rows)), stream_);
  const std::int64_t own_rows = rows_of_member(rows, size(), rank());
  GpuMemory own(static_cast<std::size_t>(own_rows));
  auto ready = std::make_shared<EventPtr>();
  Submission submission = in_place(all, "rs", ready, Reducescatter{});
  submission.output = own.view();
  finish({submit(submission)}, {ready});
  std::int64_t first = 0;
  for (int before = 0; before < rank(); ++before) first += rows_of_member(rows, size(), before);
  std::vector<float> expected(static_cast<std::size_t>(own_rows));
  const int sum_of_ranks = size() * (size() - 1) / 2;
  for (std::size_t row = 0; row < expected.size(); ++row) {
    const std::int64_t place = first + static_cast<std::int64_t>(row);
    expected[row] = static_cast<float>(place * size() + 1000 * sum_of_ranks);
  }
  EXPECT_EQ(own.read(stream_), expected);
}

TEST_F(GpuJobTest, AlltoallWithOtherSplitsOnEveryRank) {
  // Rank r sends r + p + 1 rows to rank p.
  Alltoall alltoall;
  for (int to = 0; to < size(); ++to) alltoall.splits.push_back(rank() + to + 1);
  const std::int64_t sent =
      std::accumulate(alltoall.splits.begin(), alltoall.splits.end(), std::int64_t{0});
  GpuMemory own(static_cast<std::size_t>(sent));
  own.write(own_values(static_cast<std::size_t>(sent)), stream_);
  std::unique_ptr<GpuMemory> all;
  auto ready = std::make_shared<EventPtr>();
  Submission submission = in_place(own, "a2a", ready, alltoall);
  submission.allocate_output = rows_into(all);
  finish({submit(submission)}, {ready});
  std::vector<float> expected;
  for (int from = 0; from < size(); ++from) {
    int first = 0;
    for (int to = 0; to < rank(); ++to) first += from + to + 1;
    for (int row = 0; row < from + rank() + 1; ++row)
      expected.push_back(static_cast<float>(1000 * from + first + row));
  }
  ASSERT_TRUE(all);
  EXPECT_EQ(all->read(stream_), expected);
}

// The sets' communicators share the ranks' GPUs, and each rank submits in a different order.
TEST_F(GpuJobTest, ProcessSetsThatOverlap) {
  if (size() == 1) GTEST_SKIP() << "one rank has no overlapping sets";
  std::vector<int> most(static_cast<std::size_t>(size()) - 1);
  std::iota(most.begin(), most.end(), 1);
  const ProcessSet all;
  const ProcessSet late = add_process_set(most);
  const ProcessSet ends = add_process_set({0, size() - 1});
  for (int round = 0; round < 5; ++round) {
    std::vector<std::unique_ptr<GpuMemory>> tensors;
    std::vector<const ProcessSet*> sets;
    std::vector<Operation> operations;
    std::vector<std::shared_ptr<EventPtr>> ready;
    for (int turn = 0; turn < 3; ++turn) {
      const int which = (turn + rank() + round) % 3;
      const ProcessSet& set = which == 0 ? all : which == 1 ? late : ends;
      if (set.rank() < 0) continue;
      tensors.push_back(std::make_unique<GpuMemory>(1000));
      tensors.back()->write(std::vector<float>(1000, static_cast<float>(rank() + which)), stream_);
      ready.push_back(std::make_shared<EventPtr>());
      Submission submission =
          in_place(*tensors.back(), "set" + std::to_string(which), ready.back());
      submission.process_set = set.id();
      sets.push_back(&set);
      operations.push_back(submit(std::move(submission)));
    }
    finish(operations, ready);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const int which = sets[i] == &all ? 0 : sets[i] == &late ? 1 : 2;
      float expected = 0;
      for (const int member : sets[i]->ranks()) expected += static_cast<float>(member + which);
      EXPECT_EQ(tensors[i]->read(stream_), std::vector<float>(1000, expected)) << which;
    }
  }
  remove_process_set(late);
  remove_process_set(ends);
  EXPECT_EQ(sum_over(all, 1, "afterwards"), static_cast<float>(size()));
}

// Rank r has r + 1 batches. Ranks that have joined contribute zeros on their GPU.
TEST_F(GpuJobTest, RanksJoinWithUnevenBatches) {
  const ProcessSet all;
  for (int batch = 0; batch <= rank(); ++batch) {
    const std::string name = "batch" + std::to_string(batch);
    EXPECT_EQ(sum_over(all, 1, name), static_cast<float>(size() - batch)) << name;
  }
  const int last = join();
  EXPECT_EQ(last, size() - 1);
  EXPECT_EQ(sum_over(all, 1, "after the join"), static_cast<float>(size()));
}

TEST_F(GpuJobTest, CpuAndGpuTensorsUnderOneNameDisagree) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  GpuMemory on_gpu(8);
  std::vector<float> on_host(8);
  auto ready = std::make_shared<EventPtr>();
  Submission submission = in_place(on_gpu, "mixed", ready);
  if (rank() == 1) {
    submission.input = submission.output = {
        reinterpret_cast<std::byte*>(on_host.data()), 8, DataType::kFloat32, {}, {8}};
    submission.input_ready = nullptr;
  }
  const Operation operation = submit(submission);
  operation.wait();
  EXPECT_THROW(operation.status().raise_if_error(), MismatchError);
}

TEST_F(GpuJobTest, ThousandsOfStepsThatRepeat) {
  constexpr int kTensors = 5;
  constexpr int kSteps = 10'000;
  constexpr int kStepsBetweenChecks = 100;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<GpuMemory>> tensors;
  for (int i = 0; i < kTensors; ++i) {
    tensors.push_back(std::make_unique<GpuMemory>(1000 + 100 * i));
    tensors.back()->write(std::vector<float>(static_cast<std::size_t>(1000 + 100 * i), 1.0F),
                          stream_);
  }
  int step = 0;
  for (; step < kSteps; ++step) {
    // Ranks that share a GPU alternate, so a step may take milliseconds. The query also deviates
    // from the schedule.
    if (step % kStepsBetweenChecks == 0 &&
        !rank_0_says(std::chrono::steady_clock::now() - begin < ProgramDevice::time_limit()))
      break;
    std::vector<Submission> submissions;
    std::vector<std::shared_ptr<EventPtr>> ready;
    for (int i = 0; i < kTensors; ++i) {
      ready.push_back(std::make_shared<EventPtr>());
      submissions.push_back(in_place(*tensors[static_cast<std::size_t>(i)], "w" + std::to_string(i),
                                     ready.back(), Allreduce{.op = ReduceOp::kAverage}));
    }
    finish(submit_all(std::move(submissions), Progress::kCaller), ready);
  }
  if (rank() == 0) std::printf("%d of %d steps\n", step, kSteps);
  EXPECT_GE(step, kStepsBetweenChecks);
  for (const auto& tensor : tensors) EXPECT_EQ(tensor->read(stream_)[999], 1.0F);
}

TEST_F(GpuJobTest, AStreamUnderCaptureIsRefused) {
  ProgramDevice::begin_capture(stream_, ProgramDevice::Capture::kThisThread);
  EXPECT_THROW(record_event(stream_), UsageError);
  EXPECT_TRUE(ProgramDevice::end_capture(stream_));
}

// A capture in the default mode forbids calls that hvd's engine makes on other threads.
TEST_F(GpuJobTest, WorkUnderWayKeepsCapturesValid) {
  const std::size_t floats = std::min<std::size_t>(1 << 20, ProgramDevice::max_floats());
  GpuMemory tensor(floats);
  void* const captured = ProgramDevice::create_stream();
  for (int round = 0; round < 10; ++round) {  // the first round creates the resources
    tensor.write(std::vector<float>(floats, 1.0F), stream_);
    ProgramDevice::synchronize(stream_);
    auto ready = std::make_shared<EventPtr>();
    const Operation operation = submit(in_place(tensor, "during a capture", ready));
    if (round > 0) ProgramDevice::begin_capture(captured, ProgramDevice::Capture::kAllThreads);
    operation.wait();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(10));  // the engine queries its events every 2 ms
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    if (round > 0) {
      EXPECT_TRUE(ProgramDevice::end_capture(captured)) << "round " << round;
    }
    wait_for_event(stream_, *ready);
    EXPECT_EQ(tensor.read(stream_)[77], static_cast<float>(size()));
  }
  ProgramDevice::destroy_stream(captured);
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) {
  if (!hvd::testing::init_gpu_job()) return 0;
  std::printf("%s", hvd::rank() == 0 ? hvd::build_info().c_str() : "");
  const int failed = hvd::testing::run_all_tests(&argc, argv);
  hvd::shutdown();
  return failed;
}
