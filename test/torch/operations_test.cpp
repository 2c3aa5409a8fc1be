#include <array>
#include <map>
#include <thread>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

const std::vector<torch::ScalarType> kTypes = {
    torch::kUInt8, torch::kInt8,    torch::kInt16,    torch::kInt32,   torch::kInt64,
    torch::kBool,  torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64};
const std::vector<ReduceOp> kOps = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                    ReduceOp::kMax, ReduceOp::kProduct};

TEST(Allreduce, EveryOpAndTypeMatchesASerialReference) {
  for (const torch::ScalarType type : kTypes) {
    for (const ReduceOp op : kOps) {
      SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::string(to_string(op)));
      const torch::Tensor own = rank_tensor(rank(), {3, 5}, type);
      const torch::Tensor before = own.clone();
      const AllreduceOptions options{.name = "matrix", .op = op};
      if (type == torch::kBool && op == ReduceOp::kAverage) {
        EXPECT_THROW(allreduce(own, options), UsageError);
        continue;
      }
      const torch::Tensor expected = reference_reduce(every_rank({3, 5}, type), op);
      EXPECT_TRUE(near(allreduce(own, options), expected, 1e-3));
      EXPECT_TRUE(torch::equal(own, before));
      EXPECT_TRUE(near(allreduce_async(own, options).wait(), expected, 1e-3));
      const torch::Tensor result = allreduce_(own, options);
      EXPECT_TRUE(result.is_same(own));
      EXPECT_TRUE(near(own, expected, 1e-3));
    }
  }
}

TEST(Allreduce, TheDefaultIsTheAverage) {
  const torch::Tensor own = torch::full({3}, static_cast<float>(rank()));
  EXPECT_TRUE(near(allreduce(own), torch::full({3}, (static_cast<float>(size()) - 1) / 2)));
}

TEST(Allreduce, ShapesWithoutElementsOrDimensions) {
  EXPECT_TRUE(
      near(allreduce(torch::tensor(2.0), {.op = ReduceOp::kSum}), torch::tensor(2.0 * size())));
  const torch::Tensor empty = allreduce(torch::empty({0, 3}), {.name = "empty"});
  EXPECT_EQ(empty.sizes(), at::IntArrayRef({0, 3}));
}

TEST(Allreduce, NonContiguousTensors) {
  const auto inputs = every_rank({4, 6}, torch::kFloat32);
  const torch::Tensor expected = reference_reduce(inputs, ReduceOp::kSum);
  const AllreduceOptions options{.name = "strided", .op = ReduceOp::kSum};
  const torch::Tensor own = inputs[static_cast<std::size_t>(rank())];

  const torch::Tensor out = allreduce(own.t(), options);
  EXPECT_TRUE(near(out, expected.t()));
  EXPECT_TRUE(out.is_contiguous());

  const torch::Tensor target = own.clone();
  allreduce_(target.t(), options);
  EXPECT_TRUE(near(target, expected));

  const torch::Tensor columns = own.clone();
  Handle handle = allreduce_async_(columns.slice(1, 0, 6, 2), options);
  handle.wait();
  EXPECT_TRUE(near(columns.slice(1, 0, 6, 2), expected.slice(1, 0, 6, 2)));
  EXPECT_TRUE(near(columns.slice(1, 1, 6, 2), own.slice(1, 1, 6, 2)));
}

TEST(Allreduce, ChannelsLast) {
  const auto inputs = every_rank({2, 3, 4, 5}, torch::kFloat32);
  const torch::Tensor own =
      inputs[static_cast<std::size_t>(rank())].contiguous(torch::MemoryFormat::ChannelsLast);
  const torch::Tensor target = own.clone();
  allreduce_(target, {.name = "nhwc", .op = ReduceOp::kSum});
  EXPECT_TRUE(near(target, reference_reduce(inputs, ReduceOp::kSum)));
  EXPECT_TRUE(target.is_contiguous(torch::MemoryFormat::ChannelsLast));
}

TEST(Allreduce, Factors) {
  const auto inputs = every_rank({7}, torch::kFloat32);
  const torch::Tensor result = allreduce(
      inputs[static_cast<std::size_t>(rank())],
      {.name = "scaled", .op = ReduceOp::kSum, .prescale_factor = 0.5, .postscale_factor = 3});
  EXPECT_TRUE(near(result, reference_reduce(inputs, ReduceOp::kSum) * 1.5));
}

