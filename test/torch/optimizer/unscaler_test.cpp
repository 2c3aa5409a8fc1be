// Tests the Unscaler on the CPU. cuda_optimizer_test.cpp tests it on a GPU.
#include "optimizer/unscaler.h"

#include <limits>

#include "torch/support/torch_test.h"

namespace hvd::libtorch {
namespace {

using testing::near;

bool found_bad(Unscaler& unscaler) {
  const torch::Tensor found = unscaler.run();
  EXPECT_EQ(found.numel(), 1);
  EXPECT_EQ(found.scalar_type(), torch::kFloat32);
  return found.item<float>() != 0;
}

TEST(Unscaler, MultipliesEveryGradient) {
  const torch::Tensor floats = torch::tensor({2.0F, -4.0F});
  const torch::Tensor doubles = torch::tensor({6.0}, torch::kFloat64);
  Unscaler unscaler(0.5);
  unscaler.add(floats);
  unscaler.add(doubles);
  EXPECT_FALSE(found_bad(unscaler));
  EXPECT_TRUE(near(floats, torch::tensor({1.0F, -2.0F})));
  EXPECT_TRUE(near(doubles, torch::tensor({3.0}, torch::kFloat64)));
}

TEST(Unscaler, OneBadValueIsEnoughWhereverItIs) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {inf, -inf, std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t position : {0U, 1U, 2U}) {
      Unscaler unscaler(0.5);
      for (std::size_t i = 0; i < 3; ++i)
        unscaler.add(torch::tensor({1.0F, i == position ? bad : 1.0F}));
      EXPECT_TRUE(found_bad(unscaler)) << bad << " at " << position;
    }
  }
}

TEST(Unscaler, WithoutGradientsAllIsFinite) {
  Unscaler unscaler(0.5);
  unscaler.uses(torch::kCPU);
  EXPECT_FALSE(found_bad(unscaler));
}

TEST(Unscaler, LooksAtAGradientBeforeItMultiplies) {
  // 1e30 * 1e30 exceeds a float, but the gradient was finite.
  Unscaler unscaler(1e30);
  unscaler.add(torch::tensor({1e30F}));
  EXPECT_FALSE(found_bad(unscaler));
}

}  // namespace
}  // namespace hvd::libtorch
