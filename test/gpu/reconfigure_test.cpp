// hvd::reconfigure() between processes with a simulated GPU each, and a simulated NCCL.
#include "hvd/reconfigure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "elastic/forked_ranks.h"
#include "elastic/handles.h"
#include "gpu/program_device.h"
#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/hvd.h"

namespace hvd::testing {
namespace {

constexpr std::size_t kFloats = 1000;
constexpr int kFirstSlot = 3;

float sum_on_gpu(float own, void* stream, std::byte* memory) {
  std::vector<float> values(kFloats, own);
  ProgramDevice::copy_in(memory, values.data(), kFloats * sizeof(float), stream);
  const TensorView view{.data = memory,
                        .count = kFloats,
                        .dtype = DataType::kFloat32,
                        .device = {DeviceType::kCuda, *gpu_index()},
                        .shape = {kFloats}};
  Submission submission{.name = "sum", .parameters = Allreduce{}, .input = view, .output = view};
  submission.input_ready = record_event(stream);
  const Operation operation = submit(std::move(submission));
  operation.wait();
  operation.status().raise_if_error();
  wait_on_host(operation.output_ready());
  wait_for_event(stream, operation.output_ready());
  ProgramDevice::copy_out(values.data(), memory, kFloats * sizeof(float), stream);
  EXPECT_EQ(std::ranges::count(values, values.front()), static_cast<std::ptrdiff_t>(kFloats));
  return values.front();
}

/// Returns the folder in which the ranks that are forked later exchange their launches.
std::string use_simulated_nccl(const std::string& name) {
  const std::string folder = ::testing::TempDir() + name + "." + std::to_string(::getpid());
  ::setenv("HVD_TEST_NCCL_FOLDER", folder.c_str(), 1);
  ::setenv("HVD_BACKEND", "nccl", 1);
  return folder;
}

// The GPU is that of LOCAL_RANK, works in every later job, and does not change with the local rank.
TEST(ReconfigureOnGpu, TheGpuServesTheJobsOneAfterTheOther) {
  const std::string folder = use_simulated_nccl("reconfigure_nccl");
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    ::setenv("LOCAL_RANK", std::to_string(kFirstSlot + own).c_str(), 1);
    ASSERT_TRUE(ProgramDevice::prepare(own));
    const Options options{.init_timeout = std::chrono::seconds(20)};
    reconfigure(1, exchange_handles(board, 0, own, {0, 1, 2}), options);
    ASSERT_EQ(gpu_index(), kFirstSlot + own);
    ProgramDevice::use(*gpu_index());
    void* const stream = ProgramDevice::create_stream();
    std::byte* const memory = ProgramDevice::allocate(kFloats * sizeof(float));
    EXPECT_EQ(sum_on_gpu(1, stream, memory), 3);
    board.post(1, own);
    if (own == 0) ::pause();
    EXPECT_THROW(for (;;) sum_on_gpu(1, stream, memory), PeerLostError);
    for (int time = 2; time < 8; ++time) {
      reconfigure(time, exchange_handles(board, time, own, {1, 2}), options);
      EXPECT_EQ(local_rank(), own - 1);
      EXPECT_EQ(gpu_index(), kFirstSlot + own);
      for (int step = 0; step < 5; ++step)
        EXPECT_EQ(sum_on_gpu(static_cast<float>(own), stream, memory), 3);
    }
    shutdown();
    EXPECT_EQ(ProgramDevice::drain_faults(), std::vector<std::string>());
  });
  for (const int process : {0, 1, 2}) board.read(1, process);
  ranks.kill(0);
  EXPECT_EQ(ranks.wait(0), 128 + SIGKILL);
  ranks.expect_all_succeed();
  std::filesystem::remove_all(folder);
}

// All members receive the reason at once, also the one whose GPU works.
TEST(ReconfigureOnGpu, AGpuThatHangsIsReported) {
  const std::string folder = use_simulated_nccl("reconfigure_hang");
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    ASSERT_TRUE(ProgramDevice::prepare(own));
    const Options options{.init_timeout = std::chrono::seconds(20)};
    reconfigure(1, exchange_handles(board, 0, own, {0, 1}), options);
    ProgramDevice::use(*gpu_index());
    void* const stream = ProgramDevice::create_stream();
    std::byte* const memory = ProgramDevice::allocate(kFloats * sizeof(float));
    EXPECT_EQ(sum_on_gpu(1, stream, memory), 2);
    if (own == 1) ProgramDevice::hang(stream);
    const auto handles = exchange_handles(board, 1, own, {0, 1});
    try {
      reconfigure(2, handles, options);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("hvd::reconfigure 2: the GPU of rank 1 ("), std::string::npos) << text;
    }
    EXPECT_FALSE(is_initialized());
    board.post(2, own);
    board.read(2, 0);
    board.read(2, 1);
    if (own == 1) std::_Exit(HasFailure() ? 1 : 0);  // exit handlers may wait for the GPU
    reconfigure(3, {reconfigure_handle()}, options);
    EXPECT_EQ(sum_on_gpu(5, stream, memory), 5);
    shutdown();
  });
  ranks.expect_all_succeed();
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace hvd::testing
