#include <hvd/torch.h>

#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/error.h"
#include "torch/support/cuda_test.h"

// Every operation of the adapter on a GPU, simulated or (in test/gpu) real. The tests compare
// results with the CPU's, check devices, and check that memory is not accessed too early or too
// late.

namespace hvd::testing {
namespace {

using CudaOperations = CudaTest;
const ProcessSet kAll;

torch::Tensor sum_of_all(at::IntArrayRef shape, torch::ScalarType type, int seed = 0) {
  return reference_reduce(every_rank(shape, type, seed), ReduceOp::kSum);
}

/// A rank's input of an allgather, with rank + 1 rows.
std::vector<torch::Tensor> ragged(int seed) {
  std::vector<torch::Tensor> rows;
  for (int r = 0; r < size(); ++r)
    rows.push_back(rank_tensor(r, {r + 1, 3}, torch::kFloat32, seed));
  return rows;
}

TEST_F(CudaOperations, ComputeOnTheRanksOwnGpu) {
  ASSERT_TRUE(gpu_index().has_value());
  EXPECT_EQ(device(), torch::Device(torch::kCUDA,
                                    static_cast<c10::DeviceIndex>(local_rank() % cuda_devices())));
}

TEST_F(CudaOperations, AllreduceEveryTypeAndOp) {
  for (const auto type : {torch::kUInt8, torch::kInt32, torch::kInt64, torch::kFloat16,
                          torch::kBFloat16, torch::kFloat32, torch::kFloat64}) {
    for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
      SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::string(to_string(op)));
      const torch::Tensor result = allreduce(gpu_tensor({5, 7}, type), {.name = "every", .op = op});
      EXPECT_TRUE(on_gpu(result, reference_reduce(every_rank({5, 7}, type), op)));
    }
  }
}

TEST_F(CudaOperations, AllreduceSizes) {
  for (const std::int64_t count :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{127}, std::int64_t{1'500'007}}) {
    SCOPED_TRACE(count);
    EXPECT_TRUE(on_gpu(
        allreduce(gpu_tensor({count}, torch::kFloat32), {.name = "sizes", .op = ReduceOp::kSum}),
        sum_of_all({count}, torch::kFloat32)));
  }
}

TEST_F(CudaOperations, AllreduceInPlaceAsyncAndStrided) {
  torch::Tensor whole = gpu_tensor({6, 4}, torch::kFloat32);
  const Handle handle = allreduce_async_(whole, {.name = "in place", .op = ReduceOp::kSum});
  EXPECT_TRUE(handle.wait().is_same(whole));
  EXPECT_TRUE(on_gpu(whole, sum_of_all({6, 4}, torch::kFloat32)));

  const torch::Tensor strided = gpu_tensor({6, 4}, torch::kFloat32).t();
  ASSERT_FALSE(strided.is_contiguous());
  allreduce_(strided, {.name = "strided", .op = ReduceOp::kSum});
  EXPECT_TRUE(on_gpu(strided, sum_of_all({6, 4}, torch::kFloat32).t()));
}

TEST_F(CudaOperations, AllreduceCompressed) {
  torch::Tensor tensor = gpu_tensor({33}, torch::kFloat32);
  const torch::Tensor expected =
      sum_of_all({33}, torch::kFloat32);  // small integers, which are exact in 16 bits
  EXPECT_TRUE(on_gpu(
      allreduce(tensor,
                {.name = "wire", .op = ReduceOp::kSum, .compression = Compression::kBFloat16}),
      expected));
  allreduce_(tensor,
             {.name = "wire in place", .op = ReduceOp::kSum, .compression = Compression::kFloat16});
  EXPECT_TRUE(on_gpu(tensor, expected));
}

TEST_F(CudaOperations, Grouped) {
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 9; ++i) tensors.push_back(gpu_tensor({i + 1, 3}, torch::kFloat32, i));
  const std::vector<torch::Tensor> results =
      grouped_allreduce(tensors, {.name = "group", .op = ReduceOp::kSum});
  ASSERT_EQ(results.size(), tensors.size());
  for (int i = 0; i < 9; ++i) {
    EXPECT_TRUE(
        on_gpu(results[static_cast<std::size_t>(i)], sum_of_all({i + 1, 3}, torch::kFloat32, i)));
  }
  // Repeats the operation, as a training loop does, with memory that is reused.
  for (int round = 0; round < 20; ++round) {
    grouped_allreduce_async_(tensors, {.name = "group in place", .op = ReduceOp::kMax}).wait_all();
    EXPECT_TRUE(on_gpu(tensors[3],
                       reference_reduce(every_rank({4, 3}, torch::kFloat32, 3), ReduceOp::kMax)));
  }
}

