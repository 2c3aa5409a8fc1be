#include "hvd/torch/sync_batch_norm.h"

#include <sstream>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "layers/batch_statistics.h"
#include "torch/support/torch_test.h"

// Compares SyncBatchNorm with LibTorch's BatchNorm on the joined batch. Batches differ by rank.

namespace hvd::testing {
namespace {

using torch::nn::BatchNormOptions;

constexpr std::int64_t kFeatures = 3;

/// The number of samples of each rank.
using Samples = std::function<std::int64_t(int rank)>;
const Samples kEqual = [](int) { return 4; };
const Samples kUneven = [](int rank) { return 2 + 3 * (rank % 3); };
const Samples kSomeEmpty = [](int rank) { return rank % 2 == 0 ? 0 : 5; };

/// The distribution differs by rank, so that the statistics of one rank differ from the joined
/// ones.
torch::Tensor sample(int rank, std::int64_t samples, std::vector<std::int64_t> rest, int seed) {
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(1000 * seed + rank));
  rest.insert(rest.begin(), {samples, kFeatures});
  return torch::randn(rest, generator) * (1 + rank) + 2 * rank;
}

struct Joined {
  std::vector<torch::Tensor> parts;
  torch::Tensor whole() const { return torch::cat(parts); }
  /// This rank's rows of a tensor of the joined batch.
  torch::Tensor own_rows(const torch::Tensor& of_whole, const ProcessSet& set) const {
    std::int64_t first = 0;
    for (int member = 0; member < set.rank(); ++member)
      first += parts[static_cast<std::size_t>(member)].size(0);
    return of_whole.narrow(0, first, own_of(parts, set).size(0));
  }
};
Joined joined(const ProcessSet& set, const Samples& samples, const std::vector<std::int64_t>& rest,
              int seed) {
  Joined all;
  for (const int member : set.ranks())
    all.parts.push_back(sample(member, samples(member), rest, seed));
  return all;
}

template <class Layer, class Reference>
struct Pair {
  Layer layer;
  Reference reference;
  Pair(const BatchNormOptions& options, const ProcessSet& set)
      : layer(options, set), reference(options) {
    if (!options.affine()) return;
    const torch::NoGradGuard no_grad;
    for (auto* const weight : {&layer->weight, &reference->weight})
      weight->copy_(torch::arange(1, kFeatures + 1).to(torch::kFloat32) / 2);
    for (auto* const bias : {&layer->bias, &reference->bias})
      bias->copy_(torch::arange(kFeatures).to(torch::kFloat32) - 1);
  }
};

void expect_near(const torch::Tensor& actual, const torch::Tensor& expected, double tolerance,
                 const char* what) {
  EXPECT_TRUE(near(actual.detach(), expected.detach(), tolerance)) << what;
}

/// Compares the layers in three steps of forward and backward. @param format of the inputs
template <class Layer, class Reference>
void check_steps(const ProcessSet& set, const Samples& samples,
                 const std::vector<std::int64_t>& rest,
                 const BatchNormOptions& options = {kFeatures},
                 at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  if (joined(set, samples, rest, 0).whole().numel() == 0) return;
  Pair<Layer, Reference> pair(options, set);
  constexpr double kTolerance = 2e-5;
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const Joined inputs = joined(set, samples, rest, step);
    const Joined weights = joined(set, samples, rest, 100 + step);  // weights of the loss
    const auto x = own_of(inputs.parts, set).clone(format).requires_grad_();
    const auto whole = inputs.whole().clone(format).requires_grad_();
    pair.layer->zero_grad();
    pair.reference->zero_grad();
    const torch::Tensor y = pair.layer->forward(x);
    const torch::Tensor expected = pair.reference->forward(whole);
    (y * own_of(weights.parts, set)).sum().backward();
    (expected * weights.whole()).sum().backward();
    expect_near(y, inputs.own_rows(expected, set), kTolerance, "output");
    expect_near(x.grad(), inputs.own_rows(whole.grad(), set), kTolerance, "gradient of the input");
    EXPECT_EQ(y.suggest_memory_format(), x.suggest_memory_format());
    if (options.affine()) {
      const auto sum = grouped_allreduce({pair.layer->weight.grad(), pair.layer->bias.grad()},
                                         {.op = ReduceOp::kSum, .process_set = set});
      expect_near(sum[0], pair.reference->weight.grad(), kTolerance, "gradient of the weight");
      expect_near(sum[1], pair.reference->bias.grad(), kTolerance, "gradient of the bias");
    }
    if (options.track_running_stats()) {
      expect_near(pair.layer->running_mean, pair.reference->running_mean, kTolerance, "mean");
      expect_near(pair.layer->running_var, pair.reference->running_var, kTolerance, "var");
      EXPECT_EQ(pair.layer->num_batches_tracked.template item<int>(), step + 1);
    }
  }
  pair.layer->eval();
  pair.reference->eval();
  if (!options.track_running_stats()) return;
  const torch::Tensor x = sample(rank(), 2, rest, 7);
  expect_near(pair.layer->forward(x), pair.reference->forward(x), kTolerance, "evaluation");
}