TEST(Allreduce, CompressionKeepsTheTypeAndOnlyTouchesWideFloats) {
  const auto inputs = every_rank({33}, torch::kFloat64);
  const torch::Tensor exact = reference_reduce(inputs, ReduceOp::kAverage);
  for (const Compression compression : {Compression::kFloat16, Compression::kBFloat16}) {
    const AllreduceOptions options{.name = "compressed", .compression = compression};
    for (const torch::ScalarType type : {torch::kFloat32, torch::kFloat64}) {
      const torch::Tensor own = inputs[static_cast<std::size_t>(rank())].to(type) / 3;
      const torch::Tensor result = allreduce(own, options);
      EXPECT_EQ(result.scalar_type(), type);
      EXPECT_TRUE(near(result, (exact / 3).to(type), 0.02));
      // Every value is exact in the 16 bits that were sent.
      const auto wire = compression == Compression::kFloat16 ? torch::kFloat16 : torch::kBFloat16;
      EXPECT_TRUE(torch::equal(result, result.to(wire).to(type)));
      allreduce_(own, options);
      EXPECT_TRUE(torch::equal(own, result));
    }
    const torch::Tensor big = torch::tensor({std::int64_t{1} << 54}) + 1;
    EXPECT_TRUE(torch::equal(
        allreduce(big, {.name = "big", .op = ReduceOp::kMax, .compression = compression}), big));
  }
}

TEST(Allreduce, CompressionLeavesComplexNumbersAsTheyAre) {
  for (const auto type : {torch::kComplexFloat, torch::kComplexDouble}) {
    const torch::Tensor x = torch::full({4}, c10::complex<double>(1.0 / 3, 1e-6), type);
    for (const Compression compression : {Compression::kFloat16, Compression::kBFloat16}) {
      const AllreduceOptions options{.name = "complex", .compression = compression};
      EXPECT_TRUE(torch::allclose(allreduce(x, options), x, 1e-6, 1e-12));
      EXPECT_TRUE(torch::allclose(allreduce_(x.clone(), options), x, 1e-6, 1e-12));
    }
  }
  const torch::Tensor weight = torch::ones({4}, torch::kComplexFloat).requires_grad_();
  torch::optim::SGD sgd({weight}, 0.1);
  DistributedOptimizer optimizer(sgd, {.compression = Compression::kFloat16});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    torch::real(weight * (1.0 / 3)).sum().backward();
    optimizer.synchronize();
    EXPECT_TRUE(torch::allclose(torch::real(weight.grad()), torch::full({4}, 1.0F / 3), 1e-6));
  }
}

TEST(Allreduce, CompressionRoundsAfterThePrescaleFactorAndWritesInPlace) {
  const torch::Tensor large =
      torch::full({5}, 131072.0F) * (rank() + 1);  // exceeds float16 without the prescale factor
  const torch::Tensor result = allreduce(large, {.name = "large",
                                                 .prescale_factor = 1.0 / 16,
                                                 .postscale_factor = 16,
                                                 .compression = Compression::kFloat16});
  EXPECT_TRUE(near(result, torch::full({5}, 131072.0F * static_cast<float>(size() + 1) / 2), 1e-3));
  torch::Tensor strided = torch::full({3, 4}, 0.5F).t();
  torch::Tensor empty = torch::empty({0, 3});
  const Handle first = allreduce_async_(
      strided, {.name = "strided", .op = ReduceOp::kSum, .compression = Compression::kBFloat16});
  const Handle second = allreduce_async_(
      empty, {.name = "empty", .op = ReduceOp::kSum, .compression = Compression::kBFloat16});
  EXPECT_TRUE(first.wait().is_same(strided));
  EXPECT_EQ(second.wait().numel(), 0);
  EXPECT_TRUE(torch::equal(strided, torch::full({4, 3}, 0.5F * static_cast<float>(size()))));
}

