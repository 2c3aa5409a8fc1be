#include "optimizer/live_optimizers.h"

#include <string>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::libtorch {
namespace {

using testing::contains;
using testing::message_of;
using torch::optim::SGD;

class LiveOptimizersTest : public ::testing::Test {
 protected:
  const torch::Tensor a = torch::ones({2}, torch::requires_grad());
  const torch::Tensor b = torch::ones({2}, torch::requires_grad());
  const std::vector<ReducedParameter> only_a{{"a", a}}, only_b{{"b", b}}, both{{"b", b}, {"a", a}};
  SGD first{{a}, 0.1}, second{{b}, 0.1};
  LiveOptimizers live;
};

TEST_F(LiveOptimizersTest, AnOptimizerIsWrappedOnceAtATime) {
  live.add(first, only_a, false, "Wrapper");
  const std::string wrapped =
      message_of<UsageError>([&] { live.add(first, only_b, false, "Wrapper"); });
  EXPECT_TRUE(contains(wrapped, "wrapped by another DistributedOptimizer")) << wrapped;
  live.remove(first, false);
  EXPECT_NO_THROW(live.add(first, only_b, false, "Wrapper"));
}

TEST_F(LiveOptimizersTest, AParameterIsInOneAtATime) {
  live.add(first, only_a, false, "Wrapper");
  const std::string owned =
      message_of<UsageError>([&] { live.add(second, both, false, "Wrapper"); });
  EXPECT_TRUE(contains(owned, "parameter 'a' belongs to another")) << owned;
  EXPECT_NO_THROW(live.add(second, only_b, false, "Wrapper")) << "a refused optimizer owns nothing";
  live.remove(second, false);
  live.remove(first, false);
  EXPECT_NO_THROW(live.add(second, both, false, "Wrapper"));
}

TEST_F(LiveOptimizersTest, OnlyTheParametersOfTheOptimizerThatGoesAreFree) {
  live.add(first, only_a, false, "Wrapper");
  live.add(second, only_b, false, "Wrapper");
  live.remove(second, false);
  SGD third{{a}, 0.1};
  EXPECT_THROW(live.add(third, only_a, false, "Wrapper"), UsageError);
  EXPECT_NO_THROW(live.add(third, only_b, false, "Wrapper"));
}

TEST_F(LiveOptimizersTest, OneThatIsHereMayGetMoreAndGiveThemBack) {
  live.add(first, only_a, false, "Wrapper");
  live.extend(first, both, "Wrapper");
  EXPECT_THROW(live.add(second, only_b, false, "Wrapper"), UsageError);
  live.shrink(first, std::vector<torch::Tensor>{a});
  live.add(second, only_b, false, "Wrapper");
  EXPECT_THROW(live.extend(first, both, "Wrapper"), UsageError);
  EXPECT_THROW(live.extend(second, only_a, "Wrapper"), UsageError) << "it is still the first one's";
}

TEST_F(LiveOptimizersTest, CountsThoseThatAverage) {
  live.add(first, only_a, true, "Wrapper");
  live.add(second, only_b, false, "Wrapper");
  EXPECT_EQ(live.averaging(), 1);
  EXPECT_THROW(live.add(second, only_b, true, "Wrapper"), UsageError);
  EXPECT_EQ(live.averaging(), 1);
  live.remove(second, false);
  EXPECT_EQ(live.averaging(), 1);
  live.remove(first, true);
  EXPECT_EQ(live.averaging(), 0);
}

TEST_F(LiveOptimizersTest, NumbersThoseOfAProcessSet) {
  EXPECT_EQ(live.next_scope({}), "opt0");
  EXPECT_EQ(live.next_scope({}), "opt1");
  const ProcessSet set = add_process_set({0});
  EXPECT_EQ(live.next_scope(set), "opt0");
  EXPECT_EQ(live.next_scope({}), "opt2");
  remove_process_set(set);
}

}  // namespace
}  // namespace hvd::libtorch
