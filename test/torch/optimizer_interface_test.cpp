#include <cmath>
#include <functional>
#include <limits>
#include <sstream>

#include "torch/support/torch_test.h"

// Uses a DistributedOptimizer in code that uses only torch::optim::Optimizer.

namespace hvd::testing {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

using MakeInner = std::function<std::unique_ptr<Optimizer>(Net&)>;
using BatchOf = std::function<Batch(int step)>;

Batch own_batch(int step) { return Batch::of_rank(rank(), step); }

void train(Optimizer& optimizer, Net& net, const BatchOf& batch, int first, int steps,
           bool set_to_none = true) {
  for (int step = first; step < first + steps; ++step) {
    optimizer.zero_grad(set_to_none);
    loss_of(net, batch(step)).backward();
    optimizer.step();
  }
}

/// Two groups; the second has its own learning rate.
template <class O, class Options>
MakeInner two_groups(const Options& options) {
  return [options](Net& net) {
    std::vector<torch::Tensor> rest = net->fc1->parameters();
    for (const auto& parameter : net->norm->parameters()) rest.push_back(parameter);
    Options other = options;
    other.lr(options.lr() / 2);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(rest);
    groups.emplace_back(net->fc2->parameters(), std::make_unique<Options>(other));
    return std::make_unique<O>(groups, options);
  };
}

MakeInner sgd() { return two_groups<SGD>(SGDOptions(0.05).momentum(0.9).weight_decay(0.01)); }
MakeInner adam() { return two_groups<torch::optim::Adam>(torch::optim::AdamOptions(0.01)); }

/// A wrapped optimizer, and one that trains on the joined batch, as a single process would.
struct Both {
  Net net = same_net(), serial_net;
  std::unique_ptr<Optimizer> inner, serial;
  std::unique_ptr<DistributedOptimizer> optimizer;

