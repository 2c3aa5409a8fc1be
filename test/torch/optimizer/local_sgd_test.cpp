// LocalSgd against its definition: one process that trains the models of all ranks, averages their
// pseudo-gradients, and makes the outer step by formulas.
#include <algorithm>
#include <memory>
#include <sstream>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

constexpr double kOuterRate = 0.7;
constexpr double kOuterMomentum = 0.9;

std::unique_ptr<torch::optim::Optimizer> inner_of(Net& net) {
  return std::make_unique<torch::optim::AdamW>(net->parameters(),
                                               torch::optim::AdamWOptions(0.02).weight_decay(0.1));
}

torch::optim::SGD outer_of(Net& net) {
  const auto options = torch::optim::SGDOptions(kOuterRate).momentum(kOuterMomentum).nesterov(true);
  return torch::optim::SGD(net->parameters(), options);
}

std::vector<torch::Tensor> values_of(Net& net) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : net->parameters())
    values.push_back(parameter.detach().clone());
  return values;
}

/// The models of the members of a set, in one process.
class Replicas {
 public:
  Replicas(Net& first, std::vector<int> ranks)
      : ranks_(std::move(ranks)), start_(values_of(first)) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      nets_.emplace_back();
      copy_values(*first, *nets_.back());
      optimizers_.push_back(inner_of(nets_.back()));
    }
    momentum_.resize(start_.size());
  }
  void local_step(int step) {
    for (std::size_t r = 0; r < nets_.size(); ++r) {
      optimizers_[r]->zero_grad();
      loss_of(nets_[r], Batch::of_rank(ranks_[r], step)).backward();
      optimizers_[r]->step();
    }
  }
  /// Nesterov's momentum as torch.optim.SGD defines it: b = m b + g, p = p - rate (g + m b).
  void synchronize() {
    const torch::NoGradGuard no_grad;
    for (std::size_t p = 0; p < start_.size(); ++p) {
      torch::Tensor gradient = torch::zeros_like(start_[p]);
      for (Net& net : nets_) gradient += start_[p] - net->parameters()[p];
      gradient /= static_cast<double>(nets_.size());
      torch::Tensor& momentum = momentum_[p];
      momentum = momentum.defined() ? kOuterMomentum * momentum + gradient : gradient.clone();
      start_[p] = start_[p] - kOuterRate * (gradient + kOuterMomentum * momentum);
      for (Net& net : nets_) net->parameters()[p].copy_(start_[p]);
    }
  }
  const std::vector<torch::Tensor>& values() const { return start_; }
  std::vector<torch::Tensor> local_values(int position) {
    return values_of(nets_[static_cast<std::size_t>(position)]);
  }

 private:
  const std::vector<int> ranks_;
  std::vector<Net> nets_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::vector<torch::Tensor> start_, momentum_;
};

void expect_near(const std::vector<torch::Tensor>& actual,
                 const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(near(actual[i], expected[i], 1e-4)) << "parameter " << i;
}

void local_step(Net& net, torch::optim::Optimizer& inner, LocalSgd& local_sgd, int step) {
  inner.zero_grad();
  loss_of(net, Batch::of_rank(rank(), step)).backward();
  local_sgd.step();
}

TEST(LocalSgd, IsEqualToItsDefinition) {
  for_each_set([](const ProcessSet& set) {
    torch::manual_seed(3);
    Net net;  // the same on all ranks
    const auto inner = inner_of(net);
    torch::optim::SGD outer = outer_of(net);
    LocalSgd local_sgd(*inner, outer, {.sync_every = 3, .process_set = set});
    Replicas replicas(net, set.ranks());
    for (int step = 0; step < 12; ++step) {
      local_step(net, *inner, local_sgd, step);
      replicas.local_step(step);
      if (step % 3 == 2) {
        EXPECT_EQ(local_sgd.local_steps(), 0);
        replicas.synchronize();
        expect_near(values_of(net), replicas.values());
      } else {
        EXPECT_EQ(local_sgd.local_steps(), step % 3 + 1);
        expect_near(values_of(net), replicas.local_values(set.rank()));
      }
    }
    const std::vector<torch::Tensor> all = values_of(net);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const torch::Tensor first =
          broadcast(all[i], set.ranks().front(), {.name = "first", .process_set = set});
      EXPECT_TRUE(torch::equal(all[i], first)) << i;
    }
  });
}

TEST(LocalSgd, AnOuterRateOfOneAveragesTheParameters) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), 0.1), outer(net->parameters(), 1.0);
  LocalSgd local_sgd(inner, outer, {.sync_every = 100});
  for (int step = 0; step < 2; ++step) local_step(net, inner, local_sgd, step);
  std::vector<torch::Tensor> expected;
  for (const torch::Tensor& value : values_of(net)) expected.push_back(allreduce(value));
  local_sgd.synchronize();
  expect_near(values_of(net), expected);
  EXPECT_TRUE(same_on_all_ranks(values_of(net)));
}

TEST(LocalSgd, ASynchronizationWithoutLocalStepsChangesNothing) {
  Net net = same_net();
  const auto inner = inner_of(net);
  torch::optim::SGD outer = outer_of(net);
  LocalSgd local_sgd(*inner, outer, {.sync_every = 2});
  for (int step = 0; step < 2; ++step) local_step(net, *inner, local_sgd, step);
  const std::vector<torch::Tensor> before = values_of(net);
  local_sgd.synchronize();
  const std::vector<torch::Tensor> after = values_of(net);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], after[i]));
}

