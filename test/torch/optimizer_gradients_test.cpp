#include <chrono>
#include <functional>
#include <thread>

#include "torch/support/torch_test.h"

// Gradients that are not simply averaged in place: gradients that the program has assigned, changes
// instead of gradients (Adasum), and sparse gradients beside dense ones.

namespace hvd::testing {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Runs a test with buckets, which exist from the second step on, and without buckets.
void with_and_without_buckets(const std::function<void(const DistributedOptimizerOptions&)>& test) {
  for (const bool views : {true, false}) {
    SCOPED_TRACE(views);
    test({.gradient_as_bucket_view = views});
  }
}

/// Ways to overwrite or replace a gradient with `value`.
using Put = std::function<void(torch::Tensor& gradient, double value)>;
const std::vector<Put>& ways_to_put() {
  static const std::vector<Put> ways{
      [](torch::Tensor& gradient, double value) { gradient = torch::full_like(gradient, value); },
      [](torch::Tensor& gradient, double value) {
        gradient.copy_(torch::full_like(gradient, value));
      },
      [](torch::Tensor& gradient, double value) { gradient.mul_(0).add_(value); },
      [](torch::Tensor& gradient, double value) {
        gradient = torch::full_like(gradient, value, torch::kFloat64);
      }};
  return ways;
}

void put(Net& net, const Put& way, double value) {
  for (torch::Tensor parameter : net->parameters()) way(parameter.mutable_grad(), value);
}

void expect_gradients(Net& net, double value) {
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(near(item.value().grad().to(item.value().scalar_type()),
                     torch::full_like(item.value(), value), 1e-5))
        << item.key();
  }
}

TEST(PutGradients, BeforeSubmissionAreSent) {
  with_and_without_buckets([](const DistributedOptimizerOptions& options) {
    for (std::size_t way = 0; way < ways_to_put().size(); ++way) {
      SCOPED_TRACE("way " + std::to_string(way));
      Net net = same_net();
      SGD inner(net->parameters(), SGDOptions(0.01));
      DistributedOptimizer optimizer(inner, net, options);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad(step % 2 == 0);
        {
          const auto guard = optimizer.no_sync();
          backward(net, step);
        }
        put(net, ways_to_put()[way], step + rank());
        const torch::Tensor before = net->fc1->bias.detach().clone();
        const double average = step + (size() - 1) / 2.0;
        optimizer.synchronize();
        expect_gradients(net, average);
        optimizer.step();
        EXPECT_TRUE(near(net->fc1->bias.detach(), before - 0.01 * average, 1e-5));
      }
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  });
}

TEST(PutGradients, WithoutAnyBackwardOnOneRankAreSentToo) {
  with_and_without_buckets([](const DistributedOptimizerOptions& options) {
    Net net = same_net();
    SGD inner(net->parameters(), SGDOptions(0.01));
    DistributedOptimizer optimizer(inner, net, options);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      for (torch::Tensor parameter : net->parameters())
        parameter.mutable_grad() = torch::full_like(parameter, rank() + 1.0);
      optimizer.step();
      expect_gradients(net, (size() + 1) / 2.0);
    }
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  });
}

// The error is the same in the first step, before gradients are sent, and in later ones.
TEST(PutGradients, WhileTheyTravelAreAnErrorThatLeavesTheParameters) {
  with_and_without_buckets([](const DistributedOptimizerOptions& options) {
    for (std::size_t way = 0; way < 2; ++way) {
      SCOPED_TRACE("way " + std::to_string(way));
      Net net = same_net();
      SGD inner(net->parameters(), SGDOptions(0.01));
      DistributedOptimizer optimizer(inner, net, options);
      for (int step = 0; step < 4; ++step) {
        const torch::Tensor before = net->norm->bias.detach().clone();
        optimizer.zero_grad();
        backward(net, step);
        {
          const torch::NoGradGuard no_grad;
          ways_to_put()[way](net->norm->bias.mutable_grad(), 1000);
        }
        const std::string error = message_of<UsageError>([&] { optimizer.step(); });
        EXPECT_TRUE(contains(error, "'norm.bias' was written to or replaced")) << error;
        EXPECT_TRUE(contains(error, "no_sync()")) << error;
        EXPECT_TRUE(torch::equal(before, net->norm->bias.detach()));
        train_step(net, optimizer, step);
      }
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  });
}

TEST(PutGradients, OnOneRankWhileTheyTravelAreNotForgotten) {
  if (size() == 1) return;
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, net, {.check_every = 1});
  for (int step = 0; step < 2; ++step) train_step(net, optimizer, step);
  optimizer.zero_grad();
  backward(net, 2);
  if (rank() == 0) {
    net->fc2->bias.mutable_grad() = torch::ones({2});
    EXPECT_THROW(optimizer.step(), UsageError);
  } else {
    optimizer.step();
  }
  optimizer.zero_grad();
  backward(net, 3);
  EXPECT_THROW(optimizer.step(), DivergedError);
}