  explicit Both(const MakeInner& make) {
    copy_values(*net, *serial_net);
    inner = make(net);
    serial = make(serial_net);
    optimizer = std::make_unique<DistributedOptimizer>(*inner, net);
  }
  void train_both(int first, int steps, bool set_to_none = true) {
    train(*optimizer, net, own_batch, first, steps, set_to_none);
    train(*serial, serial_net, Batch::joined, first, steps, set_to_none);
  }
  void expect_equal(double tolerance = 2e-5) {
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(near(item.value(), serial_net->named_parameters()[item.key()], tolerance))
          << item.key();
    }
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
};

double lr_of(Optimizer& optimizer, std::size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}
void set_lr(Optimizer& optimizer, double lr, std::size_t group = 0) {
  optimizer.param_groups()[group].options().set_lr(lr);
}

TEST(AsOptimizer, AFunctionThatKnowsNothingOfRanksTrainsAsInOneProcess) {
  for (const MakeInner& make : {sgd(), adam()}) {
    for (const bool set_to_none : {true, false}) {
      Both both(make);
      both.train_both(0, 6, set_to_none);
      both.expect_equal();
      Optimizer& base = *both.optimizer;
      EXPECT_EQ(base.size(), both.serial->size());
      EXPECT_EQ(base.param_groups().size(), 2U);
    }
  }
}

// In the first step gradients are not sent yet; later other ranks may have reduced them.
TEST(AsOptimizer, ZeroGradDropsRunningReductions) {
  Both both(sgd());
  for (int step = 0; step < 5; ++step) {
    Optimizer& base = *both.optimizer;
    loss_of(both.net, own_batch(100 + step)).backward();
    base.zero_grad();
    both.train_both(step, 1);
  }
  both.expect_equal();
}

TEST(AsOptimizer, SchedulersTakeIt) {
  Both both(sgd());
  {
    torch::optim::StepLR scheduler(*both.optimizer, 2, 0.5), serial(*both.serial, 2, 0.5);
    for (int step = 0; step < 6; ++step) {
      both.train_both(step, 1);
      scheduler.step();
      serial.step();
    }
  }
  for (const std::size_t group : {0, 1})
    EXPECT_DOUBLE_EQ(lr_of(both.optimizer->inner(), group), lr_of(*both.serial, group));
  EXPECT_DOUBLE_EQ(lr_of(*both.inner), 0.05 / 4);
  both.expect_equal();

  torch::optim::ReduceLROnPlateauScheduler plateau(
      *both.optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
  torch::optim::ReduceLROnPlateauScheduler serial(
      *both.serial, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
  for (int step = 6; step < 10; ++step) {
    both.train_both(step, 1);
    plateau.step(1.0F);
    serial.step(1.0F);
  }
  both.expect_equal();
  EXPECT_LT(lr_of(*both.inner), 0.05 / 8) << "it has not improved";
}

TEST(AsOptimizer, ChangesOfTheWrappedOptimizerTakeEffect) {
  Both both(adam());
  torch::optim::StepLR scheduler(*both.inner, 1, 0.1), serial(*both.serial, 1, 0.1);
  for (int step = 0; step < 3; ++step) {
    both.train_both(step, 1);
    scheduler.step();
    serial.step();
    EXPECT_DOUBLE_EQ(both.optimizer->param_groups()[1].options().get_lr(), lr_of(*both.inner, 1));
  }
  both.expect_equal();
}

/// Writes each option, in turns to the wrapper and to the wrapped optimizer, and expects it in the
/// other.
template <class Options>
void expect_one(const MakeInner& make, const std::vector<std::function<void(Options&)>>& changes) {
  Net net = same_net();
  const auto inner = make(net);
  DistributedOptimizer optimizer(*inner, net);
  Optimizer& wrapper = optimizer;
  for (std::size_t c = 0; c < changes.size(); ++c) {
    Optimizer* const sides[] = {&wrapper, inner.get()};
    Optimizer& written = *sides[c % 2];
    Optimizer& read = *sides[1 - c % 2];
    const auto of = [](Optimizer& side) -> Options& {
      return static_cast<Options&>(side.param_groups()[1].options());
    };
    const Options before = of(read);
    changes[c](of(written));
    changes[c](static_cast<Options&>(written.defaults()));
    EXPECT_FALSE(of(written) == before) << "change " << c << " changes nothing";
    optimizer.inner();
    EXPECT_TRUE(of(read) == of(written)) << "change " << c;
    EXPECT_TRUE(static_cast<Options&>(read.defaults()) ==
                static_cast<Options&>(written.defaults()));
    EXPECT_FALSE(of(read) == static_cast<Options&>(read.param_groups()[0].options()));
  }
}

TEST(AsOptimizer, EveryOptionOfEveryOptimizerIsOne) {
  expect_one<SGDOptions>(sgd(),
                         {[](auto& o) { o.lr(3); }, [](auto& o) { o.momentum(0.3); },
                          [](auto& o) { o.dampening(0.3); }, [](auto& o) { o.weight_decay(0.3); },
                          [](auto& o) { o.nesterov(true); }});
  const auto of_adam = [](auto options) {
    using Options = decltype(options);
    return std::vector<std::function<void(Options&)>>{
        [](auto& o) { o.lr(3); }, [](auto& o) { o.betas({0.5, 0.6}); }, [](auto& o) { o.eps(0.3); },
        [](auto& o) { o.weight_decay(0.3); }, [](auto& o) { o.amsgrad(true); }};
  };
  expect_one<torch::optim::AdamOptions>(adam(), of_adam(torch::optim::AdamOptions()));
  expect_one<torch::optim::AdamWOptions>(
      two_groups<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1)),
      of_adam(torch::optim::AdamWOptions()));
  expect_one<torch::optim::AdagradOptions>(
      two_groups<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1)),
      {[](auto& o) { o.lr(3); }, [](auto& o) { o.lr_decay(0.3); },
       [](auto& o) { o.weight_decay(0.3); }, [](auto& o) { o.initial_accumulator_value(0.3); },
       [](auto& o) { o.eps(0.3); }});
  expect_one<torch::optim::RMSpropOptions>(
      two_groups<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1)),
      {[](auto& o) { o.lr(3); }, [](auto& o) { o.alpha(0.3); }, [](auto& o) { o.eps(0.3); },
       [](auto& o) { o.weight_decay(0.3); }, [](auto& o) { o.momentum(0.3); },
       [](auto& o) { o.centered(true); }});
}

// LBFGS has one group.
TEST(AsOptimizer, LbfgsTakesOptionsAndAClosure) {
  Both both([](Net& net) {
    return std::make_unique<torch::optim::LBFGS>(net->parameters(),
                                                 torch::optim::LBFGSOptions(0.1).max_iter(2));
  });
  const auto options = [](Optimizer& optimizer) -> torch::optim::LBFGSOptions& {
    return static_cast<torch::optim::LBFGSOptions&>(optimizer.param_groups()[0].options());
  };
  const auto change = [&](Optimizer& optimizer) {
    options(optimizer).max_iter(3).max_eval(5).tolerance_grad(1e-6).tolerance_change(1e-8);
    options(optimizer).history_size(4).line_search_fn("strong_wolfe");
  };
  Optimizer& base = *both.optimizer;
  change(base);
  change(*both.serial);
  for (int step = 0; step < 3; ++step) {
    const auto closure = [step](Optimizer& optimizer, Net& net, const BatchOf& batch) {
      return [step, &optimizer, &net, batch] {
        optimizer.zero_grad();
        torch::Tensor loss = loss_of(net, batch(step));
        loss.backward();
        return loss;
      };
    };
    base.step(closure(base, both.net, own_batch));
    both.serial->step(closure(*both.serial, both.serial_net, Batch::joined));
  }
  EXPECT_TRUE(options(*both.inner) == options(*both.serial));
  both.expect_equal(2e-3);  // its line search magnifies roundings
}

