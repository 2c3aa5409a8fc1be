#include "torch/support/torch_test.h"

// Compares a DistributedOptimizer on some of the ranks with one process on the joined batch.

namespace hvd::testing {
namespace {

Batch joined(const ProcessSet& set, int step) {
  std::vector<torch::Tensor> x, y;
  for (const int r : set.ranks()) {
    x.push_back(Batch::of_rank(r, step).x);
    y.push_back(Batch::of_rank(r, step).y);
  }
  return {torch::cat(x), torch::cat(y)};
}

void check_training(const ProcessSet& set, DistributedOptimizerOptions options,
                    double tolerance = 1e-5) {
  torch::manual_seed(21);
  Net net, serial;
  copy_values(*net, *serial);
  const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9);
  torch::optim::SGD inner(net->parameters(), sgd), reference(serial->parameters(), sgd);
  options.process_set = set;
  const bool sum = options.op == ReduceOp::kSum;
  DistributedOptimizer optimizer(inner, net->named_parameters(), std::move(options));
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
    (sum ? scale_loss(loss, set) : loss).backward();
    loss_of(serial, joined(set, step)).backward();
    optimizer.step();
    reference.step();
  }
  const auto expected = serial->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(near(item.value(), expected[item.key()], tolerance)) << item.key();
  }
}

TEST(TrainingInAProcessSet, EqualsOneProcessWithEveryOption) {
  for_each_set([](const ProcessSet& set) {
    check_training(set, {});
    check_training(set, {.op = ReduceOp::kSum});
    check_training(set, {.compression = Compression::kFloat16}, 2e-2);
    check_training(set, {.gradient_predivide_factor = 4});
    check_training(set, {.groups = {{"fc1.weight", "fc2.bias"}}});
  });
}

TEST(TrainingInAProcessSet, AllReduceOfParameters) {
  for_each_set([](const ProcessSet& set) {
    torch::manual_seed(22);
    Net net, serial;
    copy_values(*net, *serial);
    scale_loss(loss_of(net, Batch::of_rank(rank(), 1)), set).backward();
    all_reduce(net->parameters(), ReduceOp::kSum, set);
    loss_of(serial, joined(set, 1)).backward();
    EXPECT_TRUE(near(net->fc1->weight.grad(), serial->fc1->weight.grad(), 1e-5));
  });
}

TEST(TrainingInAProcessSet, AClosuresLossIsTheMembers) {
  for_each_set([](const ProcessSet& set) {
    torch::manual_seed(23);
    Net net;
    torch::optim::SGD inner(net->parameters(), 0.1);
    DistributedOptimizer optimizer(inner, net->named_parameters(), {.process_set = set});
    const torch::Tensor expected = loss_of(net, joined(set, 0)).detach();
    const torch::Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      torch::Tensor own = loss_of(net, Batch::of_rank(rank(), 0));
      own.backward();
      return own;
    });
    EXPECT_TRUE(near(loss, expected, 1e-5));
  });
}

TEST(TrainingInAProcessSet, IsAUsageErrorElsewhere) {
  if (size() == 1) GTEST_SKIP() << "one rank is in every set";
  const ProcessSet set = add_process_set({size() - 1});
  Net net;
  torch::optim::SGD inner(net->parameters(), 0.1);
  if (!set.included()) {
    EXPECT_THROW(DistributedOptimizer(inner, net->named_parameters(), {.process_set = set}),
                 UsageError);
  }
  const torch::Tensor x = torch::ones({2});
  if (!set.included()) {
    EXPECT_THROW(reducescatter(x, {.process_set = set}), UsageError);
    EXPECT_THROW(alltoall(x, torch::tensor({2}), {.process_set = set}), UsageError);
    EXPECT_THROW(gather(x, size() - 1, {.process_set = set}), UsageError);
    EXPECT_THROW(all_gather_into_tensor(x, 0, {.process_set = set}), UsageError);
    EXPECT_THROW(sparse_allreduce(x.to_sparse(), {.process_set = set}), UsageError);
  } else {
    EXPECT_THROW(gather(x, 0, {.process_set = set}), UsageError);
    EXPECT_THROW(broadcast(x, 0, {.process_set = set}), UsageError);
  }
  remove_process_set(set);
}

TEST(TrainingInAProcessSet, TwoSetsAtOnceWithTheSameNames) {
  if (size() < 3) GTEST_SKIP() << "needs two sets with a rank in both";
  const ProcessSet low = add_process_set({0, 1});
  const ProcessSet high = add_process_set({1, 2});
  Handle first, second;
  const torch::Tensor own = torch::full({3}, static_cast<float>(rank()));
  if (low.included()) {
    first = allreduce_async(own, {.name = "same", .op = ReduceOp::kSum, .process_set = low});
  }
  if (high.included()) {
    second = allreduce_async(own, {.name = "same", .op = ReduceOp::kSum, .process_set = high});
  }
  if (low.included()) {
    EXPECT_TRUE(near(first.wait(), torch::full({3}, 1.0F)));
  }
  if (high.included()) {
    EXPECT_TRUE(near(second.wait(), torch::full({3}, 3.0F)));
  }
  remove_process_set(high);
  remove_process_set(low);
}

}  // namespace
}  // namespace hvd::testing