TEST(SyncBatchNorm, EqualsBatchNormOnTheJoinedBatch) {
  for_each_set([](const ProcessSet& set) {
    for (const Samples* const samples : {&kEqual, &kUneven, &kSomeEmpty}) {
      check_steps<SyncBatchNorm1d, torch::nn::BatchNorm1d>(set, *samples, {});
      check_steps<SyncBatchNorm1d, torch::nn::BatchNorm1d>(set, *samples, {6});
      check_steps<SyncBatchNorm2d, torch::nn::BatchNorm2d>(set, *samples, {4, 5});
      check_steps<SyncBatchNorm3d, torch::nn::BatchNorm3d>(set, *samples, {2, 3, 4});
    }
  });
}

TEST(SyncBatchNorm, KeepsTheMemoryFormat) {
  check_steps<SyncBatchNorm2d, torch::nn::BatchNorm2d>({}, kUneven, {4, 5}, {kFeatures},
                                                       at::MemoryFormat::ChannelsLast);
  check_steps<SyncBatchNorm3d, torch::nn::BatchNorm3d>({}, kUneven, {2, 4, 5}, {kFeatures},
                                                       at::MemoryFormat::ChannelsLast3d);
}

TEST(SyncBatchNorm, TakesEveryOptionOfBatchNorm) {
  for (const BatchNormOptions& options :
       {BatchNormOptions(kFeatures).affine(false), BatchNormOptions(kFeatures).eps(0.5),
        BatchNormOptions(kFeatures).track_running_stats(false),
        BatchNormOptions(kFeatures).momentum(0.7),
        BatchNormOptions(kFeatures).momentum(std::nullopt)}) {
    check_steps<SyncBatchNorm2d, torch::nn::BatchNorm2d>({}, kUneven, {2, 3}, options);
  }
}

TEST(SyncBatchNorm, StridedInputsAndGradients) {
  Pair<SyncBatchNorm2d, torch::nn::BatchNorm2d> pair({kFeatures}, {});
  const Joined inputs = joined({}, kUneven, {4, 5}, 3);
  const auto x = own_of(inputs.parts, ProcessSet()).clone().requires_grad_();
  const auto whole = inputs.whole().requires_grad_();
  const torch::Tensor y = pair.layer->forward(x.transpose(2, 3));
  const torch::Tensor expected = pair.reference->forward(whole.transpose(2, 3));
  // The square of a normalised y has almost no gradient.
  y.transpose(2, 3).pow(3).sum().backward();
  expected.transpose(2, 3).pow(3).sum().backward();
  expect_near(y, inputs.own_rows(expected, {}), 2e-5, "output");
  ASSERT_GT(whole.grad().abs().max().item<float>(), 0.5F)
      << "the gradient is too small for this test";
  expect_near(x.grad(), inputs.own_rows(whole.grad(), {}), 2e-4, "gradient");
  const torch::Tensor weight = allreduce(pair.layer->weight.grad(), {.op = ReduceOp::kSum});
  expect_near(weight, pair.reference->weight.grad(), 2e-4, "gradient of the weight");
}