TEST_F(CudaOperations, GroupOnBothDevices) {
  const std::vector<torch::Tensor> results = grouped_allreduce(
      {gpu_tensor({5}, torch::kFloat32), rank_tensor(rank(), {6}, torch::kFloat32)},
      {.name = "both", .op = ReduceOp::kSum});
  EXPECT_TRUE(on_gpu(results[0], sum_of_all({5}, torch::kFloat32)));
  EXPECT_TRUE(results[1].is_cpu());
  EXPECT_TRUE(near(results[1], sum_of_all({6}, torch::kFloat32)));
}

TEST_F(CudaOperations, AllgatherWithDifferentRows) {
  for (int round = 0; round < 3; ++round) {
    const std::vector<torch::Tensor> rows = ragged(round);
    const torch::Tensor own = own_of(rows, kAll).to(device());
    EXPECT_TRUE(on_gpu(allgather(own, {.name = "rows"}), torch::cat(rows)));
    EXPECT_TRUE(on_gpu(allgather_async(own, {.name = "rows async"}).wait(), torch::cat(rows)));
    const std::vector<torch::Tensor> both =
        grouped_allgather({own, own * 2}, {.name = "rows group"});
    EXPECT_TRUE(on_gpu(both[0], torch::cat(rows)));
    EXPECT_TRUE(on_gpu(both[1], torch::cat(rows) * 2));
  }
  const std::vector<torch::Tensor> squares = every_rank({2, 2}, torch::kFloat32);
  EXPECT_TRUE(
      on_gpu(all_gather_into_tensor(own_of(squares, kAll).to(device()), -1, {.name = "columns"}),
             torch::cat(squares, 1)));
}

TEST_F(CudaOperations, Broadcast) {
  const int root = size() - 1;
  EXPECT_TRUE(on_gpu(broadcast(gpu_tensor({8}, torch::kInt64), root, {.name = "out"}),
                     rank_tensor(root, {8}, torch::kInt64)));
  torch::Tensor tensor = gpu_tensor({3, 5}, torch::kFloat32);
  broadcast_(tensor, root, {.name = "in"});
  EXPECT_TRUE(on_gpu(tensor, rank_tensor(root, {3, 5}, torch::kFloat32)));
}

TEST_F(CudaOperations, Reducescatter) {
  const std::int64_t rows = 2 * size() + 1;
  const torch::Tensor result = reducescatter(gpu_tensor({rows, 3}, torch::kFloat32),
                                             {.name = "scatter", .op = ReduceOp::kSum});
  std::int64_t first = 0;
  for (int r = 0; r < rank(); ++r) first += rows_of_member(rows, size(), r);
  EXPECT_TRUE(on_gpu(result, sum_of_all({rows, 3}, torch::kFloat32)
                                 .narrow(0, first, rows_of_member(rows, size(), rank()))));
}

TEST_F(CudaOperations, AlltoallAndGather) {
  // Every rank sends r + 1 rows to rank r.
  std::vector<std::int64_t> splits;
  std::int64_t rows = 0, first = 0;
  for (int r = 0; r < size(); ++r) {
    if (r < rank()) first += r + 1;
    splits.push_back(r + 1);
    rows += r + 1;
  }
  std::vector<torch::Tensor> expected;
  for (int r = 0; r < size(); ++r)
    expected.push_back(rank_tensor(r, {rows, 2}, torch::kFloat32).narrow(0, first, rank() + 1));
  const AlltoallResult result =
      alltoall(gpu_tensor({rows, 2}, torch::kFloat32), torch::tensor(splits), {.name = "exchange"});
  EXPECT_TRUE(on_gpu(result.output, torch::cat(expected)));
  EXPECT_TRUE(near(result.received_splits, torch::full({size()}, rank() + 1, torch::kInt64)));

  const torch::Tensor gathered = gather(gpu_tensor({2, 3}, torch::kFloat32), 0, {.name = "gather"});
  if (rank() == 0) {
    EXPECT_TRUE(on_gpu(gathered, torch::cat(every_rank({2, 3}, torch::kFloat32))));
  } else {
    EXPECT_FALSE(gathered.defined());
  }
}

TEST_F(CudaOperations, ReduceAndScatter) {
  const int root = size() - 1;
  const torch::Tensor sum =
      reduce(gpu_tensor({6}, torch::kFloat32), root, {.name = "reduce", .op = ReduceOp::kSum});
  const torch::Tensor expected = sum_of_all({6}, torch::kFloat32);
  EXPECT_TRUE(on_gpu(sum, rank() == root ? expected : torch::zeros_like(expected)));
  const std::int64_t rows = 2 * size() + 1;
  const torch::Tensor mine =
      scatter(gpu_tensor({rank() == root ? rows : 0, 3}, torch::kFloat32), root, {.name = "rows"});
  EXPECT_TRUE(on_gpu(mine, rank_tensor(root, {rows, 3}, torch::kFloat32)
                               .narrow(0, rank() == 0 ? 0 : 2 * rank() + 1, rank() == 0 ? 3 : 2)));
}