TEST(GroupedAllreduce, EqualsOneByOneAndIsFused) {
  std::vector<torch::Tensor> own;
  std::vector<torch::Tensor> expected;
  for (int i = 0; i < 5; ++i) {
    own.push_back(rank_tensor(rank(), {i, 3}, torch::kFloat32, i));
    expected.push_back(reference_reduce(every_rank({i, 3}, torch::kFloat32, i), ReduceOp::kSum));
  }
  const AllreduceOptions options{.name = "grouped", .op = ReduceOp::kSum};
  const auto calls = metrics().backend_calls;
  const std::vector<torch::Tensor> results = grouped_allreduce(own, options);
  EXPECT_LE(metrics().backend_calls - calls, 1U);
  EXPECT_EQ(results.size(), own.size());
  for (std::size_t i = 0; i < results.size(); ++i) EXPECT_TRUE(near(results[i], expected[i]));

  Handle unnamed = grouped_allreduce_async(own, {.op = ReduceOp::kSum});
  Handle second = grouped_allreduce_async(own, {.op = ReduceOp::kMax});
  EXPECT_TRUE(near(unnamed.wait_all()[4], expected[4]));
  EXPECT_EQ(second.wait_all().size(), 5U);

  grouped_allreduce_(own, options);
  for (std::size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(near(own[i], expected[i]));
  EXPECT_TRUE(grouped_allreduce({}, options).empty());
}

TEST(Allgather, RaggedRowsInRankOrder) {
  for (const torch::ScalarType type : kTypes) {
    SCOPED_TRACE(c10::toString(type));
    std::vector<torch::Tensor> parts;
    // Rank 1 has no rows.
    for (int r = 0; r < size(); ++r) {
      parts.push_back(rank_tensor(r, {r == 1 ? 0 : r + 2, 3}, type));
    }
    const torch::Tensor own = parts[static_cast<std::size_t>(rank())];
    EXPECT_TRUE(near(allgather(own, {.name = "ragged"}), torch::cat(parts)));
    EXPECT_TRUE(near(allgather_async(own).wait(), torch::cat(parts)));
  }
}

TEST(Allgather, ScalarsAndStrides) {
  const torch::Tensor ranks = allgather(torch::tensor(rank()));
  EXPECT_TRUE(torch::equal(ranks, torch::arange(size(), ranks.options())));
  const auto inputs = every_rank({4, 3}, torch::kInt32);
  std::vector<torch::Tensor> transposed;
  for (const torch::Tensor& input : inputs) transposed.push_back(input.t());
  EXPECT_TRUE(torch::equal(allgather(inputs[static_cast<std::size_t>(rank())].t()),
                           torch::cat(transposed)));
}

TEST(Allgather, Grouped) {
  const std::vector<torch::Tensor> own{rank_tensor(rank(), {rank() + 1, 2}, torch::kFloat32),
                                       rank_tensor(rank(), {2}, torch::kInt64)};
  const std::vector<torch::Tensor> results = grouped_allgather(own, {.name = "two"});
  EXPECT_EQ(results.size(), 2U);
  std::vector<torch::Tensor> ragged;
  for (int r = 0; r < size(); ++r) ragged.push_back(rank_tensor(r, {r + 1, 2}, torch::kFloat32));
  EXPECT_TRUE(near(results[0], torch::cat(ragged)));
  EXPECT_TRUE(near(results[1], torch::cat(every_rank({2}, torch::kInt64))));
}

TEST(Broadcast, EveryTypeFromEveryRoot) {
  for (const torch::ScalarType type : kTypes) {
    for (int root = 0; root < size(); ++root) {
      SCOPED_TRACE(std::string(c10::toString(type)) + " from " + std::to_string(root));
      const torch::Tensor own = rank_tensor(rank(), {5, 2}, type);
      const torch::Tensor before = own.clone();
      const torch::Tensor expected = rank_tensor(root, {5, 2}, type);
      EXPECT_TRUE(near(broadcast(own, root, {.name = "out"}), expected));
      EXPECT_TRUE(torch::equal(own, before));
      EXPECT_TRUE(near(broadcast_async(own, root).wait(), expected));
      EXPECT_TRUE(broadcast_(own, root).is_same(own));
      EXPECT_TRUE(near(own, expected));
      const torch::Tensor columns = before.clone();
      broadcast_async_(columns.t(), root, {.name = "columns"}).wait();
      EXPECT_TRUE(near(columns, expected));
    }
  }
}

TEST(Handles, CopiesThreadsAndRepeatedWaits) {
  Handle empty;
  EXPECT_FALSE(empty.valid());
  EXPECT_FALSE(empty.done());
  EXPECT_THROW(empty.wait(), UsageError);
  EXPECT_THROW(empty.wait_all(), UsageError);

  const torch::Tensor target = torch::full({4, 4}, 1.0F + static_cast<float>(rank()));
  Handle handle = allreduce_async_(target.t(), {.name = "shared", .op = ReduceOp::kSum});
  const Handle copy = handle;
  std::vector<torch::Tensor> results(3);
  {
    std::vector<std::jthread> threads;
    for (torch::Tensor& result : results) {
      threads.emplace_back([&result, copy] { result = copy.wait(); });
    }
  }
  EXPECT_TRUE(handle.valid());
  EXPECT_TRUE(handle.done());
  const torch::Tensor again = handle.wait();
  for (const torch::Tensor& result : results) EXPECT_TRUE(result.is_same(again));
  EXPECT_EQ(handle.wait_all().size(), 1U);
  EXPECT_TRUE(near(target, torch::full({4, 4}, size() * (size() + 1) / 2.0F)));

  Handle group = grouped_allreduce_async({torch::ones({2}), torch::ones({3})});
  EXPECT_THROW(group.wait(), UsageError);
  EXPECT_EQ(group.wait_all().size(), 2U);

  allreduce_async(torch::ones({1000}), {.name = "dropped"});
  EXPECT_TRUE(near(allreduce(torch::ones({2}), {.name = "after"}), torch::ones({2})));
}

TEST(Errors, MistakesOfOneRankAreUsageErrors) {
  using M = std::function<void()>;
  const AllreduceOptions named{.name = "loss"};
  const std::string dtype =
      message_of<UsageError>(M([&] { allreduce(torch::zeros({2}, torch::kUInt16), named); }));
  EXPECT_NE(dtype.find("'loss'"), std::string::npos) << dtype;
  EXPECT_NE(dtype.find("UInt16"), std::string::npos) << dtype;
  EXPECT_NE(message_of<UsageError>(M([&] { allreduce(torch::Tensor(), named); })).find("undefined"),
            std::string::npos);
  EXPECT_NE(
      message_of<UsageError>(M([&] { allgather(torch::zeros({2}).to_sparse()); })).find("to_dense"),
      std::string::npos);
  EXPECT_NE(message_of<UsageError>(M([&] {
              allreduce_(torch::zeros({1}).expand({4}), named);
            })).find("share memory"),
            std::string::npos);
  EXPECT_THROW(broadcast(torch::zeros({2}), size()), UsageError);
  EXPECT_THROW(broadcast(torch::zeros({2}), -1), UsageError);
  EXPECT_THROW(allreduce(torch::zeros({2}, torch::TensorOptions().device(torch::kMeta))),
               UsageError);
}

TEST(Errors, ANameInFlightTwice) {
  if (size() == 1) GTEST_SKIP() << "with one rank an operation may be done at once";
  Handle first;
  // Rank 0 submits later, so the others' first operation cannot be done.
  if (rank() != 0) {
    first = allreduce_async(torch::ones({2}), {.name = "twice"});
    EXPECT_NE(message_of<UsageError>([] {
                allreduce_async(torch::ones({2}), {.name = "twice"});
              }).find("twice"),
              std::string::npos);
  }
  barrier();
  if (rank() == 0) first = allreduce_async(torch::ones({2}), {.name = "twice"});
  EXPECT_TRUE(near(first.wait(), torch::ones({2})));
}

TEST(Errors, ADisagreementReachesEveryRankAndEveryWaiter) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const Handle handle = allreduce_async(torch::ones({rank() == 1 ? 3 : 2}), {.name = "ragged"});
  const std::string message = message_of<MismatchError>([&] { handle.wait(); });
  EXPECT_NE(message.find("ragged"), std::string::npos) << message;
  EXPECT_EQ(message_of<MismatchError>([&] { handle.wait(); }), message);
  EXPECT_EQ(message_of<MismatchError>([&] { handle.wait_all(); }), message);

  // The member on which the ranks agree fails together with the other one.
  EXPECT_THROW(
      grouped_allreduce({torch::ones({2}), torch::ones({rank() == 0 ? 1 : 4})}, {.name = "half"}),
      MismatchError);
  EXPECT_TRUE(near(allreduce(torch::ones({2}), {.name = "ragged"}), torch::ones({2})));
}

