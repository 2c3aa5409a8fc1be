#include <functional>

#include "torch/support/torch_test.h"

// Training on N ranks against one process on the joined batch.

namespace hvd::testing {
namespace {

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;
using Loss = std::function<torch::Tensor(Net&, const Batch&)>;

constexpr int kSteps = 20;

std::unique_ptr<torch::optim::Optimizer> sgd(Net& net) {
  return std::make_unique<torch::optim::SGD>(
      net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-2));
}

std::unique_ptr<torch::optim::Optimizer> adam(Net& net) {
  return std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.01));
}

/// The same model on every rank, and a copy for the serial run.
struct Pair {
  Net distributed;
  Net serial;
  Pair() {
    torch::manual_seed(10 + rank());
    distributed = Net();
    serial = Net();
    broadcast_parameters(distributed);
    copy_values(*distributed, *serial);
  }
};

void expect_equal_models(Net& actual, Net& expected, double tolerance = 1e-5) {
  const auto a = actual->named_parameters();
  const auto b = expected->named_parameters();
  for (const auto& item : a) {
    EXPECT_TRUE(near(item.value(), b[item.key()], tolerance)) << item.key();
  }
  EXPECT_TRUE(same_on_all_ranks(actual->parameters()));
}

/// Trains both models for kSteps steps and expects equal models at the end.
void check_training(const MakeOptimizer& make, DistributedOptimizerOptions options = {},
                    double tolerance = 1e-5) {
  Pair nets;
  auto inner = make(nets.distributed);
  auto reference = make(nets.serial);
  const bool sum = options.op == ReduceOp::kSum;
  DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters(), std::move(options));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = loss_of(nets.distributed, Batch::of_rank(rank(), step));
    if (sum) loss = scale_loss(loss);
    loss.backward();
    optimizer.step();
    reference->zero_grad();
    loss_of(nets.serial, Batch::joined(step)).backward();
    reference->step();
  }
  expect_equal_models(nets.distributed, nets.serial, tolerance);
}

TEST(Training, SgdWithMomentumEqualsOneProcess) { check_training(sgd); }
TEST(Training, AdamEqualsOneProcess) { check_training(adam, {}, 1e-4); }
TEST(Training, SumWithScaledLoss) { check_training(sgd, {.op = ReduceOp::kSum}); }
TEST(Training, Predivided) { check_training(sgd, {.gradient_predivide_factor = 3}); }
TEST(Training, Groups) {
  check_training(sgd, {.groups = {{"fc1.weight", "fc2.bias"}, {"norm.weight"}}});
}
TEST(Training, Compressed) {
  check_training(sgd, {.compression = Compression::kFloat16}, 2e-2);
  check_training(sgd, {.compression = Compression::kBFloat16}, 5e-2);
}

TEST(Training, BucketViewsChangeNothing) {
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool view : {true, false}) {
    Pair nets;
    const torch::NoGradGuard no_grad;
    for (auto& parameter : nets.distributed->parameters()) parameter.detach().fill_(0.1);
    const torch::AutoGradMode grad(true);
    auto inner = adam(nets.distributed);
    DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters(),
                                   {.gradient_as_bucket_view = view});
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      loss_of(nets.distributed, Batch::of_rank(rank(), step)).backward();
      optimizer.step();
    }
    results.push_back(nets.distributed->parameters());
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(torch::equal(results[0][i], results[1][i]));
  }
}

TEST(Training, ScaleLossAndAllReduceEqualDistributedOptimizer) {
  Pair nets;
  auto wrapped = sgd(nets.distributed);
  auto plain = sgd(nets.serial);
  DistributedOptimizer optimizer(*wrapped, nets.distributed->named_parameters(),
                                 {.op = ReduceOp::kSum});
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = Batch::of_rank(rank(), step);
    optimizer.zero_grad();
    scale_loss(loss_of(nets.distributed, batch)).backward();
    optimizer.step();
    plain->zero_grad();
    scale_loss(loss_of(nets.serial, batch)).backward();
    all_reduce(nets.serial->parameters());
    plain->step();
  }
  expect_equal_models(nets.distributed, nets.serial, 1e-7);
}

