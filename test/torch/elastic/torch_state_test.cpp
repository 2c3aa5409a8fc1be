// TorchState in a job that is not elastic: run() sends the state of rank 0 to all ranks in the same
// way as in a generation.
#include <c10/util/Type.h>

#include <map>
#include <sstream>
#include <string>
#include <typeinfo>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using elastic::Copy;
using elastic::TorchState;

struct ModelImpl : torch::nn::Module {
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(4, 5));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(5));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(5, 2));
  /// @param in_order false: a parameter has elements that do not lie in order
  explicit ModelImpl(bool in_order = true) {
    if (!in_order) fc2->weight.set_data(torch::rand({5, 2}).t());
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc2(norm(fc1(x))); }
};
TORCH_MODULE(Model);

void train(Model& model, torch::optim::Optimizer& optimizer, int steps) {
  for (int i = 0; i < steps; ++i) {
    const torch::Tensor x = torch::rand({6, 4});
    const auto loss = [&] {
      optimizer.zero_grad();
      torch::Tensor value = model->forward(x).square().mean();
      value.backward();
      return value;
    };
    optimizer.step(loss);
  }
}

std::vector<torch::Tensor> tensors_of(const Model& model) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : model->parameters()) all.push_back(parameter.detach().contiguous());
  for (const auto& buffer : model->buffers()) all.push_back(buffer.contiguous());
  return all;
}

/// Different on each rank until run() has made it that of rank 0.
template <class Optimizer, class Options>
void expect_state_of_rank_0(const Options& options, Copy copy) {
  SCOPED_TRACE(c10::demangle(typeid(Optimizer).name()));
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  Model model(std::is_same_v<Optimizer, torch::optim::LBFGS>);  // which needs them in order
  Optimizer optimizer(model->parameters(), options);
  train(model, optimizer, 2 + rank());
  optimizer.param_groups().front().options().set_lr(0.01 * (rank() + 1));
  std::map<std::string, int> value = {{"rank", rank()}};
  torch::Tensor tensor = torch::full({3}, rank());
  std::int64_t number = rank();
  std::vector<float> numbers(static_cast<std::size_t>(rank()), 1.0F);
  GradScaler scaler({.init_scale = 16.0 * (rank() + 1)});
  torch::optim::StepLR scheduler(optimizer, 3, 0.5);
  for (int i = 0; i < rank(); ++i) scheduler.step();
  elastic::Sampler sampler(100, {.batch = 1});
  for (int i = 0; i <= rank(); ++i) sampler.next();
  const std::vector<torch::Tensor> before = broadcast_object(tensors_of(model), 0);
  TorchState state(model, optimizer, {.copy = copy});
  state.track("value", value).track("tensor", tensor).track("number", number);
  state.track("numbers", numbers).track("scaler", scaler).track("scheduler", scheduler);
  state.track("sampler", sampler).random(3);
  int entered = 0;
  elastic::run(state, [&] {
    ++entered;
    const std::vector<torch::Tensor> now = tensors_of(model);
    ASSERT_EQ(now.size(), before.size());
    for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(torch::equal(now[i], before[i])) << i;
    EXPECT_EQ(value.at("rank"), 0);
    EXPECT_EQ(tensor[0].item<std::int64_t>(), 0);
    EXPECT_EQ(number, 0);
    EXPECT_TRUE(numbers.empty());
    EXPECT_EQ(scaler.get_scale(), 16.0);
    EXPECT_EQ(sampler.samples_used(), static_cast<std::size_t>(size()));
    EXPECT_EQ(optimizer.param_groups().front().options().get_lr(), 0.01);
    // The same steps from here on, although the state of Adam and the momentum differed.
    torch::manual_seed(5);
    train(model, optimizer, 2);
    EXPECT_TRUE(same_on_all_ranks(tensors_of(model)));
    state.commit();
    const torch::Tensor drawn = torch::rand({1});
    const torch::Tensor all = allgather(drawn);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) {
        EXPECT_NE(all[r].item<float>(), drawn.item<float>());
      }
    }
  });
  EXPECT_EQ(entered, 1);
}

TEST(TorchState, TheStateOfRank0IsSentToAll) {
  for (const Copy copy : {Copy::kNone, Copy::kAtCommit}) {
    expect_state_of_rank_0<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), copy);
    expect_state_of_rank_0<torch::optim::Adam>(torch::optim::AdamOptions(0.1).amsgrad(true), copy);
    expect_state_of_rank_0<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1), copy);
    expect_state_of_rank_0<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1), copy);
    expect_state_of_rank_0<torch::optim::LBFGS>(torch::optim::LBFGSOptions(0.1), copy);
  }
}

