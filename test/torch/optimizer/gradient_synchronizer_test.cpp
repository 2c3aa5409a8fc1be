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
