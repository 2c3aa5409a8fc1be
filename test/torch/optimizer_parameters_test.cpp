#include <functional>

#include "torch/support/torch_test.h"

// Tests how a DistributedOptimizer gets its parameters and their names, and how more are added.

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
  { const DistributedOptimizer optimizer(sgd, net.ptr(), {.groups = {{"fc1.bias"}}}); }
  { const DistributedOptimizer optimizer(sgd, std::shared_ptr<torch::nn::Module>(net.ptr())); }
  { const ShardedOptimizer optimizer(sgd, net.ptr(), {.check_every = 0}); }
  { const DistributedOptimizer optimizer(sgd, net->named_parameters(), {.check_every = 0}); }
  {
    const DistributedOptimizer optimizer(sgd, {{"w", net->fc1->weight}, {"b", net->fc1->bias}},
                                         {.groups = {{"b", "w"}}});
  }
}

// Gives parameters the names of hvd's own operations in an optimizer's scope.
TEST(Names, ThatHvdUsesItself) {
  NamedParameters named;
  for (const char* const name :
       {"add_param_group", "buckets", "descriptions", "finite", "found_inf", "layouts", "loss",
        "norm", "open", "options", "order", "parameters", "shards", "used", "weight"})
    named.insert(name, torch::ones({3}, torch::requires_grad()));
  for (const bool views : {true, false}) {
    SGD sgd(named.values(), 0.1);
    DistributedOptimizer optimizer(sgd, named,
                                   {.gradient_as_bucket_view = views, .error_if_nonfinite = true});
    for (int step = 0; step < 3; ++step) {
      const auto closure = [&] {
        optimizer.zero_grad();
        torch::Tensor loss = (torch::stack(named.values()) * static_cast<double>(rank())).sum();
        loss.backward();
        return loss;
      };
      optimizer.step(closure);
      EXPECT_TRUE(near(named["used"].grad(), torch::full({3}, static_cast<float>(size() - 1) / 2)));
    }
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
  const std::shared_ptr<NetImpl> null;
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { DistributedOptimizer(sgd, null); }, [&] { ShardedOptimizer(sgd, null); },
           [&] { broadcast_parameters(null); }, [&] { broadcast_buffers(null); }})
    EXPECT_TRUE(contains(message_of<UsageError>(call), "null"));
}

// Two optimizers take turns. As in every GAN, the generator's backward also leaves gradients in the
// discriminator.
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

OptimizerParamGroup group_of(const torch::nn::Module& module, double lr) {
  return {module.parameters(), std::make_unique<SGDOptions>(with_momentum(lr))};
}

// fc2 is frozen at first; later it is trained with its own learning rate.
TEST(AddParamGroup, TrainsAsInOneProcess) {
  for (const Wrap& wrap : {Wrap(by_module), Wrap(by_number)}) {
    for (const int steps_before : {0, 1, 4}) {
      SCOPED_TRACE(steps_before);
      Nets nets;
      std::vector<std::unique_ptr<SGD>> inner;
      for (Net* const net : {&nets.distributed, &nets.serial}) {
        for (auto& parameter : (*net)->fc2->parameters()) parameter.requires_grad_(false);
        std::vector<torch::Tensor> others = (*net)->fc1->parameters();
        for (const auto& parameter : (*net)->norm->parameters()) others.push_back(parameter);
        inner.push_back(std::make_unique<SGD>(others, with_momentum()));
      }
      const auto optimizer = wrap(*inner[0], nets.distributed, {});
      nets.train(*optimizer, *inner[1], 0, steps_before);
      for (Net* const net : {&nets.distributed, &nets.serial})
        for (auto& parameter : (*net)->fc2->parameters()) parameter.requires_grad_(true);
      optimizer->add_param_group(group_of(*nets.distributed->fc2, 0.2));
      inner[1]->add_param_group(group_of(*nets.serial->fc2, 0.2));
      nets.train(*optimizer, *inner[1], steps_before, 5);
      nets.expect_equal();
      EXPECT_EQ(inner[0]->param_groups().size(), 2U);
    }
  }
}

// Adds a layer that no module had when the optimizer was wrapped.
TEST(AddParamGroup, TakesNamesForNewLayersOrNumbersThem) {
  for (const bool numbers : {false, true}) {
    Nets nets;
    SGD sgd(nets.distributed->parameters(), with_momentum());
    const auto optimizer = (numbers ? by_number : by_module)(sgd, nets.distributed, {});
    torch::nn::Linear head(2, 2);
    broadcast_parameters(head);
    NamedParameters names;
    for (const auto& item : head->named_parameters())
      names.insert("head." + item.key(), item.value());
    if (!numbers) {
      EXPECT_TRUE(contains(
          message_of<UsageError>([&] { optimizer->add_param_group(group_of(*head, 0.1)); }),
          "parameter 0 of parameter group 1, shape [2,2], has no name"));
      EXPECT_EQ(sgd.param_groups().size(), 1U) << "nothing has changed";
    }
    optimizer->add_param_group(group_of(*head, 0.1), numbers ? NamedParameters() : names);
    const torch::Tensor before = head->weight.detach().clone();
    const torch::Tensor x = torch::full({1, 2}, rank() + 1.0);
    for (int i = 0; i < 3; ++i) {
      optimizer->zero_grad();
      head->forward(x).sum().backward();
      optimizer->step();
    }
    // The gradient of a sum is the input, (size + 1) / 2 on average; momentum: 1 + 1.9 + 2.71.
    EXPECT_TRUE(near(head->weight.detach(), before - 0.1 * 5.61 * (size() + 1) / 2, 1e-5));
    EXPECT_TRUE(same_on_all_ranks(head->parameters()));
  }
}