TEST(InPlace, AutogradNoticesThatASavedTensorChanged) {
  const torch::Tensor x = torch::ones({3}, torch::requires_grad());
  const torch::Tensor y = x.exp();
  allreduce_(y.detach(), {.name = "saved"});
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Threads, ManySubmitAtOnceInAnyOrder) {
  constexpr int kPerThread = 10;
  std::vector<torch::Tensor> results(4 * kPerThread);
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t, &results] {
        const int stride = std::array{1, 3, 7, 9}[static_cast<std::size_t>(rank() % 4)];
        std::map<int, Handle> handles;
        for (int i = 0; i < kPerThread; ++i) {
          const int id = t * kPerThread + (i * stride) % kPerThread;
          handles[id] =
              allreduce_async(torch::full({id + 1}, static_cast<double>(rank() + id)),
                              {.name = "thread." + std::to_string(id), .op = ReduceOp::kSum});
        }
        for (const auto& [id, handle] : handles)
          results[static_cast<std::size_t>(id)] = handle.wait();
      });
    }
  }
  for (int id = 0; id < 4 * kPerThread; ++id) {
    const double sum = size() * (size() - 1) / 2.0 + size() * id;
    EXPECT_TRUE(near(results[static_cast<std::size_t>(id)], torch::full({id + 1}, sum)));
  }
}

}  // namespace
}  // namespace hvd::testing