TEST_F(CudaOperations, IntoTensorsOfTheCaller) {
  for (int round = 0; round < 3; ++round) {
    const std::vector<torch::Tensor> rows = ragged(round);
    const torch::Tensor own = own_of(rows, kAll).to(device());
    // The caller's stream still writes to the output when the operation is submitted.
    const torch::Tensor all = torch::full_like(torch::cat(rows).to(device()), -1);
    EXPECT_TRUE(allgather_into(all, own, {.name = "rows into"}).is_same(all));
    EXPECT_TRUE(on_gpu(all, torch::cat(rows)));
    const torch::Tensor sum = torch::full({5}, -1.0, own.options());
    allreduce_into_async(sum, gpu_tensor({5}, torch::kFloat32),
                         {.name = "sum into", .op = ReduceOp::kSum})
        .wait();
    EXPECT_TRUE(on_gpu(sum, sum_of_all({5}, torch::kFloat32)));
  }
}

TEST_F(CudaOperations, BitwiseOperationsGoThroughTheHost) {
  torch::Tensor expected = rank_tensor(0, {9}, torch::kInt32);
  for (int r = 1; r < size(); ++r)
    expected = torch::bitwise_xor(expected, rank_tensor(r, {9}, torch::kInt32));
  EXPECT_TRUE(
      on_gpu(allreduce(gpu_tensor({9}, torch::kInt32), {.name = "xor", .op = ReduceOp::kBitXor}),
             expected));
}

TEST_F(CudaOperations, Differentiable) {
  torch::Tensor x = gpu_tensor({4}, torch::kFloat32).requires_grad_();
  const torch::Tensor weight = gpu_tensor({4}, torch::kFloat32, 3);
  (allreduce(x, {.name = "sum", .op = ReduceOp::kSum}) * weight).sum().backward();
  EXPECT_TRUE(on_gpu(x.grad(), sum_of_all({4}, torch::kFloat32, 3)));

  torch::Tensor y = gpu_tensor({2, 2}, torch::kFloat32).requires_grad_();
  (allgather(y, {.name = "gathered"}) * (rank() + 1.0)).sum().backward();
  EXPECT_TRUE(on_gpu(y.grad(), torch::full({2, 2}, size() * (size() + 1) / 2.0)));
}

TEST_F(CudaOperations, ObjectsWithTensors) {
  const auto tensor = broadcast_object(gpu_tensor({3}, torch::kFloat32), size() - 1);
  EXPECT_TRUE(on_gpu(tensor, rank_tensor(size() - 1, {3}, torch::kFloat32)));
  const auto act = [] { broadcast_object(c10::IValue(gpu_tensor({3}, torch::kFloat32))); };
  const std::string message = rank() == 0 ? message_of<UsageError>(act) : message_of<Error>(act);
  EXPECT_NE(message.find(rank() == 0 ? "cannot be sent" : "could not encode"), std::string::npos)
      << message;
}

TEST_F(CudaOperations, RefuseAnotherGpu) {
  if (cuda_devices() < 2) GTEST_SKIP() << "there is no other GPU";
  const torch::Device other(torch::kCUDA,
                            static_cast<c10::DeviceIndex>((device().index() + 1) % cuda_devices()));
  const torch::Tensor tensor = torch::zeros({3}, other);
  for (const auto& act :
       std::vector<std::function<void()>>{[&] { allreduce(tensor, {.name = "wrong"}); },
                                          [&] { allgather(tensor, {.name = "wrong"}); },
                                          [&] { broadcast_(tensor, 0, {.name = "wrong"}); },
                                          [&] { reducescatter(tensor, {.name = "wrong"}); }}) {
    const std::string message = message_of<UsageError>(act);
    EXPECT_NE(
        message.find("'wrong': the tensor is on " + other.str() + "; expected " + device().str()),
        std::string::npos)
        << message;
  }
}

TEST_F(CudaOperations, RefuseOneNameOnBothDevices) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  torch::Tensor tensor = rank_tensor(rank(), {4}, torch::kFloat32);
  if (rank() == 0) tensor = tensor.to(device());
  const std::string message =
      message_of<MismatchError>([&] { allreduce(tensor, {.name = "mixed"}); });
  EXPECT_NE(message.find("'mixed'"), std::string::npos) << message;
  EXPECT_NE(message.find("cuda"), std::string::npos) << message;
}

}  // namespace
}  // namespace hvd::testing
