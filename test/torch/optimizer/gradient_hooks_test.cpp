#include "optimizer/gradient_hooks.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::libtorch {
namespace {

using Events = std::vector<std::string>;

/// Older LibTorch does not.
template <class Node>
constexpr bool deletes_post_hooks = requires(Node& node) { node.del_post_hook(std::uintptr_t{0}); };

/// Notes what it is told: when, of which parameter, and the first value of its gradient then.
class Recorder final : public GradientHooks::Listener {
 public:
  explicit Recorder(std::vector<torch::Tensor> parameters) : parameters_(std::move(parameters)) {}
  void before_accumulate(std::size_t parameter) override { note("before", parameter); }
  void after_accumulate(std::size_t parameter,
                        const torch::autograd::variable_list& gradients) override {
    note("after", parameter);
    EXPECT_EQ(gradients.size(), 1U);
  }
  Events take() { return std::exchange(events_, {}); }

 private:
  void note(const std::string& when, std::size_t parameter) {
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
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>(std::vector<torch::Tensor>{a, b});
  GradientHooks hooks{{a, b}};
};

TEST_F(GradientHooksTest, TellBeforeAndAfterAGradientIsAccumulated) {
  hooks.install(recorder);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 0: none", "after 0: 3"}));
  (b * 2).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 1: none", "after 1: 2"}));
  (a * 3).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 0: 3", "after 0: 6"}));
}

TEST_F(GradientHooksTest, TellOnceOfAParameterThatIsUsedTwice) {
  hooks.install(recorder);
  (a * 3 + a * 4).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 0: none", "after 0: 7"}));
}

TEST_F(GradientHooksTest, TellOnceThoughTheyAreInstalledAgain) {
  hooks.install(recorder);
  hooks.install(recorder);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 0: none", "after 0: 3"}));
}

TEST_F(GradientHooksTest, AParameterThatIsUnfrozenIsHookedTheNextTime) {
  a.requires_grad_(false);
  hooks.install(recorder);
  a.requires_grad_(true);
  (a * 3 + b).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 1: none", "after 1: 1"}));
  hooks.install(recorder);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 0: 3", "after 0: 6"}));
}

TEST_F(GradientHooksTest, AnAccumulatorThatIsReplacedIsHookedTheNextTime) {
  hooks.install(recorder);
  a.set_data(a.detach().to(torch::kFloat64));  // as Module::to() does
  hooks.install(recorder);
  (a * 3).sum().backward();
  EXPECT_EQ(recorder->take(), (Events{"before 0: none", "after 0: 3"}));
}

TEST_F(GradientHooksTest, AreGoneWhenRemoved) {
  hooks.install(recorder);
  hooks.remove();
  recorder.reset();  // older LibTorch keeps a hook that runs afterwards
  (a + b).sum().backward();
  hooks.remove();
  EXPECT_TRUE(a.grad().defined());
}

TEST_F(GradientHooksTest, AreGoneFromAGraphThatIsOlder) {
  hooks.install(recorder);
  const torch::Tensor loss = (a * 3).sum();  // holds the accumulator
  hooks.remove();
  loss.backward();
  EXPECT_EQ(recorder->take(),
            deletes_post_hooks<torch::autograd::Node> ? Events{} : Events{"after 0: 3"});
}

TEST_F(GradientHooksTest, DoNotOutliveTheListener) {
  hooks.install(recorder);
  const std::weak_ptr<Recorder> weak = recorder;
  recorder.reset();
  EXPECT_TRUE(weak.expired());
  (a + b).sum().backward();
}

TEST(GradientHooks, GoWithTheirOwner) {
  const torch::Tensor a = torch::ones({2}, torch::requires_grad());
  const auto recorder = std::make_shared<Recorder>(std::vector<torch::Tensor>{a});
  torch::Tensor loss;
  {
    GradientHooks hooks({a});
    hooks.install(recorder);
    loss = (a * 3).sum();
  }
  loss.backward();
  EXPECT_EQ(recorder->take(),
            deletes_post_hooks<torch::autograd::Node> ? Events{} : Events{"after 0: 3"});
}

}  // namespace
}  // namespace hvd::libtorch