TEST(AddParamGroup, PassesAndGuardsCountOn) {
  Nets nets;
  SGD sgd(nets.distributed->fc1->parameters(), with_momentum());
  SGD reference(nets.serial->fc1->parameters(), with_momentum());
  DistributedOptimizer optimizer(sgd, *nets.distributed, {.backward_passes_per_step = 2});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    {
      const auto guard = optimizer.no_sync();
      if (step == 1) {
        optimizer.add_param_group(group_of(*nets.distributed->fc2, 0.1));
        reference.add_param_group(group_of(*nets.serial->fc2, 0.1));
        optimizer.zero_grad();
        reference.zero_grad();
      }
      loss_of(nets.distributed, Batch::of_rank(rank(), 10 + step)).backward();
    }
    loss_of(nets.serial, Batch::joined(10 + step)).backward();
    for (int pass = 0; pass < 2; ++pass) {
      loss_of(nets.distributed, Batch::of_rank(rank(), pass)).backward();
      loss_of(nets.serial, Batch::joined(pass)).backward();
    }
    EXPECT_THROW(loss_of(nets.distributed, Batch::of_rank(rank(), 2)).backward(), UsageError);
    optimizer.step();
    reference.step();
  }
  nets.expect_equal();
}

TEST(AddParamGroup, RanksThatAddOthersGetAnErrorAndNothingChanges) {
  if (size() == 1) return;
  Nets nets;
  SGD sgd(nets.distributed->fc1->parameters(), with_momentum());
  SGD reference(nets.serial->fc1->parameters(), with_momentum());
  DistributedOptimizer optimizer(sgd, *nets.distributed);
  nets.train(optimizer, reference, 0, 3);
  const bool last = rank() == size() - 1;
  const std::string different = message_of<MismatchError>([&] {
    optimizer.add_param_group(
        last ? OptimizerParamGroup(std::vector<torch::Tensor>{nets.distributed->fc2->bias})
             : OptimizerParamGroup(nets.distributed->fc2->parameters()));
  });
  EXPECT_TRUE(contains(different, "add_param_group: rank 0 adds 'fc2.weight'")) << different;
  EXPECT_TRUE(contains(different, "rank " + std::to_string(size() - 1) + " adds 'fc2.bias'"));

  torch::nn::Linear unnamed(2, 2);
  const auto add = [&] {
    optimizer.add_param_group(last ? group_of(*unnamed, 0.1)
                                   : group_of(*nets.distributed->fc2, 0.1));
  };
  if (last) {
    EXPECT_TRUE(contains(message_of<UsageError>(add), "has no name"));
  } else {
    const std::string theirs = message_of<MismatchError>(add);
    EXPECT_TRUE(contains(theirs, "rank " + std::to_string(size() - 1) + " cannot add its group"));
  }
  EXPECT_EQ(sgd.param_groups().size(), 1U);
  nets.train(optimizer, reference, 3, 3);
  nets.expect_equal();
}

TEST(AddParamGroup, WrongCalls) {
  Net net = same_net();
  SGD sgd(net->fc1->parameters(), with_momentum());
  DistributedOptimizer optimizer(sgd, *net);
  const auto refuses = [&](const OptimizerParamGroup& group, const NamedParameters& names,
                           const std::string& expected) {
    const std::string error =
        message_of<UsageError>([&] { optimizer.add_param_group(group, names); });
    EXPECT_TRUE(contains(error, expected)) << error;
    EXPECT_EQ(sgd.param_groups().size(), 1U);
  };
  refuses(group_of(*net->fc1, 0.1), NamedParameters(), "more than one parameter group");
  refuses(OptimizerParamGroup({net->fc2->bias, net->fc2->bias}), NamedParameters(), "twice");
  refuses(OptimizerParamGroup({torch::Tensor()}), NamedParameters(), "is undefined");
  SGD other(net->norm->parameters(), 0.1);
  {
    DistributedOptimizer owner(other, *net);
    refuses(group_of(*net->norm, 0.1), NamedParameters(), "'norm.weight' belongs to another");
    backward(net);
    owner.step();
    optimizer.step();
  }
  NamedParameters taken{{"fc1.weight", net->fc2->weight}};
  refuses(group_of(*net->fc2, 0.1), taken, "the name 'fc1.weight' is taken");
  optimizer.zero_grad();
  backward(net);
  refuses(group_of(*net->fc2, 0.1), NamedParameters(), "gradients are being reduced");
  optimizer.step();
  optimizer.add_param_group(group_of(*net->fc2, 0.1));
}

// The new parameters differ, as if each rank had drawn its own initial values.
TEST(AddParamGroup, DifferentNewParametersAreAnError) {
  if (size() == 1) return;
  Net net = same_net();
  SGD sgd(net->fc1->parameters(), with_momentum());
  DistributedOptimizer optimizer(sgd, *net);
  backward(net);
  optimizer.step();
  torch::NoGradGuard(), net->fc2->weight.add_(0.1 * rank());
  optimizer.add_param_group(group_of(*net->fc2, 0.1));
  optimizer.zero_grad();
  backward(net, 1);
  EXPECT_TRUE(contains(message_of<DivergedError>([&] { optimizer.step(); }), "'fc2.weight'"));
}

}  // namespace
}  // namespace hvd::testing
