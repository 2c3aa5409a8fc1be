#include <set>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/sharded/sharded_job.h"

// Saves and loads a sharded optimizer, as shards and as a whole, at the same and at another number
// of ranks.

namespace hvd::testing {
namespace {

/// Makes the same model on every rank without communication.
Net seeded_net() {
  torch::manual_seed(41);
  return Net();
}

/// A model and its optimizer, wrapped by one of the two wrappers.
template <class Wrapper, class Options>
struct Training {
  Net net = seeded_net();
  std::unique_ptr<torch::optim::Optimizer> inner;
  Wrapper wrapper;

  explicit Training(const MakeOptimizer& make, const ProcessSet& set = {})
      : inner(make(net->parameters())), wrapper(*inner, net, Options{.process_set = set}) {}
  /// Every rank has the same batches, so that the number of ranks does not matter.
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      wrapper.zero_grad();
      loss_of(net, Batch::of_rank(0, step)).backward();
      wrapper.step();
    }
  }
  TrainingState state() { return TrainingState().model(net).optimizer(wrapper); }
};
using Sharded = Training<ShardedOptimizer, ShardedOptimizerOptions>;
using Whole = Training<DistributedOptimizer, DistributedOptimizerOptions>;

void expect_equal(Net& actual, Net& expected) {
  const auto theirs = expected->named_parameters();
  for (const auto& item : actual->named_parameters())
    EXPECT_TRUE(near(item.value(), theirs[item.key()], 1e-5)) << item.key();
}

/// Compares six uninterrupted steps with three steps, a checkpoint, and three more steps in another
/// wrapper.
template <class First, class Second>
void check_resumed() {
  for (const auto& [name, make] : elementwise_optimizers()) {
    SCOPED_TRACE(name);
    const SharedFolder folder;
    Whole uninterrupted(make);
    uninterrupted.train(0, 6);
    {
      First first(make);
      first.train(0, 3);
      first.inner->param_groups()[0].options().set_lr(0.003);
      save_checkpoint(folder.path(), first.state());
    }
    Second second(make);
    second.train(7, 9);  // the load replaces all of this
    EXPECT_TRUE(load_checkpoint(folder.path(), second.state()).has_value());
    EXPECT_EQ(second.inner->param_groups()[0].options().get_lr(), 0.003);
    second.inner->param_groups()[0].options().set_lr(
        uninterrupted.inner->param_groups()[0].options().get_lr());
    second.train(3, 6);
    expect_equal(second.net, uninterrupted.net);
  }
}

TEST(ShardedCheckpoint, GoesOnSharded) { check_resumed<Sharded, Sharded>(); }
TEST(ShardedCheckpoint, GoesOnWhole) { check_resumed<Sharded, Whole>(); }
TEST(ShardedCheckpoint, GoesOnShardedFromWhole) { check_resumed<Whole, Sharded>(); }

/// Saved by all ranks and loaded by some, and the other way round.
TEST(ShardedCheckpoint, LoadsAtAnotherNumberOfRanks) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const ProcessSet few =
      add_process_set(size() == 2 ? std::vector<int>{1} : std::vector<int>{0, 2});
  const auto make = elementwise_optimizers().at("Adam");
  Whole uninterrupted(make);
  uninterrupted.train(0, 6);
  for (const bool fewer : {true, false}) {
    SCOPED_TRACE(fewer);
    const SharedFolder folder;
    const ProcessSet from = fewer ? ProcessSet() : few;
    const ProcessSet to = fewer ? few : ProcessSet();
    if (from.included()) {
      Sharded first(make, from);
      first.train(0, 3);
      save_checkpoint(folder.path(), first.state(), {.process_set = from});
    }
    barrier();
    if (to.included()) {
      Sharded second(make, to);
      load_checkpoint(folder.path(), second.state(), {.process_set = to});
      second.train(3, 6);
      expect_equal(second.net, uninterrupted.net);
    }
    barrier();
  }
  remove_process_set(few);
}

/// No rank keeps the whole state, whether its wrapper has stepped before or not.
TEST(ShardedCheckpoint, ALoadedStateIsShardedAtOnce) {
  const auto make = elementwise_optimizers().at("Adam");
  const SharedFolder folder;
  Sharded first(make);
  first.train(0, 3);
  save_checkpoint(folder.path(), first.state());
  std::size_t saved = 0;
  for (const std::size_t bytes : allgather_object(first.wrapper.state_bytes())) saved += bytes;
  for (const int steps : {0, 3}) {
    Sharded second(make);
    second.train(0, steps);
    load_checkpoint(folder.path(), second.state());
    EXPECT_TRUE(second.inner->state().empty()) << steps;
    std::size_t all = 0;
    for (const std::size_t bytes : allgather_object(second.wrapper.state_bytes())) all += bytes;
    EXPECT_EQ(all, saved) << steps;
    second.train(3, 6);
  }
}

