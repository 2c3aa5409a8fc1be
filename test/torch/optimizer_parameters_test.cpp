#include <functional>

#include "torch/support/torch_test.h"

// Where a DistributedOptimizer has its parameters and their names from.

namespace hvd::testing {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

SGDOptions with_momentum(double lr = 0.05) { return SGDOptions(lr).momentum(0.9); }

/// The same net on every rank, and a copy that one process trains on the joined batch.
struct Nets {
  Net distributed = same_net();
  Net serial;
  Nets() { copy_values(*distributed, *serial); }

  void expect_equal(double tolerance = 1e-5) {
    const auto expected = serial->named_parameters();
    for (const auto& item : distributed->named_parameters())
      EXPECT_TRUE(near(item.value(), expected[item.key()], tolerance)) << item.key();
    EXPECT_TRUE(same_on_all_ranks(distributed->parameters()));
  }
  void train(DistributedOptimizer& optimizer, SGD& reference, int first, int steps) {
    for (int step = first; step < first + steps; ++step) {
      optimizer.zero_grad();
      loss_of(distributed, Batch::of_rank(rank(), step)).backward();
      optimizer.step();
      reference.zero_grad();
      loss_of(serial, Batch::joined(step)).backward();
      reference.step();
    }
  }
};

using Wrap =
    std::function<std::unique_ptr<DistributedOptimizer>(SGD&, Net&, DistributedOptimizerOptions)>;

std::unique_ptr<DistributedOptimizer> by_module(SGD& sgd, Net& net,
                                                DistributedOptimizerOptions options) {
  return std::make_unique<DistributedOptimizer>(sgd, *net, std::move(options));
}
std::unique_ptr<DistributedOptimizer> by_holder(SGD& sgd, Net& net,
                                                DistributedOptimizerOptions options) {
  return std::make_unique<DistributedOptimizer>(sgd, net, std::move(options));
}
std::unique_ptr<DistributedOptimizer> by_number(SGD& sgd, Net&,
                                                DistributedOptimizerOptions options) {
  return std::make_unique<DistributedOptimizer>(sgd, std::move(options));
}

TEST(Names, ComeFromTheModuleOrAreNumbers) {
  const std::vector<std::pair<Wrap, std::vector<std::string>>> ways{
      {by_module, {"fc1.weight", "fc2.bias"}},
      {by_holder, {"fc1.weight", "fc2.bias"}},
      {by_number, {"param0", "param5"}}};
  for (const auto& [wrap, names] : ways) {
    for (const bool grouped : {false, true}) {
      Nets nets;
      SGD sgd(nets.distributed->parameters(), with_momentum());
      SGD reference(nets.serial->parameters(), with_momentum());
      DistributedOptimizerOptions options;
      if (grouped) options.groups = {names};
      const auto optimizer = wrap(sgd, nets.distributed, options);
      nets.train(*optimizer, reference, 0, 6);
      nets.expect_equal();
    }
    Net net = same_net();
    SGD sgd(net->parameters(), 0.1);
    EXPECT_TRUE(contains(
        message_of<UsageError>([&, &wrap = wrap] { wrap(sgd, net, {.groups = {{"param6"}}}); }),
        "'param6' is not the name of a parameter"));
  }
}

TEST(Names, NumbersGoThroughTheGroupsAndCountEachOnce) {
  Net net = same_net();
  SGD sgd(
      {OptimizerParamGroup(net->fc2->parameters()), OptimizerParamGroup(net->fc1->parameters())},
      SGDOptions(0.1));
  const DistributedOptimizer optimizer(sgd, {.groups = {{"param0", "param3"}}});
  EXPECT_THROW(DistributedOptimizer(sgd, {.groups = {{"param4"}}}), UsageError);
}

// Options in braces, with and without names.
TEST(Names, EveryWayToCallTheConstructor) {
  Net net = same_net();
  SGD sgd(net->fc1->parameters(), 0.1);
  { const DistributedOptimizer optimizer(sgd); }
  { const DistributedOptimizer optimizer(sgd, {.op = ReduceOp::kSum}); }
  { const DistributedOptimizer optimizer(sgd, {.groups = {{"param0"}, {"param1"}}}); }
  { const DistributedOptimizer optimizer(sgd, net); }
  { const DistributedOptimizer optimizer(sgd, *net, {.groups = {{"fc1.bias"}}}); }
  { const DistributedOptimizer optimizer(sgd, net->fc1, {.groups = {{"bias"}}}); }
  { const DistributedOptimizer optimizer(sgd, net->named_parameters(), {.check_every = 0}); }
  {
    const DistributedOptimizer optimizer(sgd, {{"w", net->fc1->weight}, {"b", net->fc1->bias}},
                                         {.groups = {{"b", "w"}}});
  }
}

TEST(Names, AModuleWithoutParametersOrWithOthers) {
  Net net = same_net();
  SGD sgd(net->parameters(), 0.1);
  torch::nn::Sequential empty{torch::nn::ReLU()};
  EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedOptimizer(sgd, *empty); }),
                       "has no parameters"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedOptimizer(sgd, net->fc1); }),
                       "has no name"));
}

// Two optimizers in turns, of which the generator's backward also leaves gradients in the
// discriminator, as in every GAN.
TEST(TwoModules, AGanTrainsAsInOneProcess) {
  struct Gan {
    Net generator = same_net();
    torch::nn::Linear discriminator{2, 1};
    SGD generator_sgd{generator->parameters(), with_momentum()};
    SGD discriminator_sgd{discriminator->parameters(), with_momentum(0.1)};
    Gan() { broadcast_parameters(discriminator); }

    torch::Tensor discriminator_loss(const Batch& batch) {
      const torch::Tensor fake = generator->forward(batch.x).detach();
      return discriminator->forward(fake).square().mean() +
             (discriminator->forward(torch::tanh(fake + 1)) - 1).square().mean();
    }
    torch::Tensor generator_loss(const Batch& batch) {
      return (discriminator->forward(generator->forward(batch.x)) - 1).square().mean();
    }
  };
  torch::manual_seed(3);
  Gan ours, serial;
  copy_values(*ours.generator, *serial.generator);
  copy_values(*ours.discriminator, *serial.discriminator);
  DistributedOptimizer generator(ours.generator_sgd, *ours.generator);
  DistributedOptimizer discriminator(ours.discriminator_sgd, ours.discriminator);
  for (int step = 0; step < 8; ++step) {
    const Batch own = Batch::of_rank(rank(), step), joined = Batch::joined(step);
    discriminator.zero_grad();
    ours.discriminator_loss(own).backward();
    discriminator.step();
    generator.zero_grad();
    ours.generator_loss(own).backward();
    generator.step();

    serial.discriminator_sgd.zero_grad();
    serial.discriminator_loss(joined).backward();
    serial.discriminator_sgd.step();
    serial.generator_sgd.zero_grad();
    serial.generator_loss(joined).backward();
    serial.generator_sgd.step();
  }
  const auto expect_equal = [](const torch::nn::Module& actual, const torch::nn::Module& expected) {
    for (const auto& item : actual.named_parameters())
      EXPECT_TRUE(near(item.value(), expected.named_parameters()[item.key()], 1e-5)) << item.key();
    EXPECT_TRUE(same_on_all_ranks(actual.parameters()));
  };
  expect_equal(*ours.generator, *serial.generator);
  expect_equal(*ours.discriminator, *serial.discriminator);
}

}  // namespace
}  // namespace hvd::testing