TEST(Training, BackwardPassesAddUp) {
  Pair nets;
  auto inner = sgd(nets.distributed);
  auto reference = sgd(nets.serial);
  DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters(),
                                 {.backward_passes_per_step = 3});
  for (int step = 0; step < kSteps; ++step) {
    // Four passes from the middle on; the last step has fewer than declared.
    const int declared = step < kSteps / 2 ? 3 : 4;
    const int passes = step == kSteps - 1 ? 2 : declared;
    optimizer.set_backward_passes_per_step(declared);
    optimizer.zero_grad();
    reference->zero_grad();
    for (int pass = 0; pass < passes; ++pass) {
      loss_of(nets.distributed, Batch::of_rank(rank(), 10 * step + pass)).backward();
      loss_of(nets.serial, Batch::joined(10 * step + pass)).backward();
    }
    optimizer.step();
    reference->step();
  }
  expect_equal_models(nets.distributed, nets.serial);
}

TEST(Training, NoSyncAccumulatesWithoutCommunication) {
  Pair nets;
  auto inner = sgd(nets.distributed);
  auto reference = sgd(nets.serial);
  DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    reference->zero_grad();
    {
      const auto guard = optimizer.no_sync();
      const auto before = metrics().completed_operations;
      for (int pass = 0; pass < 2; ++pass) {
        loss_of(nets.distributed, Batch::of_rank(rank(), 10 * step + pass)).backward();
      }
      EXPECT_EQ(metrics().completed_operations, before);
    }
    // Every second step has only passes under no_sync().
    const int passes = step % 2 == 0 ? 3 : 2;
    if (passes == 3) loss_of(nets.distributed, Batch::of_rank(rank(), 10 * step + 2)).backward();
    for (int pass = 0; pass < passes; ++pass) {
      loss_of(nets.serial, Batch::joined(10 * step + pass)).backward();
    }
    optimizer.step();
    reference->step();
  }
  expect_equal_models(nets.distributed, nets.serial);
}

TEST(Training, ClippingBetweenSynchronizeAndStep) {
  for (const bool skip : {true, false}) {
    Pair nets;
    auto inner = sgd(nets.distributed);
    auto reference = sgd(nets.serial);
    // A sum, since an average taken twice would not show.
    DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters(),
                                   {.op = ReduceOp::kSum});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      reference->zero_grad();
      scale_loss(loss_of(nets.distributed, Batch::of_rank(rank(), step))).backward();
      optimizer.synchronize();
      torch::nn::utils::clip_grad_norm_(nets.distributed->parameters(), 0.1);
      if (skip) {
        const auto guard = optimizer.skip_synchronize();
        optimizer.step();
      } else {
        optimizer.step();  // no gradient since synchronize(): no second reduction
      }
      loss_of(nets.serial, Batch::joined(step)).backward();
      torch::nn::utils::clip_grad_norm_(nets.serial->parameters(), 0.1);
      reference->step();
    }
    expect_equal_models(nets.distributed, nets.serial);
  }
}

TEST(Training, ClosuresAndLbfgs) {
  using torch::optim::LBFGS;
  using torch::optim::LBFGSOptions;
  for (const bool wolfe : {false, true}) {
    Pair nets;
    auto options = LBFGSOptions(wolfe ? 1.0 : 0.1).max_iter(6).history_size(4);
    if (wolfe) options.line_search_fn("strong_wolfe");
    LBFGS inner(nets.distributed->parameters(), options);
    LBFGS reference(nets.serial->parameters(), options);
    DistributedOptimizer optimizer(inner, nets.distributed->named_parameters());
    for (int step = 0; step < 4; ++step) {
      const torch::Tensor loss = optimizer.step([&] {
        // zero_grad() of the wrapper and of the wrapped optimizer both work.
        step % 2 == 0 ? optimizer.zero_grad() : inner.zero_grad();
        torch::Tensor local = loss_of(nets.distributed, Batch::of_rank(rank(), step));
        local.backward();
        return local;
      });
      const torch::Tensor expected = reference.step([&] {
        reference.zero_grad();
        torch::Tensor joined = loss_of(nets.serial, Batch::joined(step));
        joined.backward();
        return joined;
      });
      EXPECT_TRUE(near(loss.detach(), expected.detach(), 1e-3));
      EXPECT_TRUE(same_on_all_ranks(loss.reshape(-1)));
    }
    expect_equal_models(nets.distributed, nets.serial, 2e-3);
  }
}