TEST(PutGradients, ASparseOneThatIsReplacedWhileItTravelsIsAnError) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  broadcast_parameters(net);
  SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  for (int step = 0; step < 3; ++step) {
    for (const bool replace : {true, false}) {
      optimizer.zero_grad();
      net->forward(torch::tensor({(rank() + step) % 10, 9})).sum().backward();
      if (replace) {
        net->weight.mutable_grad() = net->weight.grad() * 2;
        EXPECT_THROW(optimizer.step(), UsageError);
      } else {
        optimizer.step();
      }
    }
  }
  EXPECT_TRUE(same_on_all_ranks(net->weight));
}

TEST(PutGradients, AfterSynchronizeAreStepped) {
  with_and_without_buckets([](const DistributedOptimizerOptions& options) {
    for (const Put& way : ways_to_put()) {
      Net net = same_net();
      SGD inner(net->parameters(), SGDOptions(0.01));
      DistributedOptimizer optimizer(inner, net, options);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        backward(net, step);
        optimizer.synchronize();
        const torch::NoGradGuard no_grad;
        const torch::Tensor before = net->fc2->weight.detach().clone();
        put(net, &way == &ways_to_put().back() ? ways_to_put().front() : way, 3 + step);
        optimizer.step();
        EXPECT_TRUE(near(net->fc2->weight.detach(), before - 0.01 * (3 + step), 1e-5));
      }
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  });
}

// Adasum of changes.

torch::Tensor adasum_of_two(const torch::Tensor& a, const torch::Tensor& b) {
  const double product = (a * b).sum().item<double>();
  const double aa = (a * a).sum().item<double>(), bb = (b * b).sum().item<double>();
  return (aa > 0 ? 1 - product / (2 * aa) : 1) * a + (bb > 0 ? 1 - product / (2 * bb) : 1) * b;
}

/// The Adasum of one tensor of each rank, computed in pairs.
torch::Tensor adasum_of_all(std::vector<torch::Tensor> tensors) {
  for (auto& tensor : tensors) tensor = tensor.to(torch::kFloat64);
  while (tensors.size() > 1) {
    std::vector<torch::Tensor> sums;
    for (std::size_t i = 0; i + 1 < tensors.size(); i += 2)
      sums.push_back(adasum_of_two(tensors[i], tensors[i + 1]));
    if (tensors.size() % 2 == 1) sums.push_back(tensors.back());
    tensors = std::move(sums);
  }
  return tensors.front();
}

using MakeInner = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

/// Computes the steps of all ranks of a set on one rank.
struct EveryRankHere {
  Net common;
  std::vector<Net> nets;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;

  EveryRankHere(const ProcessSet& set, const MakeInner& make) {
    for (int i = 0; i < set.size(); ++i) {
      nets.emplace_back();
      optimizers.push_back(make(nets.back()));
    }
  }
  void step(const ProcessSet& set, int step) {
    for (std::size_t i = 0; i < nets.size(); ++i) {
      copy_values(*common, *nets[i]);
      optimizers[i]->zero_grad();
      loss_of(nets[i], Batch::of_rank(set.ranks()[i], step)).backward();
      optimizers[i]->step();
    }
    const torch::NoGradGuard no_grad;
    const auto parameters = common->parameters();
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      std::vector<torch::Tensor> changes;
      for (Net& net : nets) changes.push_back(net->parameters()[p] - parameters[p]);
      parameters[p].detach().add_(adasum_of_all(changes).to(torch::kFloat32));
    }
  }
};