TEST(SyncBatchNorm, ReducedPrecisionKeepsStatisticsInFloat32) {
  for (const auto type : {torch::kBFloat16, torch::kFloat16}) {
    SCOPED_TRACE(c10::toString(type));
    SyncBatchNorm2d layer(kFeatures);
    torch::nn::BatchNorm2d reference(kFeatures);
    const Joined inputs = joined({}, kUneven, {8, 8}, 5);
    const auto x = own_of(inputs.parts, ProcessSet()).to(type).requires_grad_();
    const auto whole = inputs.whole().to(type).to(torch::kFloat32).requires_grad_();
    const torch::Tensor y = layer->forward(x);
    Joined weights = joined({}, kUneven, {8, 8}, 105);  // weights of the loss, exact in this type
    for (torch::Tensor& part : weights.parts) part = part.to(type).to(torch::kFloat32);
    (y.to(torch::kFloat32) * own_of(weights.parts, ProcessSet())).sum().backward();
    const torch::Tensor expected = reference->forward(whole);
    (expected * weights.whole()).sum().backward();
    ASSERT_GT(whole.grad().abs().max().item<float>(), 0.5F)
        << "the gradient is too small for this test";
    EXPECT_EQ(y.scalar_type(), type);
    expect_near(y.to(torch::kFloat32), inputs.own_rows(expected, {}), 2e-2, "output");
    expect_near(x.grad().to(torch::kFloat32), inputs.own_rows(whole.grad(), {}), 2e-2, "gradient");
    const torch::Tensor weight = allreduce(layer->weight.grad(), {.op = ReduceOp::kSum});
    expect_near(weight, reference->weight.grad(), 2e-2, "gradient of the weight");
    expect_near(layer->running_mean, reference->running_mean, 1e-5, "mean");
    expect_near(layer->running_var, reference->running_var, 1e-5, "var");
  }
}

TEST(SyncBatchNorm, Float64IsNotRounded) {
  SyncBatchNorm1d layer(kFeatures);
  torch::nn::BatchNorm1d reference(kFeatures);
  layer->to(torch::kFloat64);
  reference->to(torch::kFloat64);
  Joined inputs = joined({}, kUneven, {50}, 6);
  for (torch::Tensor& part : inputs.parts) part = part.to(torch::kFloat64) / 3;
  const auto x = own_of(inputs.parts, ProcessSet()).clone().requires_grad_();
  const auto whole = inputs.whole().requires_grad_();
  layer->forward(x).pow(3).sum().backward();
  reference->forward(whole).pow(3).sum().backward();
  expect_near(x.grad(), inputs.own_rows(whole.grad(), {}), 1e-10, "gradient");
  expect_near(layer->running_var, reference->running_var, 1e-12, "var");
}

// Sums of squares would have lost the variance: 10000^2 has 9 digits, a float32 has 7.
TEST(SyncBatchNorm, AMeanFarFromZeroCostsNoDigits) {
  SyncBatchNorm1d layer(kFeatures);
  torch::nn::BatchNorm1d reference(kFeatures);
  reference->to(torch::kFloat64);
  Joined inputs = joined({}, kUneven, {100}, 8);
  for (torch::Tensor& part : inputs.parts) part = part / 100 + 10000;
  layer->forward(own_of(inputs.parts, ProcessSet()));
  reference->forward(inputs.whole().to(torch::kFloat64));
  expect_near(layer->running_var.to(torch::kFloat64), reference->running_var, 1e-6, "var");
}

TEST(SyncBatchNorm, CountsAreExactBeyondAFloatsDigits) {
  constexpr std::int64_t kCount = (std::int64_t{1} << 25) + 1;
  const torch::Tensor row = libtorch::batch_moments(torch::zeros({1, 1}).expand({2, 1}));
  torch::Tensor rows = torch::cat({row, row});
  rows.select(1, 0).fill_(static_cast<double>(kCount % (1 << 20)));
  rows.select(1, 1).fill_(static_cast<double>(kCount >> 20));
  EXPECT_EQ(libtorch::join_moments(rows).count.item<double>(), 2.0 * kCount);
  EXPECT_EQ(libtorch::join_moments(libtorch::batch_moments(torch::zeros({1, 1, (1 << 20) + 3})))
                .count.item<double>(),
            (1 << 20) + 3.0);
}

TEST(SyncBatchNorm, EvaluationAndConstantInputsExchangeNothing) {
  SyncBatchNorm2d layer(kFeatures);
  const torch::Tensor x = sample(rank(), 2, {3, 3}, 1);
  torch::Tensor y = layer->forward(x);
  if (rank() == 0) {
    y.sum().backward();  // only the weight's gradient
    EXPECT_TRUE(layer->weight.grad().defined());
    layer->eval();
    layer->forward(x);
    SyncBatchNorm2d untracked(BatchNormOptions(kFeatures).track_running_stats(false));
    untracked->eval();
    untracked->forward(x);
  }
}