/// Uses `always` on every rank, `branch` only if the caller passes odd, and `spare` on no rank.
struct BranchesImpl : torch::nn::Module {
  torch::nn::Linear always{nullptr}, branch{nullptr}, spare{nullptr};
  BranchesImpl()
      : always(register_module("always", torch::nn::Linear(4, 2))),
        branch(register_module("branch", torch::nn::Linear(4, 2))),
        spare(register_module("spare", torch::nn::Linear(4, 2))) {}
  torch::Tensor loss(const Batch& batch, bool odd) {
    torch::Tensor out = always->forward(batch.x);
    if (odd) out = out + branch->forward(batch.x);
    return torch::mse_loss(out, batch.y);
  }
};

TEST(Training, ParametersWithoutGradientOnSomeRanks) {
  for (const bool grouped : {false, true}) {
    torch::manual_seed(1);
    auto net = std::make_shared<BranchesImpl>();
    auto serial = std::make_shared<BranchesImpl>();
    broadcast_parameters(net);
    copy_values(*net, *serial);
    const torch::Tensor spare = net->spare->weight.detach().clone();
    // Momentum and decay move a parameter with a zero gradient, but not one without a gradient.
    const auto options = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1);
    torch::optim::SGD inner(net->parameters(), options);
    torch::optim::SGD reference(serial->parameters(), options);
    DistributedOptimizerOptions distributed;
    if (grouped) distributed.groups = {{"always.weight", "branch.weight", "spare.weight"}};
    DistributedOptimizer optimizer(inner, net->named_parameters(), distributed);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      reference.zero_grad();
      // Which ranks take the branch changes from step to step.
      const auto odd = [step](int r) { return (r + step) % 2 == 1; };
      net->loss(Batch::of_rank(rank(), step), odd(rank())).backward();
      torch::Tensor joined = torch::zeros({});
      for (int r = 0; r < size(); ++r) {
        joined = joined + serial->loss(Batch::of_rank(r, step), odd(r)) / size();
      }
      joined.backward();
      optimizer.step();
      reference.step();
      EXPECT_FALSE(net->spare->weight.grad().defined());
    }
    const auto expected = serial->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_TRUE(near(item.value(), expected[item.key()], 1e-5)) << item.key();
    }
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    EXPECT_TRUE(torch::equal(net->spare->weight, spare));
  }
}

TEST(Training, FrozenParameters) {
  Pair nets;
  nets.distributed->fc1->weight.requires_grad_(false);
  nets.serial->fc1->weight.requires_grad_(false);
  auto inner = sgd(nets.distributed);
  auto reference = sgd(nets.serial);
  DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters());
  for (int step = 0; step < kSteps; ++step) {
    for (Net* net : {&nets.distributed, &nets.serial}) {
      if (step == 5) (*net)->norm->weight.requires_grad_(false);  // frozen later
      if (step == 9) (*net)->fc1->weight.requires_grad_(true);    // frozen at first
    }
    optimizer.zero_grad();
    reference->zero_grad();
    loss_of(nets.distributed, Batch::of_rank(rank(), step)).backward();
    loss_of(nets.serial, Batch::joined(step)).backward();
    optimizer.step();
    reference->step();
  }
  expect_equal_models(nets.distributed, nets.serial);
}

TEST(Training, TiedParametersAreReducedOnce) {
  Pair nets;
  for (Net* net : {&nets.distributed, &nets.serial}) {
    (*net)->register_module("again", (*net)->fc1);
  }
  auto inner = std::make_unique<torch::optim::SGD>(nets.distributed->parameters(), 0.1);
  auto reference = std::make_unique<torch::optim::SGD>(nets.serial->parameters(), 0.1);
  DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters(),
                                 {.op = ReduceOp::kSum});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    reference->zero_grad();
    scale_loss(loss_of(nets.distributed, Batch::of_rank(rank(), step))).backward();
    loss_of(nets.serial, Batch::joined(step)).backward();
    optimizer.step();
    reference->step();
  }
  expect_equal_models(nets.distributed, nets.serial);
}

