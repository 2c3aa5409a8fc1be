#include <chrono>
#include <string>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

TEST(Lifecycle, ShutdownAndInitAgain) {
  const int ranks = size();
  for (int round = 0; round < 3; ++round) {
    shutdown();
    EXPECT_FALSE(is_initialized());
    EXPECT_THROW(allreduce(torch::ones({2})), NotInitializedError);
    EXPECT_THROW(broadcast_object(1), NotInitializedError);
    EXPECT_THROW(DistributedSampler(10), NotInitializedError);
    Net net;
    torch::optim::SGD inner(net->parameters(), 0.1);
    EXPECT_THROW(DistributedOptimizer(inner, net->named_parameters()), NotInitializedError);
    shutdown();

    init();
    EXPECT_EQ(size(), ranks);
    broadcast_parameters(net);
    DistributedOptimizer optimizer(inner, net->named_parameters());
    loss_of(net, Batch::of_rank(rank(), round)).backward();
    optimizer.step();
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
}

TEST(Lifecycle, AnOptimizerLivesThroughARestart) {
  Net net;
  broadcast_parameters(net);
  torch::optim::SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int round = 0; round < 2; ++round) {
    optimizer.zero_grad();
    loss_of(net, Batch::of_rank(rank(), round)).backward();
    optimizer.step();
    shutdown();
    init();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

// One rank drops its first cycle and continues with another operation.
TEST(Lifecycle, ARankThatMissesTheFirstStepIsNamedWithARemedy) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  shutdown();
  init({.deadlock_timeout = std::chrono::milliseconds(300)});
  {
    Net net = same_net();
    torch::optim::SGD inner(net->parameters(), 0.1);
    DistributedOptimizer optimizer(inner, net);
    const torch::Tensor before = net->fc1->weight.detach().clone();
    backward(net);
    const bool drops = rank() == size() - 1;
    const std::string message = message_of<StalledError>([&] {
      if (drops) {
        optimizer.zero_grad();
        allreduce(torch::ones({1}), {.name = "accuracy"});
      } else {
        optimizer.step();
      }
    });
    EXPECT_TRUE(contains(message, "rank " + std::to_string(size() - 1))) << message;
    EXPECT_TRUE(contains(message, "waits for allreduce 'accuracy'")) << message;
    if (!drops) {
      EXPECT_TRUE(message.starts_with("DistributedOptimizer (opt")) << message;
      EXPECT_TRUE(contains(message, "expected the call on each rank in every step")) << message;
    }
    EXPECT_TRUE(torch::equal(before, net->fc1->weight));
  }
  shutdown();
  init();
}

TEST(Lifecycle, AProcessSetOfAnotherJobIsAnotherThoughItHasTheSameNumber) {
  if (size() == 1) GTEST_SKIP() << "one rank is in every set";
  const torch::Tensor weight = torch::zeros({2}, torch::requires_grad());
  NamedParameters names{{"weight", weight}};
  torch::optim::SGD inner({weight}, 0.1);
  shutdown();
  init();
  const ProcessSet before = add_process_set({0});
  if (before.included()) DistributedOptimizer(inner, names, {.process_set = before});
  shutdown();
  init();
  std::vector<int> all;
  for (int r = 0; r < size(); ++r) all.push_back(r);
  const ProcessSet after = add_process_set(all);
  EXPECT_EQ(before.id(), after.id());
  {
    DistributedOptimizer optimizer(inner, names, {.op = ReduceOp::kSum, .process_set = after});
    weight.sum().backward();
    optimizer.step();
  }
  EXPECT_TRUE(near(weight.detach(), torch::full({2}, -0.1F * static_cast<float>(size()))));
  remove_process_set(after);
}

TEST(Lifecycle, AHandleFromBeforeTheShutdownThrowsShutdownError) {
  const Handle done = allreduce_async(torch::ones({2}), {.name = "done"});
  done.wait();
  Handle cut_off;
  // Only rank 0 submits the operation, so it cannot complete.
  if (size() > 1 && rank() == 0) cut_off = allreduce_async(torch::ones({2}), {.name = "cut"});
  shutdown();
  EXPECT_TRUE(near(done.wait(), torch::ones({2})));
  if (cut_off.valid()) {
    EXPECT_THROW(cut_off.wait(), ShutdownError);
  }
  init();
}

}  // namespace
}  // namespace hvd::testing
