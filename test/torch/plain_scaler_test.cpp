// GradScaler with optimizers whose gradients the program reduces itself.
#include <limits>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Plain {
  torch::Tensor weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer{{weight}, 0.5};

  void backward(GradScaler& scaler, float x) {
    optimizer.zero_grad();
    scaler.scale((weight * x).sum()).backward();
  }
  float value() const { return weight[0].item<float>(); }
};

TEST(PlainScaler, DividesStepsAndAdjustsTheScale) {
  Plain plain;
  GradScaler scaler({.init_scale = 64, .growth_interval = 2});
  plain.backward(scaler, 3);
  EXPECT_EQ(plain.weight.grad()[0].item<float>(), 192);
  scaler.unscale_(plain.optimizer);
  EXPECT_EQ(plain.weight.grad()[0].item<float>(), 3);
  EXPECT_TRUE(scaler.step(plain.optimizer));
  EXPECT_EQ(plain.value(), 1 - 0.5F * 3);
  EXPECT_THROW(scaler.step(plain.optimizer), UsageError);
  EXPECT_THROW(scaler.unscale_(plain.optimizer), UsageError);
  scaler.update();
  plain.backward(scaler, 3);
  EXPECT_TRUE(scaler.step(plain.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 128);
}

TEST(PlainScaler, EveryRankOfTheSetSkipsTogether) {
  for_each_set([](const ProcessSet& set) {
    Plain plain;
    GradScaler scaler({.init_scale = 64, .process_set = set});
    const bool spoils = set.rank() == set.size() - 1;
    plain.backward(scaler, spoils ? kInf : 1);
    EXPECT_FALSE(scaler.step(plain.optimizer));
    scaler.update();
    EXPECT_EQ(plain.value(), 1);
    EXPECT_EQ(scaler.get_scale(), 32);
    plain.backward(scaler, 1);
    EXPECT_TRUE(scaler.step(plain.optimizer));
    scaler.update();
    EXPECT_EQ(plain.value(), 0.5);
  });
}

TEST(PlainScaler, AParameterInTwoGroupsIsDividedOnceAndMissingGradientsAreSkipped) {
  Plain plain;
  torch::Tensor unused = torch::ones({3}).requires_grad_();
  plain.optimizer.add_param_group(torch::optim::OptimizerParamGroup({unused}));
  GradScaler scaler({.init_scale = 16});
  plain.backward(scaler, 2);
  EXPECT_TRUE(scaler.step(plain.optimizer));
  EXPECT_EQ(plain.value(), 0);
  EXPECT_EQ(unused[0].item<float>(), 1);
}

TEST(PlainScaler, ADistributedOptimizerByItsBaseIsTakenAsSuch) {
  Plain plain;
  NamedParameters named{{"weight", plain.weight}};
  DistributedOptimizer distributed(plain.optimizer, named, {.op = ReduceOp::kSum});
  torch::optim::Optimizer& base = distributed;
  GradScaler scaler({.init_scale = 64});
  distributed.zero_grad();
  scaler.scale((plain.weight * static_cast<float>(rank() + 1)).sum()).backward();
  scaler.unscale_(base);
  EXPECT_EQ(plain.weight.grad()[0].item<float>(), static_cast<float>(size() * (size() + 1)) / 2);
  EXPECT_TRUE(scaler.step(base));
  scaler.update();
}

TEST(PlainScaler, DisabledStepsAlways) {
  Plain plain;
  GradScaler scaler({.enabled = false});
  plain.backward(scaler, kInf);
  EXPECT_TRUE(scaler.step(plain.optimizer));
  scaler.update(7.0);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(PlainScaler, FactorsAndTheScaleCanBeSet) {
  GradScaler scaler({.init_scale = 64});
  scaler.set_growth_factor(4);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(1);
  EXPECT_EQ(scaler.get_growth_factor(), 4);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 1);
  EXPECT_THROW(scaler.set_growth_factor(1), UsageError);
  EXPECT_THROW(scaler.set_backoff_factor(1), UsageError);
  EXPECT_THROW(scaler.set_growth_interval(0), UsageError);
  EXPECT_EQ(scaler.get_growth_factor(), 4) << "a refused value has changed the scaler";
  scaler.update(8.0);
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_THROW(scaler.update(0.0), UsageError);
  Plain plain;
  plain.backward(scaler, 1);
  EXPECT_TRUE(scaler.step(plain.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32);
  plain.backward(scaler, kInf);
  EXPECT_FALSE(scaler.step(plain.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
}

}  // namespace
}  // namespace hvd::testing