TEST(SyncBatchNorm, RanksMayConstructOtherLayersBesides) {
  std::vector<SyncBatchNorm1d> others;
  for (int i = 0; i < rank(); ++i) others.emplace_back(kFeatures + 1);
  SyncBatchNorm1d first{nullptr}, second{nullptr};
  if (rank() % 2 == 0) first = SyncBatchNorm1d(kFeatures);
  second = SyncBatchNorm1d(2);
  if (rank() % 2 == 1) first = SyncBatchNorm1d(kFeatures);
  const torch::Tensor a = sample(rank(), 3, {}, 1), b = torch::randn({3, 2});
  for (int step = 0; step < 2; ++step) {
    const torch::Tensor x = a.clone().requires_grad_(), z = b.clone().requires_grad_();
    const torch::Tensor loss = first->forward(x).sum() + second->forward(z).square().sum();
    loss.backward();
  }
  EXPECT_TRUE(same_on_all_ranks({first->running_mean, second->running_mean}));
  SyncBatchNorm1d copy(std::dynamic_pointer_cast<SyncBatchNorm1dImpl>(first->clone()));
  first->forward(a);
  copy->forward(a);
  EXPECT_TRUE(near(copy->running_mean, first->running_mean));
}

/// A network with two batch normalisations, whose gradients are reduced in buckets.
struct NormNetImpl : torch::nn::Module {
  explicit NormNetImpl(bool synchronised) {
    net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    synchronised ? net->push_back(SyncBatchNorm2d(4)) : net->push_back(torch::nn::BatchNorm2d(4));
    net->push_back(torch::nn::ReLU());
    net->push_back(torch::nn::Flatten());
    net->push_back(torch::nn::Linear(4 * 16, 5));
    synchronised ? net->push_back(SyncBatchNorm1d(5)) : net->push_back(torch::nn::BatchNorm1d(5));
    register_module("net", net);
  }
  torch::Tensor forward(const torch::Tensor& x) { return net->forward(x); }
  torch::nn::Sequential net;
};
TORCH_MODULE(NormNet);

torch::Tensor image(int rank, int step) {
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(50 * step + rank));
  return torch::randn({4, 1, 6, 6}, generator) * (rank + 1);
}

TEST(SyncBatchNorm, TrainingEqualsOneProcess) {
  torch::manual_seed(5);
  NormNet net(true), serial(false);
  copy_values(*net, *serial);
  torch::optim::SGD inner(net->parameters(), 0.05), reference(serial->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int step = 0; step < 8; ++step) {
    std::vector<torch::Tensor> all;
    for (int r = 0; r < size(); ++r) all.push_back(image(r, step));
    optimizer.zero_grad();
    reference.zero_grad();
    net->forward(image(rank(), step)).pow(3).mean().backward();
    serial->forward(torch::cat(all)).pow(3).mean().backward();
    optimizer.step();
    reference.step();
  }
  const auto expected = serial->named_parameters();
  for (const auto& item : net->named_parameters())
    expect_near(item.value(), expected[item.key()], 1e-4, item.key().c_str());
  const auto statistics = serial->named_buffers();
  for (const auto& item : net->named_buffers())
    expect_near(item.value(), statistics[item.key()], 1e-4, item.key().c_str());
}

// In a single queue the exchange would always end after the operations that were submitted before
// it.
TEST(SyncBatchNorm, DoesNotQueueBehindGradients) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  SyncBatchNorm1d layer(kFeatures);
  torch::Tensor gradients = torch::ones({std::int64_t{16} << 20});
  int overtaken_forward = 0, overtaken_backward = 0;
  for (int i = 0; i < 3; ++i) {
    const auto x = sample(rank(), 3, {}, i).requires_grad_();
    Handle under_way = allreduce_async_(gradients, {.name = "gradients"});
    const torch::Tensor y = layer->forward(x);
    overtaken_forward += under_way.done() ? 0 : 1;
    y.pow(3).sum().backward();
    overtaken_backward += under_way.done() ? 0 : 1;
    under_way.wait();
  }
  EXPECT_GT(overtaken_forward, 0);
  EXPECT_GT(overtaken_backward, 0);
}