TEST(Training, AnotherDtypeAfterConstruction) {
  Pair nets;
  auto inner = std::make_unique<torch::optim::SGD>(nets.distributed->parameters(), 0.1);
  auto reference = std::make_unique<torch::optim::SGD>(nets.serial->parameters(), 0.1);
  DistributedOptimizer optimizer(*inner, nets.distributed->named_parameters());
  for (int step = 0; step < 4; ++step) {
    if (step == 1) {
      nets.distributed->to(torch::kFloat64);
      nets.serial->to(torch::kFloat64);
    }
    const auto type = nets.serial->fc1->weight.scalar_type();
    const auto cast = [type](Batch b) { return Batch{b.x.to(type), b.y.to(type)}; };
    optimizer.zero_grad();
    reference->zero_grad();
    loss_of(nets.distributed, cast(Batch::of_rank(rank(), step))).backward();
    loss_of(nets.serial, cast(Batch::joined(step))).backward();
    optimizer.step();
    reference->step();
  }
  expect_equal_models(nets.distributed, nets.serial);
}

TEST(Training, SparseGradientsMadeDense) {
  const auto options = torch::nn::EmbeddingOptions(10, 3).sparse(true);
  torch::manual_seed(0);
  torch::nn::Embedding net(options);
  torch::nn::Embedding serial(options);
  broadcast_parameters(net);
  copy_values(*net, *serial);
  const auto row = [](int r, int step) { return torch::tensor({(r + step) % 10, 9}); };
  torch::optim::SGD inner(net->parameters(), 0.1);
  torch::optim::SGD reference(serial->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.sparse_as_dense = true});
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    reference.zero_grad();
    net->forward(row(rank(), step)).sum().backward();
    for (int r = 0; r < size(); ++r) (serial->forward(row(r, step)).sum() / size()).backward();
    optimizer.step();
    reference.step();
  }
  EXPECT_TRUE(near(net->weight, serial->weight));
}

TEST(Training, TwoOptimizersAsInAGan) {
  // The generator's loss also gives the discriminator gradients. The program discards them with the
  // module's zero_grad(), which does not notify the wrapper.
  struct Gan {
    Net generator, discriminator;
    torch::optim::SGD g, d;
    Gan(Net a, Net b)
        : generator(std::move(a)),
          discriminator(std::move(b)),
          g(generator->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5)),
          d(discriminator->parameters(), torch::optim::SGDOptions(0.05).momentum(0.5)) {}
    torch::Tensor fake(const torch::Tensor& x) {
      return torch::cat({generator->forward(x), x.narrow(1, 0, 2)}, 1);
    }
    torch::Tensor score(const torch::Tensor& x) {
      return discriminator->forward(x).square().mean();
    }
  };
  Pair generators, discriminators;
  Gan mine(generators.distributed, discriminators.distributed);
  Gan serial(generators.serial, discriminators.serial);
  for (const int passes : {2, 1}) {
    DistributedOptimizer g(mine.g, mine.generator->named_parameters());
    DistributedOptimizer d(mine.d, mine.discriminator->named_parameters(),
                           {.backward_passes_per_step = passes});
    const auto train = [&](Gan& gan, const torch::Tensor& x, auto& step_g, auto& step_d) {
      gan.discriminator->zero_grad();
      if (passes == 2) {
        gan.score(x).backward();
        (1 - gan.score(gan.fake(x).detach())).backward();
      } else {
        (gan.score(x) + 1 - gan.score(gan.fake(x).detach())).backward();
      }
      step_d.step();
      gan.generator->zero_grad();
      gan.score(gan.fake(x)).backward();
      step_g.step();
    };
    for (int step = 0; step < 6; ++step) {
      train(mine, Batch::of_rank(rank(), step).x, g, d);
      train(serial, Batch::joined(step).x, serial.g, serial.d);
    }
  }
  expect_equal_models(mine.generator, serial.generator, 1e-4);
  expect_equal_models(mine.discriminator, serial.discriminator, 1e-4);
}

}  // namespace
}  // namespace hvd::testing