TEST(AsOptimizer, OneOptionWrittenOnBothSidesIsAnError) {
  Both both(sgd());
  both.train_both(0, 2);
  Optimizer& base = *both.optimizer;
  const auto momentum = [](Optimizer& optimizer) -> double& {
    return static_cast<SGDOptions&>(optimizer.param_groups()[1].options()).momentum();
  };
  set_lr(*both.inner, 0.01, 1);  // another option, to be kept
  momentum(base) = 0.5;
  momentum(*both.inner) = 0.25;
  const std::vector<torch::Tensor> before{both.net->fc1->weight.detach().clone()};
  loss_of(both.net, own_batch(2)).backward();
  const std::string error = message_of<UsageError>([&] { base.step(); });
  EXPECT_TRUE(contains(error, "the option momentum of parameter group 1 was written on both"))
      << error;
  EXPECT_TRUE(contains(error, "0.5 in the DistributedOptimizer and 0.25 in")) << error;
  EXPECT_TRUE(torch::equal(before[0], both.net->fc1->weight.detach())) << "nothing was stepped";
  EXPECT_EQ(momentum(base), 0.5);
  EXPECT_EQ(momentum(*both.inner), 0.25);
  EXPECT_EQ(lr_of(base, 1), 0.025) << "nothing was copied";

  momentum(base) = 0.25;
  both.optimizer->zero_grad();
  momentum(*both.serial) = 0.25;
  set_lr(*both.serial, 0.01, 1);
  both.train_both(2, 3);
  both.expect_equal();
  EXPECT_EQ(lr_of(base, 1), 0.01);
}

TEST(AsOptimizer, TheSameOnBothSidesIsNone) {
  Both both(sgd());
  Optimizer& base = *both.optimizer;
  for (Optimizer* side : {&base, both.inner.get(), both.serial.get()}) set_lr(*side, 0.01);
  both.train_both(0, 2);
  both.expect_equal();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (Optimizer* side : {&base, both.inner.get()}) set_lr(*side, nan);
  base.step();
}

TEST(AsOptimizer, SaveAndLoadAreThoseOfTheWrappedOne) {
  for (const MakeInner& make : {sgd(), adam()}) {
    Both both(make);
    both.train_both(0, 3);
    set_lr(*both.optimizer, 0.03);
    set_lr(*both.serial, 0.03);
    std::stringstream ours;
    torch::save(static_cast<Optimizer&>(*both.optimizer), ours);

    // Loads the state into a plain optimizer, and from there into a wrapped one.
    Both other(make);
    copy_values(*both.net, *other.net);
    copy_values(*both.net, *other.serial_net);
    torch::load(*other.serial, ours);
    std::stringstream again;
    torch::save(*other.serial, again);
    torch::optim::StepLR scheduler(*other.optimizer, 1, 0.5), serial(*both.serial, 1, 0.5);
    torch::load(static_cast<Optimizer&>(*other.optimizer), again);
    EXPECT_DOUBLE_EQ(lr_of(*other.optimizer), 0.03);
    EXPECT_EQ(other.optimizer->state().size(), both.inner->state().size());
    for (int step = 3; step < 6; ++step) {
      train(*other.optimizer, other.net, own_batch, step, 1);
      scheduler.step();
      train(*both.serial, both.serial_net, Batch::joined, step, 1);
      serial.step();
    }
    EXPECT_DOUBLE_EQ(lr_of(*other.optimizer), 0.03 / 4);
    both.net = other.net;
    both.expect_equal();
  }
}

TEST(AsOptimizer, ItsStateIsBroadcast) {
  Both both(adam());
  both.optimizer.reset();
  train(*both.inner, both.net, own_batch, 20, 2);  // each rank by itself
  set_lr(*both.inner, 0.01 * (rank() + 1));
  train(*both.serial, both.serial_net, [](int step) { return Batch::of_rank(0, step); }, 20, 2);
  both.optimizer = std::make_unique<DistributedOptimizer>(*both.inner, both.net);
  broadcast_parameters(both.net);
  broadcast_optimizer_state(*both.optimizer);
  EXPECT_DOUBLE_EQ(lr_of(*both.optimizer), 0.01);
  both.train_both(0, 4);
  both.expect_equal();
}

