#include "reducer/gradient_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::libtorch {
namespace {

using Events = std::vector<std::string>;

/// Whether LibTorch can delete post-hooks. Older versions cannot.
template <class Node>
constexpr bool deletes_post_hooks = requires(Node& node) { node.del_post_hook(std::uintptr_t{0}); };

/// Records each call: its time, the parameter, and the first value of the gradient at that time.
class Recorder {
 public:
  explicit Recorder(std::vector<torch::Tensor> parameters) : parameters_(std::move(parameters)) {}
  void install(GradientHooks& hooks) {
    hooks.install(
        [this](std::size_t parameter, const torch::autograd::variable_list& gradients) {
          record("before", parameter);
          EXPECT_EQ(gradients.size(), 1U);
          if (next == GradientHooks::Next::kTaken)
            parameters_[parameter].mutable_grad() = gradients.front() * 10;
          return next;
        },
        [this](std::size_t parameter, const torch::autograd::variable_list& gradients) {
          record("after", parameter);
          EXPECT_EQ(gradients.size(), 1U);
        });
  }
  Events take() { return std::exchange(events_, {}); }

  GradientHooks::Next next = GradientHooks::Next::kAdd;

 private:
  void record(const std::string& when, std::size_t parameter) {
    const torch::Tensor& gradient = parameters_[parameter].grad();
    events_.push_back(
        when + " " + std::to_string(parameter) + ": " +
        (gradient.defined() ? std::to_string(gradient.flatten()[0].item<int>()) : "none"));
  }

  std::vector<torch::Tensor> parameters_;
  Events events_;
};

class GradientHooksTest : public ::testing::Test {
 protected:
  torch::Tensor a = torch::ones({2}, torch::requires_grad());
  torch::Tensor b = torch::ones({2}, torch::requires_grad());
  Recorder recorder{{a, b}};
  GradientHooks hooks{{a, b}};
};

TEST_F(GradientHooksTest, RunBeforeAndAfterAGradientIsAccumulated) {
  recorder.install(hooks);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: none", "after 0: 3"}));
  (b * 2).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 1: none", "after 1: 2"}));
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: 3", "after 0: 6"}));
}

TEST_F(GradientHooksTest, AGradientThatIsDroppedIsStillFollowedByTheOtherHook) {
  recorder.install(hooks);
  recorder.next = GradientHooks::Next::kDrop;
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: none", "after 0: none"}));
}

TEST_F(GradientHooksTest, AGradientThatIsTakenIsNotAddedByAutograd) {
  recorder.install(hooks);
  recorder.next = GradientHooks::Next::kTaken;
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), Events{"before 0: none"});
  EXPECT_EQ(a.grad()[0].item<int>(), 30);
  recorder.next = GradientHooks::Next::kAdd;
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: 30", "after 0: 33"}));
}

TEST_F(GradientHooksTest, KnowWhetherTheProgramHasHooksToo) {
  recorder.install(hooks);
  EXPECT_TRUE(hooks.alone(0));
  torch::autograd::impl::grad_accumulator(a)->add_post_hook(
      std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [](const auto& outputs, const auto&) { return outputs; }));
  EXPECT_FALSE(hooks.alone(0));
  EXPECT_TRUE(hooks.alone(1));
}

TEST_F(GradientHooksTest, RunOnceForAParameterThatIsUsedTwice) {
  recorder.install(hooks);
  (a * 3 + a * 4).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: none", "after 0: 7"}));
}

TEST_F(GradientHooksTest, RunOnceThoughTheyAreInstalledAgain) {
  recorder.install(hooks);
  recorder.install(hooks);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: none", "after 0: 3"}));
}

TEST_F(GradientHooksTest, AParameterThatIsUnfrozenIsHookedTheNextTime) {
  a.requires_grad_(false);
  recorder.install(hooks);
  a.requires_grad_(true);
  (a * 3 + b).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 1: none", "after 1: 1"}));
  recorder.install(hooks);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: 3", "after 0: 6"}));
}

TEST_F(GradientHooksTest, AnAccumulatorThatIsReplacedIsHookedTheNextTime) {
  recorder.install(hooks);
  a.set_data(a.detach().to(torch::kFloat64));  // as Module::to() does
  recorder.install(hooks);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder.take(), (Events{"before 0: none", "after 0: 3"}));
}

TEST_F(GradientHooksTest, AreGoneWhenRemoved) {
  recorder.install(hooks);
  hooks.remove();
  (a + b).sum().backward();
  // Older LibTorch keeps a hook that runs afterwards.
  if (deletes_post_hooks<torch::autograd::Node>) {
    EXPECT_EQ(recorder.take(), Events{});
  }
  hooks.remove();
  EXPECT_TRUE(a.grad().defined());
}

TEST_F(GradientHooksTest, AreGoneFromAGraphThatIsOlder) {
  recorder.install(hooks);
  const torch::Tensor loss = (a * 3).sum();  // holds the accumulator
  hooks.remove();
  loss.backward();
  EXPECT_EQ(recorder.take(),
            deletes_post_hooks<torch::autograd::Node> ? Events{} : Events{"after 0: 3"});
}

TEST(GradientHooks, GoWithTheirOwner) {
  const torch::Tensor a = torch::ones({2}, torch::requires_grad());
  Recorder recorder{{a}};
  torch::Tensor loss;
  {
    GradientHooks hooks({a});
    recorder.install(hooks);
    loss = (a * 3).sum();
  }
  loss.backward();
  EXPECT_EQ(recorder.take(),
            deletes_post_hooks<torch::autograd::Node> ? Events{} : Events{"after 0: 3"});
}

}  // namespace
}  // namespace hvd::libtorch
