#include <string>
#include <vector>

#include "hvd/error.h"
#include "hvd/torch/sync_batch_norm.h"
#include "torch/support/torch_test.h"

// convert_sync_batchnorm(): which layers it replaces, and what it refuses.

namespace hvd::testing {
namespace {

using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNorm3d;
using torch::nn::ModuleList;
using torch::nn::Sequential;

/// The paths of a module's BatchNorm layers, each with its kind.
std::vector<std::string> batch_norms(const torch::nn::Module& module) {
  std::vector<std::string> found;
  for (const auto& item : module.named_modules()) {
    const std::string name = item.value()->name();
    if (contains(name, "BatchNorm"))
      found.push_back(item.key() + (contains(name, "Sync") ? " synchronised" : " plain"));
  }
  return found;
}
using Paths = std::vector<std::string>;

TEST(ConvertSyncBatchNorm, ReplacesLayersOfEveryContainer) {
  Sequential net(torch::nn::Linear(4, 3), BatchNorm1d(3));
  const ModuleList list(BatchNorm2d(3), torch::nn::ReLU(), BatchNorm3d(2));
  torch::nn::ModuleDict dict;
  dict->update({{"norm", BatchNorm1d(6).ptr()}, {"other", torch::nn::ReLU().ptr()}});
  const ModuleList all(net, list, dict);
  EXPECT_EQ(convert_sync_batchnorm(all), 4U);
  EXPECT_EQ(batch_norms(*all), (Paths{"0.1 synchronised", "1.0 synchronised", "1.2 synchronised",
                                      "2.norm synchronised"}));
  // Checks the modules that the containers call, not only the registered ones.
  EXPECT_NE(net->ptr(1)->as<SyncBatchNorm1d>(), nullptr);
  EXPECT_NE(list->ptr(2)->as<SyncBatchNorm3d>(), nullptr);
  EXPECT_NE(dict["norm"]->as<SyncBatchNorm1d>(), nullptr);
  EXPECT_EQ(convert_sync_batchnorm(all), 0U);
}

/// Has a layer that is only registered and a layer in a container.
struct RegisteredImpl : torch::nn::Module {
  RegisteredImpl() {
    register_module("norm", BatchNorm1d(3));
    register_module("tail", tail);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto norm = named_children()["norm"];
    if (auto* const layer = norm->as<SyncBatchNorm1d>()) return tail->forward(layer->forward(x));
    return tail->forward(norm->as<BatchNorm1d>()->forward(x));
  }
  Sequential tail{torch::nn::Linear(3, 2), BatchNorm1d(2)};
};
TORCH_MODULE(Registered);

TEST(ConvertSyncBatchNorm, ComputesWithTheSameParametersAndStatistics) {
  torch::manual_seed(9);
  Registered net, serial;
  copy_values(*net, *serial);
  torch::optim::SGD inner(net->parameters(), 0.1), reference(serial->parameters(), 0.1);
  net->named_children()["norm"]->eval();  // frozen statistics remain frozen
  serial->named_children()["norm"]->eval();
  const auto before = net->named_parameters();
  EXPECT_EQ(convert_sync_batchnorm(net.ptr()), 2U);
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(item.value().is_same(before[item.key()])) << item.key();
  EXPECT_FALSE(net->named_children()["norm"]->is_training());
  EXPECT_TRUE(net->tail->ptr(1)->is_training());
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    std::vector<torch::Tensor> all;
    for (int r = 0; r < size(); ++r)
      all.push_back(rank_tensor(r, {6, 3}, torch::kFloat32, step) + r);
    optimizer.zero_grad();
    reference.zero_grad();
    net->forward(own_of(all, ProcessSet())).pow(3).mean().backward();
    serial->forward(torch::cat(all)).pow(3).mean().backward();
    optimizer.step();
    reference.step();
  }
  const auto expected = serial->named_parameters();
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(near(item.value(), expected[item.key()], 1e-4)) << item.key();
  const auto statistics = serial->named_buffers();
  for (const auto& item : net->named_buffers())
    EXPECT_TRUE(near(item.value(), statistics[item.key()], 1e-4)) << item.key();
}

TEST(ConvertSyncBatchNorm, KeepsOptionsDtypeAndFrozenWeights) {
  Sequential net(BatchNorm2d(
      torch::nn::BatchNormOptions(3).eps(0.25).momentum(std::nullopt).track_running_stats(false)));
  net->push_back(BatchNorm2d(torch::nn::BatchNormOptions(3).affine(false)));
  net->to(torch::kFloat64);
  net[0]->as<BatchNorm2d>()->weight.requires_grad_(false);
  net[1]->as<BatchNorm2d>()->running_var.fill_(7);
  ASSERT_EQ(convert_sync_batchnorm(net), 2U);
  const auto* const first = net[0]->as<SyncBatchNorm2d>();
  EXPECT_EQ(first->options.eps(), 0.25);
  EXPECT_FALSE(first->options.momentum().has_value());
  EXPECT_FALSE(first->running_mean.defined());
  EXPECT_FALSE(first->weight.requires_grad());
  EXPECT_TRUE(first->bias.requires_grad());
  const auto* const second = net[1]->as<SyncBatchNorm2d>();
  EXPECT_FALSE(second->weight.defined());
  EXPECT_EQ(second->running_var.scalar_type(), torch::kFloat64);
  EXPECT_EQ(net->named_buffers()["1.running_var"][0].item<double>(), 7);
}

TEST(ConvertSyncBatchNorm, ALayerThatIsSharedStaysOne) {
  ModuleList first, second, tree;
  {
    const BatchNorm1d shared(3);
    first->push_back(shared);
    second->push_back(shared);
    second->push_back(shared);
    const ModuleList subtree(BatchNorm1d(4));
    tree->push_back(subtree);
    tree->push_back(subtree);
  }
  const ModuleList net(first, second, tree);
  EXPECT_EQ(convert_sync_batchnorm(net), 2U);
  EXPECT_NE(first->ptr(0)->as<SyncBatchNorm1d>(), nullptr);
  EXPECT_EQ(first->ptr(0), second->ptr(0));
  EXPECT_EQ(first->ptr(0), second->ptr(1));
  EXPECT_EQ(tree->ptr(0), tree->ptr(1));
  EXPECT_NE(tree->ptr<torch::nn::ModuleListImpl>(1)->ptr(0)->as<SyncBatchNorm1d>(), nullptr);
}

/// Has its layer in a typed member, as most modules do.
struct TypedImpl : torch::nn::Module {
  TypedImpl() {
    register_module("bn", bn);
    register_module("tail", tail);
  }
  BatchNorm2d bn{3};
  Sequential tail{BatchNorm2d(3)};
};
TORCH_MODULE(Typed);

TEST(ConvertSyncBatchNormErrors, ALayerInATypedMemberIsNamedAndNothingReplaced) {
  const ModuleList net(torch::nn::Linear(2, 2), Typed());
  const std::string message = message_of<UsageError>([&] { convert_sync_batchnorm(net); });
  EXPECT_TRUE(contains(message, "cannot replace '1.bn':")) << message;
  EXPECT_TRUE(contains(message, "hvd::SyncBatchNorm1d, 2d or 3d")) << message;
  EXPECT_EQ(batch_norms(*net), (Paths{"1.bn plain", "1.tail.0 plain"}));
}

TEST(ConvertSyncBatchNormErrors, ALayerInAVariable) {
  const BatchNorm1d held(3), also(3);
  Sequential net(held, also, BatchNorm1d(3));
  const std::string message = message_of<UsageError>([&] { convert_sync_batchnorm(net); });
  EXPECT_TRUE(contains(message, "cannot replace '0', '1':")) << message;
  EXPECT_EQ(batch_norms(*net), (Paths{"0 plain", "1 plain", "2 plain"}));
}

// The member that holds a layer is found in a subtree with two parents.
TEST(ConvertSyncBatchNormErrors, ATypedMemberBelowASharedModule) {
  ModuleList net;
  {
    const Typed shared;
    net->push_back(shared);
    net->push_back(shared);
    net->push_back(shared);
  }
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { convert_sync_batchnorm(net); }), "replace '0.bn':"));
}

TEST(ConvertSyncBatchNormErrors, TheModuleItself) {
  BatchNorm2d layer(3);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { convert_sync_batchnorm(layer); }),
                       "hvd::SyncBatchNorm2d(*layer)"));
  const SyncBatchNorm2d made(*layer);
  EXPECT_TRUE(made->weight.is_same(layer->weight));
}

struct GhostNormImpl : torch::nn::BatchNorm2dImpl {
  using BatchNorm2dImpl::BatchNorm2dImpl;
};
TORCH_MODULE(GhostNorm);

TEST(ConvertSyncBatchNorm, TypesThatDeriveFromLibTorchsStay) {
  Sequential net(GhostNorm(3), torch::nn::InstanceNorm2d(3));
  EXPECT_EQ(convert_sync_batchnorm(net), 0U);
}

}  // namespace
}  // namespace hvd::testing
