#include "hvd/torch/autocast.h"

#include "hvd/error.h"
#include "torch/support/torch_test.h"

// The Autocast guard, and training under it.

namespace hvd::testing {
namespace {

torch::ScalarType type_of_product() {
  return torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

TEST(Autocast, SwitchesOnAndBackEvenByAnError) {
  EXPECT_EQ(type_of_product(), torch::kFloat32);
  try {
    const Autocast autocast(torch::kCPU);
    EXPECT_EQ(type_of_product(), torch::kBFloat16);
    throw 1;
  } catch (int) {
  }
  EXPECT_EQ(type_of_product(), torch::kFloat32);
}

TEST(Autocast, GuardsNest) {
  const Autocast outer(torch::kCPU);
  {
    const Autocast off(torch::kCPU, torch::kBFloat16, /*enabled=*/false);
    EXPECT_EQ(type_of_product(), torch::kFloat32);
    const Autocast inner(torch::kCPU);
    EXPECT_EQ(type_of_product(), torch::kBFloat16);
  }
  EXPECT_EQ(type_of_product(), torch::kBFloat16);
}

TEST(Autocast, AWeightThatWasChangedIsCastAnew) {
  const torch::Tensor weight = torch::ones({2, 2}).requires_grad_();
  const auto product = [&] {
    const Autocast autocast(torch::kCPU);
    return torch::mm(torch::ones({2, 2}), weight)[0][0].item<float>();
  };
  EXPECT_EQ(product(), 2);
  {
    const torch::NoGradGuard no_grad;
    weight.fill_(3);
  }
  EXPECT_EQ(product(), 6);
}

TEST(Autocast, RefusesTypesAndDevicesThatItDoesNotKnow) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { Autocast(torch::kCUDA, torch::kFloat32); }),
                       "expected bfloat16 or float16, got Float"));
  EXPECT_THROW(static_cast<void>(Autocast(torch::kMeta)), UsageError);
  EXPECT_EQ(type_of_product(), torch::kFloat32);
}

TEST(Autocast, TrainsTheSameModelOnEveryRank) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    const Batch batch = Batch::of_rank(rank(), 0);
    optimizer.zero_grad();
    torch::Tensor output;
    {
      const Autocast autocast(torch::kCPU);
      output = net->forward(batch.x);
    }
    EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
    const torch::Tensor loss = torch::mse_loss(output.to(torch::kFloat32), batch.y);
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_EQ(net->fc1->weight.grad().scalar_type(), torch::kFloat32);
  EXPECT_LT(last, first);
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

}  // namespace
}  // namespace hvd::testing
