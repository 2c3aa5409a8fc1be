#include <hvd/torch.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/error.h"
#include "torch/support/cuda_test.h"
#include "torch/support/fake_cuda.h"

// The order between the program's streams and hvd's, and the ownership of memory in the meantime.
// The first tests check that the simulation detects the faults that the others look for.

namespace hvd::testing {
namespace {

using CudaStreams = CudaTest;

/// An allreduce of a tensor on the GPU without the adapter, which would order the streams.
Submission bare_allreduce(const char* name, const torch::Tensor& tensor) {
  Submission submission;
  submission.name = name;
  submission.input = {static_cast<std::byte*>(tensor.data_ptr()),
                      tensor.numel(),
                      DataType::kFloat32,
                      {DeviceType::kCuda, *gpu_index()},
                      {tensor.numel()}};
  submission.output = submission.input;
  submission.keep_alive = std::make_shared<torch::Tensor>(tensor);
  return submission;
}

bool contains(const std::vector<std::string>& faults, const std::string& text) {
  return std::any_of(faults.begin(), faults.end(), [&](const std::string& fault) {
    return fault.find(text) != std::string::npos;
  });
}

TEST_F(CudaStreams, ForgottenInputEventIsNoticed) {
  if (size() == 1) GTEST_SKIP() << "hvd does not touch a tensor that is reduced in place alone";
  const torch::Tensor tensor = torch::ones({1000}, device());
  const Operation operation = submit(bare_allreduce("no event", tensor));
  operation.wait();
  wait_for_event(current_stream().native_handle(), operation.output_ready());
  EXPECT_TRUE(contains(take_cuda_faults(), "and neither waits for the other"));
}

// hvd's buffers come from the simulated allocator, in the order in which they may be used;
// otherwise the test ends with faults.
TEST_F(CudaStreams, BuffersComeFromLibTorchsAllocator) {
  if (size() == 1) GTEST_SKIP() << "hvd does not touch a tensor that is reduced in place alone";
  const HvdCalls before = hvd_calls();
  for (const std::int64_t count : {1000, 50000, 200000}) {  // each needs a larger buffer
    const std::vector<torch::Tensor> tensors = {torch::ones({count}, device()),
                                                torch::ones({count}, device())};
    grouped_allreduce_async_(tensors, {.name = "group", .op = ReduceOp::kSum}).wait_all();
    for (const torch::Tensor& tensor : tensors)
      EXPECT_TRUE(near(tensor.cpu(), torch::full({count}, static_cast<float>(size()))));
  }
  EXPECT_GE(hvd_calls().launches, before.launches + 6) << "they were not packed and unpacked";
  EXPECT_EQ(hvd_calls().made, before.made);
}

TEST_F(CudaStreams, ForgottenWaitIsNoticed) {
  if (size() == 1) GTEST_SKIP() << "hvd does not touch a tensor that is reduced in place alone";
  const torch::Tensor tensor = torch::ones({1000}, device());
  Submission submission = bare_allreduce("no wait", tensor);
  submission.input_ready = record_event(current_stream().native_handle());
  const Operation operation = submit(std::move(submission));
  operation.wait();
  (tensor + 1).cpu();
  EXPECT_TRUE(contains(take_cuda_faults(), "and neither waits for the other"));
  wait_for_event(current_stream().native_handle(), operation.output_ready());
  EXPECT_TRUE(near(tensor.cpu(), torch::full({1000}, static_cast<float>(size()))));
}

TEST_F(CudaStreams, ForgottenRecordStreamIsNoticed) {
  torch::Tensor tensor = torch::ones({1000}, device());
  const c10::Stream main = current_stream(), side = side_stream();
  order(main, side);
  {
    const c10::StreamGuard guard(side);
    torch::Tensor reader = tensor + 1;
  }
  EXPECT_TRUE(take_cuda_faults().empty());
  tensor.reset();
  torch::zeros({1000}, device());  // gets the memory that the other stream may still read
  EXPECT_TRUE(contains(take_cuda_faults(), "and neither waits for the other"));
  order(side, main);
}

TEST_F(CudaStreams, SubmittedOnOneStreamWaitedForOnAnother) {
  for (int round = 0; round < 10; ++round) {
    Handle handle;
    {
      const c10::StreamGuard a(side_stream());
      const torch::Tensor tensor = gpu_tensor({3000}, torch::kFloat32, round);
      handle = allreduce_async(tensor, {.name = "a to b", .op = ReduceOp::kSum});
    }
    const torch::Tensor expected =
        reference_reduce(every_rank({3000}, torch::kFloat32, round), ReduceOp::kSum);
    {
      const c10::StreamGuard b(side_stream());
      EXPECT_TRUE(on_gpu(handle.wait(), expected));
    }
    // Each waiting thread has its own stream.
    std::thread([&] { EXPECT_TRUE(on_gpu(handle.wait(), expected)); }).join();
    EXPECT_TRUE(on_gpu(handle.wait(), expected));
  }
}

TEST_F(CudaStreams, CopiedBackOnTheFirstWaitersStream) {
  for (int round = 0; round < 5; ++round) {
    const torch::Tensor tensor = gpu_tensor({40, 30}, torch::kFloat32, round).t();
    const Handle handle = allreduce_async_(
        tensor, {.name = "strided", .op = ReduceOp::kSum, .compression = Compression::kFloat16});
    const torch::Tensor expected =
        reference_reduce(every_rank({40, 30}, torch::kFloat32, round), ReduceOp::kSum).t();
    std::thread([&] {
      const c10::StreamGuard other(side_stream());
      handle.wait();
    }).join();
    EXPECT_TRUE(on_gpu(handle.wait(), expected));
  }
}

// The result goes back to the pool of the stream that it was allocated under while another stream
// still reads it.
TEST_F(CudaStreams, MemoryIsNotUsedAgainWhileAnotherStreamReads) {
  for (int round = 0; round < 5; ++round) {
    const torch::Tensor own = gpu_tensor({rank() + 1, 64}, torch::kFloat32, round);
    const Handle reduced = allreduce_async(gpu_tensor({64}, torch::kFloat32, round),
                                           {.name = "reduced", .op = ReduceOp::kSum});
    const Handle wire = allreduce_async(gpu_tensor({64}, torch::kFloat32, round),
                                        {.name = "wire", .compression = Compression::kFloat16});
    const Handle gathered = allgather_async(own, {.name = "gathered"});
    {
      const c10::StreamGuard side(side_stream());
      std::vector<torch::Tensor> kept;
      for (Handle handle : {reduced, wire, gathered}) kept.push_back(handle.wait() + 1);
    }
  }
  for (int i = 0; i < 20; ++i) torch::zeros({64}, device());
  for (std::int64_t rows = 1; rows < 8; ++rows) torch::zeros({rows, 64}, device());
}

TEST_F(CudaStreams, InputMayBeDroppedAndItsMemoryUsedAgain) {
  std::vector<Handle> handles;
  for (int i = 0; i < 20; ++i) {
    handles.push_back(
        allreduce_async(gpu_tensor({500}, torch::kFloat32, i),
                        {.name = "dropped" + std::to_string(i), .op = ReduceOp::kSum}));
    torch::full({500}, -1.0F, device());
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(on_gpu(handles[static_cast<std::size_t>(i)].wait(),
                       reference_reduce(every_rank({500}, torch::kFloat32, i), ReduceOp::kSum)));
  }
}

// The output is allocated when the other rank has submitted. By then the submitter's stream has
// used that memory for another tensor.
TEST_F(CudaStreams, LateOutputWaitsForTheFormerUseOfItsMemory) {
  if (size() == 1) GTEST_SKIP() << "there is no other rank to wait for";
  const std::int64_t rows = 1000 * size();
  const torch::Tensor own = gpu_tensor({1000}, torch::kFloat32);
  const auto rendezvous = [] { allreduce(torch::zeros({1}), {.name = "rendezvous"}); };
  for (int round = 0; round < 3; ++round) {
    Handle handle;
    if (rank() == 0) {
      handle = allgather_async(own, {.name = "late"});
      torch::full({rows}, -1.0F, device());
      rendezvous();
    } else {
      rendezvous();
      handle = allgather_async(own, {.name = "late"});
    }
    EXPECT_TRUE(on_gpu(handle.wait(), torch::cat(every_rank({1000}, torch::kFloat32))));
    rendezvous();
  }
}

TEST_F(CudaStreams, NoThreadWaitsForTheDevice) {
  const torch::Tensor tensor = gpu_tensor({300}, torch::kFloat32);
  allreduce(tensor, {.name = "first"});
  const int host = fake_host_waits();
  const int hvd = hvd_calls().synchronize;
  for (int i = 0; i < 10; ++i) {
    allreduce(tensor, {.name = "first"});
    grouped_allreduce_async_({tensor, tensor.clone()}, {.name = "group"}).wait_all();
    allgather(tensor, {.name = "rows"});
  }
  EXPECT_EQ(fake_host_waits(), host);
  EXPECT_EQ(hvd_calls().synchronize, hvd);
}

}  // namespace
}  // namespace hvd::testing