std::unique_ptr<torch::optim::Optimizer> sgd_with_momentum(Net& net) {
  return std::make_unique<SGD>(net->parameters(), SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<torch::optim::Optimizer> adam(Net& net) {
  return std::make_unique<torch::optim::Adam>(net->parameters(), 0.01);
}

TEST(AdasumOfChanges, EqualsAPlainComputation) {
  for (const MakeInner& make : {MakeInner(sgd_with_momentum), MakeInner(adam)}) {
    for_each_set([&](const ProcessSet& set) {
      torch::manual_seed(12);
      EveryRankHere expected(set, make);
      Net net;
      copy_values(*expected.common, *net);
      const auto inner = make(net);
      DistributedOptimizer optimizer(
          *inner, net,
          {.op = ReduceOp::kAdasum, .process_set = set, .adasum_delta = true, .check_every = 2});
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        if (step % 3 == 2) {
          optimizer.step([&] {
            optimizer.zero_grad();
            torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
            loss.backward();
            return loss;
          });
        } else {
          loss_of(net, Batch::of_rank(rank(), step)).backward();
          torch::nn::utils::clip_grad_norm_(net->parameters(), 1e6);  // gradients stay local
          optimizer.step();
        }
        expected.step(set, step);
      }
      const auto values = expected.common->named_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(near(item.value(), values[item.key()], 1e-4)) << item.key();
    });
  }
}

TEST(AdasumOfChanges, MomentumAndGradientsAreEachRanksOwn) {
  Net net = same_net(), alone;
  copy_values(*net, *alone);
  const auto inner = sgd_with_momentum(net), own = sgd_with_momentum(alone);
  DistributedOptimizer optimizer(*inner, net, {.op = ReduceOp::kAdasum, .adasum_delta = true});
  backward(net);
  optimizer.step();
  backward(alone);
  own->step();
  EXPECT_TRUE(torch::equal(net->fc1->weight.grad(), alone->fc1->weight.grad()));
  EXPECT_EQ(torch::equal(net->fc1->weight, alone->fc1->weight), size() == 1);
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(AdasumOfChanges, OptionsThatDifferOrMeanNothing) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { DistributedOptimizer(inner, net, {.adasum_delta = true}); }),
      "adasum_delta: expected op to be adasum"));
  if (size() == 1) return;
  {
    DistributedOptimizer optimizer(inner, net,
                                   {.op = ReduceOp::kAdasum, .adasum_delta = rank() == 0});
    backward(net);
    const torch::Tensor before = net->fc1->weight.detach().clone();
    EXPECT_TRUE(
        contains(message_of<MismatchError>([&] { optimizer.step(); }), "option adasum_delta"));
    EXPECT_TRUE(torch::equal(before, net->fc1->weight));
    EXPECT_TRUE(net->fc1->weight.grad().defined());
  }
  {
    const torch::NoGradGuard no_grad;
    net->fc2->weight.add_(rank());
  }
  net->zero_grad();
  DistributedOptimizer optimizer(inner, net, {.op = ReduceOp::kAdasum, .adasum_delta = true});
  backward(net);
  const torch::Tensor before = net->fc1->weight.detach().clone();
  EXPECT_TRUE(contains(message_of<DivergedError>([&] { optimizer.step(); }), "'fc2.weight'"));
  EXPECT_TRUE(torch::equal(before, net->fc1->weight));
}

// Sparse and dense.

/// The number of operations of a repeated step, and how many of them had completed before step()
/// was called.
struct Operations {
  std::uint64_t all = 0, during_backward = 0;
};

Operations operations_of_a_step(bool with_tables, std::uint64_t wait_for) {
  torch::manual_seed(7);
  torch::nn::Sequential layers;
  for (int i = 0; i < 32; ++i) layers->push_back(torch::nn::Linear(8, 8));
  const auto sparse = torch::nn::EmbeddingOptions(20, 8).sparse(true);
  torch::nn::Embedding first(sparse), last(sparse);  // backward reaches `last` before the layers
  NamedParameters named = layers->named_parameters();
  if (with_tables) named.insert("first", first->weight);
  if (with_tables) named.insert("last", last->weight);
  broadcast_parameters(named);
  SGD inner(named.values(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, named);
  Operations operations;
  for (int step = 0; step < 4; ++step) {
    const std::uint64_t before = metrics().completed_operations;
    const auto so_far = [&] { return metrics().completed_operations - before; };
    optimizer.zero_grad();
    const torch::Tensor rows = torch::tensor({(3 * rank() + step) % 20, 19});
    torch::Tensor x = torch::ones({2, 8});
    if (with_tables) x = first->forward(rows);
    x = layers->forward(x);
    if (with_tables) x = x + last->forward(rows);
    x.square().sum().backward();
    if (step == 3) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (so_far() < wait_for && std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      operations.during_backward = so_far();
    }
    optimizer.step();
    operations.all = so_far();
    EXPECT_EQ(first->weight.grad().defined() && first->weight.grad().is_sparse(), with_tables);
  }
  EXPECT_TRUE(same_on_all_ranks(named.values()));
  return operations;
}

TEST(SparseBesideDense, NeitherHoldsTheOtherBack) {
  if (size() == 1) return;  // one rank has no buckets
  const Operations dense = operations_of_a_step(false, 8);
  EXPECT_GE(dense.all, 8U);
  EXPECT_LE(dense.all, 12U) << "of 64 parameters";
  const Operations both = operations_of_a_step(true, dense.all + 6);
  EXPECT_EQ(both.all, dense.all + 6) << "three for each sparse parameter";
  EXPECT_EQ(both.during_backward, both.all) << "nothing waits for step()";
}

}  // namespace
}  // namespace hvd::testing