TEST(TorchState, AnOptionThatIsWrittenToTheWrapperBelongsToTheState) {
  Model model;
  torch::optim::SGD sgd(model->parameters(), 0.1);
  DistributedOptimizer optimizer(sgd, model);
  optimizer.param_groups().front().options().set_lr(0.5 + rank());
  if (size() == 1) return;  // no state is sent
  TorchState state(model, sgd);
  elastic::run(state, [&] {
    EXPECT_EQ(sgd.param_groups().front().options().get_lr(), 0.5);
    EXPECT_EQ(optimizer.param_groups().front().options().get_lr(), 0.5);
  });
}

TEST(TorchState, WrongObjectsAreUsageErrors) {
  Model model;
  torch::optim::Adam adam(model->parameters(), 0.1);
  TorchState state(model, adam);
  EXPECT_THROW(state.track("model", model), UsageError);
  EXPECT_THROW(state.track("none", torch::Tensor()), UsageError);
  EXPECT_THROW(state.track("sparse", torch::zeros({2, 2}).to_sparse()), UsageError);
  EXPECT_THROW(state.track("empty", torch::nn::ReLU()), UsageError);
  ShardedOptimizer sharded(adam, model);
  TorchState other;
  EXPECT_TRUE(contains(message_of<UsageError>([&] { other.track("sharded", sharded); }),
                       "expected a TorchState with Copy::kAtCommit"));
  TorchState copying({.copy = Copy::kAtCommit});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { copying.track("inner", adam); }),
                       "a ShardedOptimizer has the state of this optimizer"));
}

/// Updates whole parameters only.
struct OwnSgd : torch::optim::SGD {
  using SGD::SGD;
};

TEST(TorchState, AShardedOptimizerThatCannotBeDistributedAnewIsAUsageError) {
  Model model;
  OwnSgd sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  ShardedOptimizer sharded(sgd, model);
  TorchState state({.copy = Copy::kAtCommit});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { state.track("sharded", sharded); }),
                       "cannot be distributed anew"));
  Model other;
  torch::optim::SGD none(other->parameters(), 0.1);
  const auto make = [&] { ShardedOptimizer(none, other, {.replicas = 2}); };
  EXPECT_TRUE(contains(message_of<UsageError>(make), "replicas: expected 0 or 1"));
}

/// The whole state of an optimizer, as it is saved. Collective for a ShardedOptimizer.
std::vector<torch::Tensor> moments_of(torch::optim::Optimizer& optimizer, Model& model) {
  std::stringstream bytes;
  torch::save(optimizer, bytes);
  Model same;
  torch::optim::Adam whole(same->parameters(), 0.1);
  torch::load(whole, bytes);
  std::vector<torch::Tensor> all;
  for (const torch::Tensor& parameter : same->parameters()) {
    const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
    if (found == whole.state().end()) continue;
    const auto& state = static_cast<const torch::optim::AdamParamState&>(*found->second);
    all.insert(all.end(), {state.exp_avg(), state.exp_avg_sq()});
  }
  EXPECT_EQ(all.size(), 2 * model->parameters().size());
  return all;
}

TEST(TorchState, AShardedOptimizerReceivesTheStateThatRank0Loads) {
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  Model trained, model;
  torch::optim::Adam adam(trained->parameters(), 0.1), inner(model->parameters(), 0.1);
  train(trained, adam, 3);
  broadcast_parameters(model);
  ShardedOptimizer sharded(inner, model);
  TorchState state(model, sharded, {.copy = Copy::kAtCommit});
  const auto load = [&] {
    std::stringstream bytes;
    torch::save(adam, bytes);
    torch::load(static_cast<torch::optim::Optimizer&>(sharded), bytes);
  };
  const std::vector<torch::Tensor> expected = broadcast_object(moments_of(adam, trained), 0);
  elastic::run(state,
               [&] {
                 const std::vector<torch::Tensor> loaded = moments_of(sharded, model);
                 ASSERT_EQ(loaded.size(), expected.size());
                 for (std::size_t i = 0; i < loaded.size(); ++i)
                   EXPECT_TRUE(torch::equal(loaded[i], expected[i])) << i;
                 train(model, sharded, 2);  // distributes it
                 for (const torch::Tensor& parameter : model->parameters())
                   EXPECT_TRUE(same_on_all_ranks(parameter.detach().contiguous()));
                 state.commit();
               },
               {.load = load});
}

}  // namespace
}  // namespace hvd::testing