TEST(LocalSgd, KeepsGradientsAndFrozenParameters) {
  Net net = same_net();
  net->fc1->weight.requires_grad_(false);
  const torch::Tensor frozen = net->fc1->weight.detach().clone();
  torch::optim::SGD inner(net->parameters(), 0.1);
  torch::optim::SGD outer(net->parameters(), torch::optim::SGDOptions(0.7).weight_decay(0.5));
  LocalSgd local_sgd(inner, outer, {.sync_every = 1});
  loss_of(net, Batch::of_rank(rank(), 0)).backward();
  const torch::Tensor gradient = net->fc2->weight.grad().clone();
  const torch::Tensor loss = local_sgd.step([&] { return torch::full({1}, 3.0); });
  EXPECT_EQ(loss.item<double>(), 3.0);
  EXPECT_TRUE(torch::equal(net->fc2->weight.grad(), gradient));
  EXPECT_TRUE(torch::equal(net->fc1->weight, frozen));
}

TEST(LocalSgd, IsSavedBetweenSynchronizations) {
  Net net = same_net(), other = same_net();
  const auto inner = inner_of(net), other_inner = inner_of(other);
  torch::optim::SGD outer = outer_of(net), other_outer = outer_of(other);
  LocalSgd local_sgd(*inner, outer, {.sync_every = 4});
  for (int step = 0; step < 6; ++step) local_step(net, *inner, local_sgd, step);
  LocalSgd loaded(*other_inner, other_outer, {.sync_every = 4});
  std::stringstream model, optimizer, outer_bytes, own;
  torch::save(net, model);
  torch::save(*inner, optimizer);
  torch::save(outer, outer_bytes);
  torch::serialize::OutputArchive out;
  local_sgd.save(out);
  out.save_to(own);
  torch::load(other, model);
  torch::load(*other_inner, optimizer);
  torch::load(other_outer, outer_bytes);
  torch::serialize::InputArchive in;
  in.load_from(own);
  loaded.load(in);
  EXPECT_EQ(loaded.local_steps(), 2);
  for (int step = 6; step < 8; ++step) {
    local_step(net, *inner, local_sgd, step);
    local_step(other, *other_inner, loaded, step);
  }
  const std::vector<torch::Tensor> a = values_of(net), b = values_of(other);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  torch::serialize::InputArchive empty;
  std::stringstream nothing;
  torch::serialize::OutputArchive().save_to(nothing);
  empty.load_from(nothing);
  EXPECT_THROW(loaded.load(empty), Error);
}

TEST(LocalSgd, WrongArgumentsAreUsageErrors) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), 0.1), outer(net->parameters(), 0.7);
  for (const std::int64_t steps : {0, -1}) {
    EXPECT_TRUE(
        contains(message_of<UsageError>([&] { LocalSgd(inner, outer, {.sync_every = steps}); }),
                 "sync_every: expected at least 1 local step"));
  }
  torch::optim::SGD part({net->fc1->weight}, 0.7);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { LocalSgd(inner, part); }),
                       "is in the inner optimizer and not in the outer one"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { LocalSgd(part, outer); }),
                       "is in the outer optimizer and not in the inner one"));
  torch::optim::SGD twice({net->fc1->weight, net->fc1->weight}, 0.7);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { LocalSgd(part, twice); }),
                       "occurs 2 times in the outer optimizer"));
  torch::optim::SGD none(std::vector<torch::Tensor>(), torch::optim::SGDOptions(0.1));
  torch::optim::SGD none_either(std::vector<torch::Tensor>(), torch::optim::SGDOptions(0.1));
  EXPECT_THROW(LocalSgd(none, none_either), UsageError);
  EXPECT_THROW(LocalSgd(inner, inner), UsageError);
  torch::optim::SGD wrapped(net->parameters(), 0.7);
  DistributedOptimizer wrapper(wrapped, net);
  EXPECT_THROW(LocalSgd(inner, wrapper), UsageError);
  LocalSgd(wrapper, outer);  // averages gradients in each local step, for example within a host
}

TEST(LocalSgd, IsTrackedWithCopiesAndCommittedAtSynchronizations) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD outer = outer_of(net);
  LocalSgd local_sgd(inner, outer, {.sync_every = 2});
  elastic::TorchState without_copies;
  EXPECT_THROW(without_copies.track("local_sgd", local_sgd), UsageError);
  elastic::TorchState state({.copy = elastic::Copy::kAtCommit});
  state.track("model", net).track("local_sgd", local_sgd);
  elastic::run(state, [&] {
    local_step(net, inner, local_sgd, 0);
    EXPECT_TRUE(contains(message_of<UsageError>([&] { state.commit(); }),
                         "1 local steps since the last synchronization"));
    local_step(net, inner, local_sgd, 1);
    state.commit();
    EXPECT_TRUE(same_on_all_ranks(values_of(net)));
  });
  if (size() == 1) return;  // no state is sent
  local_step(net, inner, local_sgd, 2);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { elastic::run(state, [] {}); }),
                       "expected a commit when local_steps() is 0"));
}

/// run() sends rank 0's state, after which the pseudo-gradients start from its parameters.
TEST(LocalSgd, StartsFromTheStateThatItReceives) {
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  Net net;  // differs between ranks
  torch::optim::SGD inner(net->parameters(), 0.1), outer = outer_of(net);
  LocalSgd local_sgd(inner, outer, {.sync_every = 1});
  elastic::TorchState state({.copy = elastic::Copy::kAtCommit});
  state.track("model", net).track("local_sgd", local_sgd);
  elastic::run(state, [&] {
    Net same;
    copy_values(*net, *same);
    EXPECT_TRUE(same_on_all_ranks(values_of(net)));
    local_step(net, inner, local_sgd, 0);
    EXPECT_TRUE(same_on_all_ranks(values_of(net)));
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_FALSE(torch::equal(net->parameters()[i], same->parameters()[i]));
  });
}

}  // namespace
}  // namespace hvd::testing