TEST(AsOptimizer, GroupsAddedThroughTheBaseAreRefused) {
  Net net = same_net();
  SGD inner(net->fc1->parameters(), SGDOptions(0.1));
  DistributedOptimizer optimizer(inner, net);
  Optimizer& base = optimizer;
  const auto refused = [&](const std::string& expected) {
    loss_of(net, own_batch(0)).backward();
    const std::string error = message_of<UsageError>([&] { base.step(); });
    EXPECT_TRUE(contains(error, expected)) << error;
    EXPECT_TRUE(contains(error, "DistributedOptimizer::add_param_group()")) << error;
    optimizer.zero_grad();
  };
  base.add_param_group(OptimizerParamGroup(net->fc2->parameters()));
  refused("parameter group 1 was added");
  base.param_groups().pop_back();
  base.add_parameters(net->norm->parameters());
  refused("parameters were added or removed");
  base.param_groups()[0].params().resize(1);
  refused("parameters were added or removed");
  base.param_groups()[0].params() = net->fc1->parameters();
  train(base, net, own_batch, 0, 3);
  optimizer.add_param_group(OptimizerParamGroup(net->fc2->parameters()));
  EXPECT_EQ(base.param_groups().size(), 2U);
  set_lr(base, 0.2, 1);
  train(base, net, own_batch, 3, 3);
  EXPECT_EQ(lr_of(inner, 1), 0.2);
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(AsOptimizer, StateOfItsOwnIsRefused) {
  Both both(sgd());
  both.train_both(0, 1);
  EXPECT_EQ(both.optimizer->state().size(), 6U);
  Optimizer& base = *both.optimizer;
  base.state()[both.net->fc1->weight.unsafeGetTensorImpl()] =
      std::make_unique<torch::optim::SGDParamState>();
  EXPECT_TRUE(contains(message_of<UsageError>([&] { base.step(); }), "inner().state()"));
  base.state().clear();
  both.train_both(1, 1);
  both.expect_equal();
}

TEST(AsOptimizer, ItIsNotWrappedAgain) {
  Both both(sgd());
  Optimizer& base = *both.optimizer;
  EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedOptimizer(base, both.net); }),
                       "got a DistributedOptimizer"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { DistributedOptimizer(*both.inner, both.net); }),
                       "is wrapped by another"));
}

// Options and optimizers that a program defines.

struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr) : rate(lr) {}
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("rate", c10::IValue(rate));
  }
  double get_lr() const override { return rate; }
  void set_lr(const double lr) override { rate = lr; }
  double rate;
};
struct SecretOptions : torch::optim::OptimizerCloneableOptions<SecretOptions> {
  double get_lr() const override { return 0.01; }
};

struct SignDescent : Optimizer {
  template <class Options>
  SignDescent(std::vector<torch::Tensor> parameters, const Options& options)
      : Optimizer(std::move(parameters), std::make_unique<Options>(options)) {}
  torch::Tensor step(LossClosure /*closure*/) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (auto& parameter : group.params())
        parameter.sub_(parameter.grad().sign() * group.options().get_lr());
    }
    return {};
  }
};

TEST(AsOptimizer, OptionsOfTheProgramsOwnType) {
  Both both(
      [](Net& net) { return std::make_unique<SignDescent>(net->parameters(), SignOptions(0.01)); });
  torch::optim::StepLR scheduler(*both.optimizer, 1, 0.5);
  for (int step = 0; step < 4; ++step) {
    train(*both.optimizer, both.net, own_batch, step, 1);
    scheduler.step();
  }
  EXPECT_EQ(lr_of(both.optimizer->inner()), 0.01 / 8);
  set_lr(*both.inner, 0.5);
  EXPECT_EQ(both.optimizer->param_groups()[0].options().get_lr(), 0.5);
  EXPECT_TRUE(same_on_all_ranks(both.net->parameters()));
  set_lr(*both.optimizer, 1);
  set_lr(*both.inner, 2);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { both.optimizer->step(); }),
                       "the options of parameter group 0 was written on both sides"));
}

TEST(AsOptimizer, OptionsThatCannotBeComparedAreNotThere) {
  Both both(
      [](Net& net) { return std::make_unique<SignDescent>(net->parameters(), SecretOptions()); });
  train(*both.optimizer, both.net, own_batch, 0, 3);
  EXPECT_TRUE(same_on_all_ranks(both.net->parameters()));
  EXPECT_EQ(lr_of(*both.inner), 0.01);
  EXPECT_THROW(lr_of(*both.optimizer), c10::Error);
  Optimizer& base = *both.optimizer;
  base.param_groups()[0].set_options(std::make_unique<SecretOptions>());
  EXPECT_TRUE(contains(message_of<UsageError>([&] { base.step(); }), "cannot be serialized"));
}

}  // namespace
}  // namespace hvd::testing