/// State can be saved before the first step, and right after it was loaded.
TEST(ShardedCheckpoint, IsSavedBeforeTheFirstStep) {
  for (const auto& [name, make] : elementwise_optimizers()) {
    SCOPED_TRACE(name);
    const SharedFolder folder;
    Whole uninterrupted(make);
    uninterrupted.train(0, 6);
    {
      Sharded first(make);
      save_checkpoint(folder.path(), first.state(), {.step = 0});
      load_checkpoint(folder.path(), first.state());
      first.train(0, 3);
      save_checkpoint(folder.path(), first.state(), {.step = 3});
    }
    {
      Sharded second(make);
      load_checkpoint(folder.path(), second.state());
      save_checkpoint(folder.path(), second.state(), {.step = 4});
    }
    Sharded third(make);
    load_checkpoint(folder.path(), third.state());
    third.train(3, 6);
    expect_equal(third.net, uninterrupted.net);
  }
}

/// The saved state follows the order that the elements had in the last step, not the current one.
TEST(ShardedCheckpoint, FollowsParametersThatGetOtherStrides) {
  const auto train = [](auto& wrapper, torch::nn::Conv2d& layer, int from, int to) {
    for (int step = from; step < to; ++step) {
      torch::manual_seed(step);
      wrapper.zero_grad();
      layer->forward(torch::randn({2, 4, 5, 5})).pow(2).mean().backward();
      wrapper.step();
    }
  };
  const auto make = [] {
    torch::manual_seed(7);
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3));
  };
  const SharedFolder folder;
  torch::nn::Conv2d expected = make(), layer = make();
  torch::optim::Adam reference(expected->parameters(), torch::optim::AdamOptions(0.01));
  train(reference, expected, 0, 6);
  torch::optim::Adam inner(layer->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, layer);
  train(optimizer, layer, 0, 3);
  for (const auto format : {torch::MemoryFormat::ChannelsLast, torch::MemoryFormat::Contiguous}) {
    layer->weight.set_data(layer->weight.detach().contiguous(format));
    save_checkpoint(folder.path(), TrainingState().optimizer(optimizer));
    load_checkpoint(folder.path(), TrainingState().optimizer(optimizer));
  }
  train(optimizer, layer, 3, 6);
  EXPECT_TRUE(near(layer->weight, expected->weight, 1e-5));
}

/// Each rank's file has its part only.
TEST(ShardedCheckpoint, EachRankWritesItsPart) {
  const SharedFolder folder;
  torch::nn::Linear net(256, 256);
  broadcast_parameters(net);
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, net);
  for (int step = 0; step < 2; ++step) {
    net->forward(torch::ones({2, 256})).sum().backward();
    optimizer.step();
  }
  save_checkpoint(folder.path(), TrainingState().optimizer(optimizer));
  std::uintmax_t most = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (file.is_regular_file()) most = std::max(most, file.file_size());
  }
  const auto whole = static_cast<std::uintmax_t>(2 * 4 * (256 * 256 + 256));
  EXPECT_LT(most, whole / static_cast<std::uintmax_t>(size()) + 16384);
}

TEST(ShardedCheckpoint, AnotherOptimizerIsRefusedAndNothingChanges) {
  const SharedFolder folder;
  {
    Sharded adam(elementwise_optimizers().at("Adam"));
    adam.train(0, 2);
    save_checkpoint(folder.path(), adam.state());
  }
  Sharded sgd(elementwise_optimizers().at("SGD"));
  sgd.train(0, 2);
  const auto before = sgd.net->fc1->weight.detach().clone();
  const std::size_t bytes = sgd.wrapper.state_bytes();
  const std::string message =
      message_of<CheckpointError>([&] { load_checkpoint(folder.path(), sgd.state()); });
  EXPECT_TRUE(contains(message, "torch::optim::Adam")) << message;
  EXPECT_TRUE(torch::equal(before, sgd.net->fc1->weight));
  EXPECT_EQ(sgd.wrapper.state_bytes(), bytes);
}

}  // namespace
}  // namespace hvd::testing
