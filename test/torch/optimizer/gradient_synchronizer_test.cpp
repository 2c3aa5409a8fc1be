#include "hvd/torch/gradient_synchronizer.h"

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

void expect_joined_gradients(Net& net, int step) {
  Net reference;
  copy_values(*net, *reference);
  loss_of(reference, Batch::joined(step)).backward();
  const auto expected = reference->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(near(item.value().grad(), expected[item.key()].grad(), 1e-5)) << item.key();
  }
}

TEST(GradientSynchronizer, ReducesEveryStepOnce) {
  Net net;
  broadcast_parameters(net);
  GradientSynchronizer gradients(net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    gradients.discard();
    net->zero_grad();
    backward(net, step);
    EXPECT_TRUE(gradients.in_flight());
    gradients.synchronize();
    EXPECT_TRUE(gradients.synchronized());
    gradients.synchronize();
    expect_joined_gradients(net, step);
    gradients.end_step();
    EXPECT_FALSE(gradients.synchronized());
  }
}

TEST(GradientSynchronizer, AccumulatesWithinNoSync) {
  Net net;
  broadcast_parameters(net);
  GradientSynchronizer gradients(net->named_parameters());
  {
    const NoSync guard = gradients.no_sync();
    backward(net, 0);
  }
  EXPECT_FALSE(gradients.in_flight());
  gradients.synchronize();
  expect_joined_gradients(net, 0);
}

TEST(GradientSynchronizer, RefusesWrongArguments) {
  Net net;
  const auto names = net->named_parameters();
  const auto error = [](const NamedParameters& parameters,
                        const DistributedOptimizerOptions& options = {}) {
    return message_of<UsageError>([&] { GradientSynchronizer gradients(parameters, options); });
  };
  EXPECT_TRUE(contains(error(NamedParameters()), "at least one parameter"));
  EXPECT_TRUE(contains(error(names, {.groups = {{"nonsense"}}}), "'nonsense'"));
  EXPECT_TRUE(contains(error(names, {.groups = {{"fc1.bias"}, {"fc1.bias"}}}), "twice"));
  EXPECT_TRUE(contains(error(names, {.backward_passes_per_step = 0}), "got 0"));
  EXPECT_TRUE(
      contains(error(names, {.op = ReduceOp::kAdasum, .adasum_delta = true}), "adasum_delta"));
  GradientSynchronizer gradients(names);
  EXPECT_THROW(gradients.set_backward_passes_per_step(0), UsageError);
}

TEST(GradientSynchronizer, DividesByTheSizeAlsoWhileARankHasJoined) {
  torch::Tensor parameter = torch::zeros({1}).requires_grad_(true);
  NamedParameters names;
  names.insert("p", parameter);
  GradientSynchronizer gradients(names, {.divide_by_size = true});
  for (int step = 0; step < (rank() == 0 ? 2 : 3); ++step) {
    gradients.discard();
    parameter.mutable_grad() = torch::Tensor();
    parameter.sum().backward();
    gradients.synchronize();
    const int contributors = step < 2 ? size() : size() - 1;
    EXPECT_TRUE(near(parameter.grad(), torch::full({1}, 1.0 * contributors / size())));
    gradients.end_step();
  }
  join();
}

ProcessSet own_set() {
  std::vector<ProcessSet> sets;
  for (int r = 0; r < size(); ++r) sets.push_back(add_process_set({r}));
  return sets[rank()];
}

TEST(GradientSynchronizer, LeavesGradientsOfOneRankAsTheyAre) {
  Net net = same_net();
  GradientSynchronizer gradients(net->named_parameters(),
                                 {.backward_passes_per_step = 2, .process_set = own_set()});
  for (int step = 0; step < 3; ++step) {
    gradients.discard();
    net->zero_grad();
    backward(net, step);
    EXPECT_FALSE(gradients.in_flight());
    backward(net, step);
    EXPECT_TRUE(gradients.in_flight());
    EXPECT_TRUE(contains(message_of<UsageError>([&] { backward(net, step); }), "'fc"));
    const torch::Tensor gradient = net->parameters()[0].grad();
    const torch::Tensor value = gradient.clone();
    gradients.synchronize();
    EXPECT_TRUE(gradients.synchronized());
    EXPECT_FALSE(gradients.in_flight());
    EXPECT_TRUE(net->parameters()[0].grad().is_same(gradient));
    EXPECT_TRUE(gradient.equal(value));
    gradients.end_step();
    net->zero_grad();  // without discard(): the passes are counted anew
    backward(net, step);
    backward(net, step);
    gradients.synchronize();
    backward(net, step);  // after synchronize() a pass may be added
    EXPECT_FALSE(gradients.synchronized());
  }
}

TEST(GradientSynchronizer, ReducesOtherGradientsOfOneRankToo) {
  const ProcessSet set = own_set();
  torch::Tensor table = torch::ones({4, 2}).requires_grad_(true);
  NamedParameters names;
  names.insert("table", table);
  const auto look_up = [&] {
    const auto rows = torch::tensor({1, 1, 3});
    table.mutable_grad() = torch::Tensor();
    torch::embedding(table, rows, -1, false, /*sparse=*/true).sum().backward();
  };
  {
    GradientSynchronizer gradients(names, {.process_set = set});
    for (int step = 0; step < 3; ++step) {
      look_up();
      gradients.synchronize();
      EXPECT_TRUE(gradients.synchronized());
      EXPECT_TRUE(table.grad().is_sparse() && table.grad().to_dense()[1][0].item<float>() == 2);
      gradients.end_step();
    }
  }
  {
    GradientSynchronizer gradients(names, {.sparse_as_dense = true, .process_set = set});
    look_up();
    gradients.synchronize();
    EXPECT_TRUE(!table.grad().is_sparse() && table.grad()[1][0].item<float>() == 2);
  }
  GradientSynchronizer gradients(names, {.compression = Compression::kFloat16, .process_set = set});
  table.mutable_grad() = torch::Tensor();
  (table * 1.0001).sum().backward();
  gradients.synchronize();
  EXPECT_EQ(table.grad()[0][0].item<float>(), 1.0F);  // as float16 holds it
}

struct Translated : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(GradientSynchronizer, TheHandlerReplacesAnErrorOfAHook) {
  Net net;
  broadcast_parameters(net);
  GradientSynchronizer gradients(net->named_parameters());
  set_gradient_error_handler([] {
    try {
      throw;
    } catch (const UsageError& error) {
      throw Translated(error.what());
    }
  });
  backward(net, 0);
  EXPECT_THROW(backward(net, 1), Translated);
  set_gradient_error_handler(nullptr);
  EXPECT_THROW(backward(net, 1), UsageError);
  gradients.synchronize();
}

}  // namespace
}  // namespace hvd::testing
