// Whole jobs with tensors on a GPU, through the public interface, under mpirun; several ranks may
// share the GPU. CMakeLists.txt says with which settings.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "support/watchdog.h"

namespace hvd {
namespace {

int visible_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

class GpuMemory {
 public:
  explicit GpuMemory(std::size_t floats) : floats_(floats) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), floats * sizeof(float) + 1),
              cudaSuccess);
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() { cudaFree(data_); }
  void write(const std::vector<float>& values, cudaStream_t stream) {
    ASSERT_EQ(cudaMemcpyAsync(data_, values.data(), values.size() * sizeof(float),
                              cudaMemcpyHostToDevice, stream),
              cudaSuccess);
  }
  std::vector<float> read(cudaStream_t stream) const {
    std::vector<float> values(floats_);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), data_, floats_ * sizeof(float), cudaMemcpyDeviceToHost,
                              stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return values;
  }
  TensorView view() const {
    const auto count = static_cast<std::int64_t>(floats_);
    return {reinterpret_cast<std::byte*>(data_),
            count,
            DataType::kFloat32,
            {DeviceType::kCuda, *gpu_index()},
            {count}};
  }

 private:
  float* data_ = nullptr;
  std::size_t floats_;
};

class GpuJobTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(gpu_index().has_value());
    ASSERT_EQ(cudaSetDevice(*gpu_index()), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override { cudaStreamDestroy(stream_); }

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

  cudaStream_t stream_ = nullptr;
};

TEST_F(GpuJobTest, FusedAveragesOfManySizes) {
  const std::size_t sizes[] = {1, 7, 1000, 65539, 1 << 20, 3 << 20};
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
  submission.allocate_output = [&all](const OutputSizes& sizes) {
    all = std::make_unique<GpuMemory>(static_cast<std::size_t>(
        std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0})));
    return all->view();
  };
  finish({submit(submission)}, {ready});
  std::vector<float> expected;
  for (int from = 0; from < size(); ++from)
    expected.insert(expected.end(), static_cast<std::size_t>(from + 1), static_cast<float>(from));
  EXPECT_EQ(all->read(stream_), expected);
}

TEST_F(GpuJobTest, CpuAndGpuTensorsUnderOneNameDisagree) {
  if (size() == 1) GTEST_SKIP() << "one rank agrees with itself";
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
  constexpr int kBetweenLooks = 100;
  constexpr std::chrono::seconds kPatience(15);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<GpuMemory>> tensors;
  for (int i = 0; i < kTensors; ++i) {
    tensors.push_back(std::make_unique<GpuMemory>(1000 + 100 * i));
    tensors.back()->write(std::vector<float>(static_cast<std::size_t>(1000 + 100 * i), 1.0F),
                          stream_);
  }
  int step = 0;
  for (; step < kSteps; ++step) {
    // Ranks that share a GPU take turns, so that a step may take milliseconds. Asking is a
    // deviation from the schedule, too.
    if (step % kBetweenLooks == 0 &&
        !rank_0_says(std::chrono::steady_clock::now() - begin < kPatience))
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
  EXPECT_GE(step, kBetweenLooks);
  for (const auto& tensor : tensors) EXPECT_EQ(tensor->read(stream_)[999], 1.0F);
}

TEST_F(GpuJobTest, AStreamUnderCaptureIsRefused) {
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_THROW(record_event(stream_), UsageError);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
}

// A capture in the default mode forbids all threads of the process what hvd's engine does.
TEST_F(GpuJobTest, WorkUnderWaySpoilsNoCapture) {
  GpuMemory tensor(1 << 20);
  cudaStream_t captured = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking), cudaSuccess);
  for (int round = 0; round < 10; ++round) {  // the first makes what is made once
    tensor.write(std::vector<float>(1 << 20, 1.0F), stream_);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    auto ready = std::make_shared<EventPtr>();
    const Operation operation = submit(in_place(tensor, "during a capture", ready));
    if (round > 0) {
      EXPECT_EQ(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), cudaSuccess);
    }
    operation.wait();
    std::this_thread::sleep_for(
        std::chrono::milliseconds(10));  // the engine looks at what is queued every 2 ms
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    if (round > 0) {
      cudaGraph_t graph = nullptr;
      EXPECT_EQ(cudaStreamEndCapture(captured, &graph), cudaSuccess) << "round " << round;
      cudaGraphDestroy(graph);
    }
    wait_for_event(stream_, *ready);
    EXPECT_EQ(tensor.read(stream_)[77], static_cast<float>(size()));
  }
  cudaStreamDestroy(captured);
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) {
  if (hvd::visible_gpus() == 0) {
    std::printf("skipped: no GPU\n%s", hvd::build_info().c_str());
    return 0;
  }
  if (std::getenv("HVD_TEST_HOSTID_PER_RANK") != nullptr) {
    const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
    ::setenv("NCCL_HOSTID", (std::string("hvd-test-") + (rank != nullptr ? rank : "0")).c_str(), 1);
  }
  try {
    hvd::init();
  } catch (const hvd::UsageError& error) {
    const bool cannot = std::string(error.what()).find("share the GPU") != std::string::npos;
    if (!cannot || std::getenv("HVD_TEST_SKIP_UNSHARED") == nullptr) throw;
    std::printf("skipped: %s (NCCL lets ranks share a GPU from 2.30 on)\n%s", error.what(),
                hvd::build_info().c_str());
    return 0;
  }
  std::printf("%s", hvd::rank() == 0 ? hvd::build_info().c_str() : "");
  const int failed = hvd::testing::run_all_tests(&argc, argv);
  hvd::shutdown();
  return failed;
}