TEST(SyncBatchNorm, StateHasTheKeysOfBatchNorm) {
  SyncBatchNorm2d layer(kFeatures);
  layer->forward(sample(rank(), 2, {3, 3}, 1));
  std::stringstream state;
  torch::save(layer, state);
  torch::nn::BatchNorm2d plain(kFeatures);
  torch::load(plain, state);
  EXPECT_TRUE(torch::equal(plain->running_var, layer->running_var));
  EXPECT_EQ(plain->num_batches_tracked.item<int>(), 1);
  std::stringstream back;
  torch::save(plain, back);
  SyncBatchNorm2d again(kFeatures);
  torch::load(again, back);
  EXPECT_TRUE(torch::equal(again->running_mean, layer->running_mean));
  std::ostringstream text;
  text << *layer;
  EXPECT_TRUE(contains(text.str(), "hvd::SyncBatchNorm2d(3, eps=1e-05, momentum=0.1"))
      << text.str();
}

TEST(SyncBatchNormErrors, ASecondDerivative) {
  if (size() == 1)
    GTEST_SKIP() << "one rank has LibTorch's BatchNorm, which has a second derivative";
  SyncBatchNorm1d layer(kFeatures);
  const auto x = sample(rank(), 4, {}, 1).requires_grad_();
  const torch::Tensor y = layer->forward(x).pow(3).sum();
  const auto first =
      torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
  const std::string message = message_of<UsageError>([&] { first[0].square().sum().backward(); });
  EXPECT_TRUE(contains(message, "second derivatives are not supported")) << message;
  EXPECT_TRUE(contains(message, "sync_batch_norm")) << message;
}

TEST(SyncBatchNormErrors, TooFewValuesOnAllRanksTogether) {
  if (size() == 1) GTEST_SKIP() << "one rank has LibTorch's BatchNorm";
  SyncBatchNorm1d layer(kFeatures);
  const auto forward = [&](std::int64_t samples) {
    return layer->forward(torch::ones({samples, kFeatures}) * rank());
  };
  const std::string message = message_of<UsageError>([&] { forward(rank() == 0 ? 1 : 0); });
  EXPECT_TRUE(contains(message, "more than 1 value per channel")) << message;
  message_of<UsageError>([&] { forward(0); });
  EXPECT_TRUE(torch::equal(layer->running_mean, torch::zeros({kFeatures})));
  EXPECT_EQ(layer->num_batches_tracked.item<int>(), 0);
  EXPECT_TRUE(torch::isfinite(forward(1)).all().item<bool>());
}

TEST(SyncBatchNormErrors, InputsThatDoNotFit) {
  SyncBatchNorm2d layer(kFeatures);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { layer->forward(torch::ones({2, 4, 3, 3})); }),
                       "got shape [2,4,3,3]"));
  EXPECT_THROW(layer->forward(torch::ones({2, kFeatures, 3})), UsageError);
  EXPECT_THROW(SyncBatchNorm1d(kFeatures)->forward(torch::ones({2, kFeatures, 3, 3})), UsageError);
  EXPECT_THROW(SyncBatchNorm3d(kFeatures)->forward(torch::ones({2, kFeatures, 3, 3})), UsageError);
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { layer->forward(torch::ones({2, 3, 3, 3}, torch::kInt32)); }),
      "Int"));
}

TEST(SyncBatchNormErrors, LayersThatDifferBetweenRanks) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const std::int64_t features = kFeatures + (rank() == 0 ? 1 : 0);
  SyncBatchNorm1d layer(features);
  const std::string message =
      message_of<MismatchError>([&] { layer->forward(torch::ones({2, features})); });
  EXPECT_TRUE(contains(message, "sync_batch_norm")) << message;
  EXPECT_TRUE(torch::equal(layer->running_mean, torch::zeros({features})));
}

TEST(SyncBatchNormErrors, AProcessSetWithoutThisRank) {
  if (size() == 1) GTEST_SKIP() << "one rank is in every set";
  const ProcessSet set = add_process_set({size() - 1});
  torch::nn::Sequential net{torch::nn::BatchNorm2d(kFeatures)};
  if (!set.included()) {
    const std::string message = message_of<UsageError>([&] { SyncBatchNorm2d(kFeatures, set); });
    EXPECT_TRUE(contains(message, "SyncBatchNorm2d: rank " + std::to_string(rank()) +
                                      " is not in process set " + std::to_string(set.id())))
        << message;
    EXPECT_THROW(convert_sync_batchnorm(net, set), UsageError);
  }
  remove_process_set(set);
}

}  // namespace
}  // namespace hvd::testing
