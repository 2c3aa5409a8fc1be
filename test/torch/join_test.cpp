#include "hvd/error.h"
#include "torch/support/torch_test.h"

// Ranks that run out of data before the others, and Adasum.

namespace hvd::testing {
namespace {

/// The mean loss over the ranks that still have data.
torch::Tensor mean_loss(Net& net, int step, int first_rank) {
  torch::Tensor sum = torch::zeros({});
  for (int from = first_rank; from < size(); ++from)
    sum = sum + loss_of(net, Batch::of_rank(from, step));
  return sum / (size() - first_rank);
}

TEST(Join, TrainingGoesOnWithTheRanksThatHaveData) {
  torch::manual_seed(3);
  Net distributed, serial;
  broadcast_parameters(distributed);
  copy_values(*distributed, *serial);
  torch::optim::SGD sgd(distributed->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD reference(serial->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  DistributedOptimizer optimizer(sgd, distributed->named_parameters());
  for (int epoch = 0; epoch < 2; ++epoch) {
    const int steps = 2 + rank();  // the last rank has the most steps
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      loss_of(distributed, Batch::of_rank(rank(), step)).backward();
      optimizer.step();
    }
    const int last = join();
    EXPECT_EQ(last, size() - 1);
    broadcast_parameters(distributed, last);
    broadcast_optimizer_state(sgd, last);
    for (int step = 0; step < 2 + size() - 1; ++step) {
      reference.zero_grad();
      mean_loss(serial, step, std::max(0, step - 1)).backward();
      reference.step();
    }
  }
  for (const auto& item : distributed->named_parameters()) {
    EXPECT_TRUE(near(item.value(), serial->named_parameters()[item.key()], 1e-5)) << item.key();
  }
  EXPECT_TRUE(same_on_all_ranks(distributed->parameters()));
}

TEST(Join, EveryOperationTakesTheAbsentRanksIdentity) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  const int absent = 1;
  if (rank() != absent) {
    std::vector<torch::Tensor> inputs;
    for (int from = 0; from < size(); ++from) {
      if (from != absent) inputs.push_back(rank_tensor(from, {5, 3}, torch::kFloat32));
    }
    const torch::Tensor own = rank_tensor(rank(), {5, 3}, torch::kFloat32);
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      for (int use = 0; use < 2; ++use) {  // the second from the cache
        EXPECT_TRUE(near(allreduce(own, {.name = "r", .op = op}), reference_reduce(inputs, op)));
      }
    }
    EXPECT_TRUE(near(allreduce(own, {.op = ReduceOp::kAverageOfSet}),
                     reference_reduce(inputs, ReduceOp::kSum) / size()));
    const torch::Tensor large = torch::full({2}, 0x7fffffff, torch::kInt32);
    EXPECT_TRUE(
        near(allreduce(large, {.op = ReduceOp::kAverageOfSet}),
             (large.to(torch::kInt64) * (size() - 1)).div(size(), "trunc").to(torch::kInt32)));
    EXPECT_TRUE(near(allgather(own), torch::cat(inputs)));
    EXPECT_TRUE(near(broadcast(own, 0), rank_tensor(0, {5, 3}, torch::kFloat32)));
    const auto both = grouped_allreduce({own, own * 2}, {.name = "g", .op = ReduceOp::kSum});
    EXPECT_TRUE(near(both[1], 2 * reference_reduce(inputs, ReduceOp::kSum)));
    EXPECT_THROW(broadcast(own, absent), MismatchError);
    EXPECT_THROW(alltoall(own.repeat({size(), 1})), MismatchError);
    EXPECT_TRUE(
        near(allreduce(own, {.op = ReduceOp::kSum}), reference_reduce(inputs, ReduceOp::kSum)));
  }
  join();
}

torch::Tensor adasum_of_pair(const torch::Tensor& a, const torch::Tensor& b) {
  const torch::Tensor product = (a * b).sum();
  return (1 - product / (2 * (a * a).sum())) * a + (1 - product / (2 * (b * b).sum())) * b;
}

torch::Tensor adasum_of(std::vector<torch::Tensor> tensors) {
  for (auto& tensor : tensors) tensor = tensor.to(torch::kFloat64);
  while (tensors.size() > 1) {
    std::vector<torch::Tensor> next;
    for (std::size_t i = 0; i + 1 < tensors.size(); i += 2)
      next.push_back(adasum_of_pair(tensors[i], tensors[i + 1]));
    if (tensors.size() % 2 == 1) next.push_back(tensors.back());
    tensors = std::move(next);
  }
  return tensors.front();
}

TEST(Adasum, EqualsTheTreeOfPairsInEveryFloatingTypeAndInSets) {
  const std::pair<torch::ScalarType, double> types[] = {{torch::kFloat64, 1e-12},
                                                        {torch::kFloat32, 1e-5},
                                                        {torch::kFloat16, 5e-3},
                                                        {torch::kBFloat16, 5e-2}};
  for (const auto& [type, tolerance] : types) {
    const torch::Tensor result =
        allreduce(rank_tensor(rank(), {7, 3}, type) / 8, {.name = "a", .op = ReduceOp::kAdasum});
    auto inputs = every_rank({7, 3}, type);
    for (auto& input : inputs) input = input / 8;
    EXPECT_EQ(result.scalar_type(), type);
    EXPECT_TRUE(near(result.to(torch::kFloat64), adasum_of(inputs), tolerance));
    EXPECT_TRUE(same_on_all_ranks(result));
  }
  if (size() < 3) return;
  const ProcessSet ends = add_process_set({0, size() - 1});
  if (ends.included()) {
    const torch::Tensor own = rank_tensor(rank(), {11}, torch::kFloat32);
    const torch::Tensor result = allreduce(own, {.op = ReduceOp::kAdasum, .process_set = ends});
    EXPECT_TRUE(near(result.to(torch::kFloat64),
                     adasum_of({rank_tensor(0, {11}, torch::kFloat32),
                                rank_tensor(size() - 1, {11}, torch::kFloat32)}),
                     1e-5));
  }
  remove_process_set(ends);
  EXPECT_THROW(allreduce(torch::ones({3}, torch::kInt32), {.op = ReduceOp::kAdasum}), UsageError);
}

TEST(Adasum, TrainsTheSameModelOnEveryRank) {
  torch::manual_seed(4);
  Net net;
  broadcast_parameters(net);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), {.op = ReduceOp::kAdasum});
  double first = 0, loss = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    torch::Tensor own = loss_of(net, Batch::of_rank(rank(), 0));
    own.backward();
    optimizer.step();
    loss = allreduce(own.detach()).item<double>();
    if (step == 0) first = loss;
  }
  EXPECT_LT(loss, first);
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

}  // namespace
}  // namespace hvd::testing
