#include <hvd/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hvd/error.h"
#include "torch/support/cuda_test.h"
#include "torch/support/fake_cuda.h"

// Training on a (simulated) GPU. It uses the CPU's operators, and hvd's path goes through the
// host's memory, so training gives the same bits as on the CPU.

namespace hvd::testing {
namespace {

using CudaOptimizer = CudaTest;
constexpr int kSteps = 7;

Net make_net(torch::Device on) {
  torch::manual_seed(3);
  Net net;
  net->to(on);
  return net;
}

torch::Tensor loss_on(Net& net, const Batch& batch, torch::Device on) {
  return torch::mse_loss(net->forward(batch.x.to(on)), batch.y.to(on));
}

/// The parameters after some steps on a device.
std::vector<torch::Tensor> trained(torch::Device on, const DistributedOptimizerOptions& options) {
  Net net = make_net(on);
  broadcast_parameters(net);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < options.backward_passes_per_step; ++pass) {
      loss_on(net, Batch::of_rank(rank(), 10 * step + pass), on).backward();
    }
    optimizer.step();
  }
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : net->parameters()) {
    EXPECT_EQ(parameter.device().type(), on.type());
    values.push_back(parameter.detach().cpu());
  }
  return values;
}

void expect_as_on_the_cpu(const DistributedOptimizerOptions& options) {
  DistributedOptimizerOptions on_the_cpu = options;
  // A set of one rank on a GPU sends no bytes and rounds none (decision 17).
  if (size() == 1) on_the_cpu.compression = Compression::kNone;
  const std::vector<torch::Tensor> cpu = trained(torch::kCPU, on_the_cpu);
  const std::vector<torch::Tensor> gpu = trained(device(), options);
  for (std::size_t i = 0; i < cpu.size(); ++i)
    EXPECT_TRUE(torch::equal(cpu[i], gpu[i])) << "parameter " << i << "\n" << cpu[i] << gpu[i];
  EXPECT_TRUE(same_on_all_ranks(gpu));
}

TEST_F(CudaOptimizer, Buckets) { expect_as_on_the_cpu({}); }
TEST_F(CudaOptimizer, WithoutBuckets) { expect_as_on_the_cpu({.gradient_as_bucket_view = false}); }
TEST_F(CudaOptimizer, SeveralPasses) { expect_as_on_the_cpu({.backward_passes_per_step = 3}); }
TEST_F(CudaOptimizer, Float16OnTheWire) {
  expect_as_on_the_cpu({.compression = Compression::kFloat16});
}
TEST_F(CudaOptimizer, BFloat16OnTheWireSeveralPasses) {
  expect_as_on_the_cpu({.compression = Compression::kBFloat16, .backward_passes_per_step = 2});
}
TEST_F(CudaOptimizer, Groups) {
  expect_as_on_the_cpu(
      {.groups = {{"fc1.weight", "fc2.bias"}, {"norm.weight", "norm.bias", "fc1.bias"}}});
}
TEST_F(CudaOptimizer, AGradientHook) {
  const auto average = [](const BucketGradients& bucket) {
    Handle handle = allreduce_async(bucket.values, {.name = bucket.name});
    return [handle]() mutable { return handle.wait(); };
  };
  expect_as_on_the_cpu({.gradient_hook = average});
}
TEST_F(CudaOptimizer, AdasumOfChanges) {
  expect_as_on_the_cpu({.op = ReduceOp::kAdasum, .adasum_delta = true});
}
TEST_F(CudaOptimizer, Adasum) { expect_as_on_the_cpu({.op = ReduceOp::kAdasum}); }
TEST_F(CudaOptimizer, Predivided) { expect_as_on_the_cpu({.gradient_predivide_factor = 4}); }

/// Repeats a step of many small layers.
class ManyLayers {
 public:
  explicit ManyLayers(int layers, bool distributed = true,
                      const DistributedOptimizerOptions& options = {}) {
    torch::manual_seed(23);
    for (int layer = 0; layer < layers; ++layer)
      net_->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    net_->to(device());
    sgd_ = std::make_unique<torch::optim::SGD>(net_->parameters(), torch::optim::SGDOptions(0.05));
    if (distributed)
      optimizer_ = std::make_unique<DistributedOptimizer>(*sgd_, net_->named_parameters(), options);
  }

  void step(bool set_to_none = true) {
    optimizer_ ? optimizer_->zero_grad(set_to_none) : sgd_->zero_grad(set_to_none);
    net_->forward(x_).square().mean().backward();
    optimizer_ ? optimizer_->step() : sgd_->step();
  }
  std::vector<torch::Tensor> parameters() const { return net_->parameters(); }

 private:
  torch::nn::Sequential net_;
  std::unique_ptr<torch::optim::SGD> sgd_;
  std::unique_ptr<DistributedOptimizer> optimizer_;
  const torch::Tensor x_ = rank_tensor(rank(), {8, 4}, torch::kFloat32).to(device());
};

/// Launches and events of a steady step, LibTorch's and hvd's.
struct StepCost {
  int operators = 0;
  HvdCalls hvd = {};
};

StepCost cost_of_step(ManyLayers& training, bool set_to_none) {
  for (int i = 0; i < 5; ++i) training.step(set_to_none);
  const HvdCalls before = hvd_calls();
  const int operators = fake_operators();
  constexpr int kMany = 4;
  for (int i = 0; i < kMany; ++i) training.step(set_to_none);
  const HvdCalls after = hvd_calls();
  EXPECT_EQ((fake_operators() - operators) % kMany, 0);
  return {(fake_operators() - operators) / kMany,
          {.synchronize = after.synchronize - before.synchronize,
           .records = (after.records - before.records) / kMany,
           .waits = (after.waits - before.waits) / kMany,
           .launches = (after.launches - before.launches) / kMany}};
}

// A bucket is one operation: no gradient has a copy, an event or a wait of its own, whether its
// memory is new in each step or stays. The parameters are not compared here.
TEST_F(CudaOptimizer, ABucketCostsTheSameHoweverManyGradientsItHas) {
  const DistributedOptimizerOptions options{.check_every = 0};
  for (const bool set_to_none : {true, false}) {
    std::optional<StepCost> few;
    for (const int layers : {3, 40}) {
      ManyLayers bare(layers, false), training(layers, true, options);
      const StepCost own = cost_of_step(bare, set_to_none);
      const StepCost cost = cost_of_step(training, set_to_none);
      EXPECT_EQ(cost.operators, own.operators) << "LibTorch does nothing more for hvd";
      EXPECT_EQ(cost.hvd.launches, size() == 1 ? 0 : 2) << "one packs and one unpacks";
      EXPECT_EQ(cost.hvd.synchronize, 0);
      if (!few) few = cost;
      EXPECT_EQ(cost.hvd.records, few->hvd.records) << layers << " layers";
      EXPECT_EQ(cost.hvd.waits, few->hvd.waits) << layers << " layers";
    }
  }
}

// The check of the parameters computes all fingerprints together, and reads them a step later.
TEST_F(CudaOptimizer, ACheckCostsTheSameHoweverManyParametersThereAre) {
  if (size() == 1) GTEST_SKIP() << "parameters are not compared";
  std::optional<int> operators, waits;
  for (const int layers : {3, 40}) {
    ManyLayers unchecked(layers, true, {.check_every = 0});
    ManyLayers checked(layers, true, {.check_every = 1});
    const int without = cost_of_step(unchecked, true).operators;
    const int with = cost_of_step(checked, true).operators;
    const int before = fake_host_waits();
    checked.step();
    const int waited = fake_host_waits() - before;
    EXPECT_EQ(operators.value_or(with - without), with - without) << layers << " layers";
    EXPECT_EQ(waits.value_or(waited), waited) << layers << " layers";
    // The copy of the result, since FakeCuda has no pinned memory, and an event of the last step.
    EXPECT_LE(waited, 2);
    operators = with - without;
    waits = waited;
  }
}

TEST_F(CudaOptimizer, DifferentParametersAreReportedAStepLater) {
  if (size() == 1) GTEST_SKIP() << "parameters are not compared";
  Net net = make_net(device());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), {.check_every = 2});
  std::string message;
  for (int i = 0; i < 8 && message.empty(); ++i) {
    if (i == 3 && rank() == 1) {
      const torch::NoGradGuard no_grad;
      net->fc2->weight.detach().add_(0.5);
    }
    optimizer.zero_grad();
    loss_on(net, Batch::of_rank(rank(), i), device()).backward();
    try {
      optimizer.step();
    } catch (const DivergedError& error) {
      message = error.what();
      EXPECT_EQ(i, 5);
    }
  }
  EXPECT_TRUE(contains(message, "after 4 reductions")) << message;
  EXPECT_TRUE(contains(message, "'fc2.weight' differs on")) << message;
}

TEST_F(CudaOptimizer, ARankWithoutMemoryForItsFingerprintsLeavesNoRankWaiting) {
  if (size() == 1) GTEST_SKIP() << "parameters are not compared";
  for (const int layers : {3, 20}) {
    ManyLayers training(layers, true, {.check_every = 1});
    for (int step = 0; step < 4; ++step) training.step();
    // A step without the check needs no larger allocation. The message of 20 layers does not fit.
    if (rank() == size() - 1) refuse_fake_memory_from(129);
    const std::string message =
        layers == 3 ? (training.step(), "") : message_of<DivergedError>([&] { training.step(); });
    refuse_fake_memory_from(0);
    EXPECT_EQ(contains(message, "could not be found out"), layers == 20) << message;
    if (layers == 3) training.step();
  }
}

TEST_F(CudaOptimizer, GradientsStayWhereAutogradHasPutThem) {
  ManyLayers training(8);
  std::vector<void*> places;
  for (int step = 0; step < 5; ++step) {
    training.step(false);
    std::vector<void*> now;
    for (const torch::Tensor& parameter : training.parameters())
      now.push_back(parameter.grad().data_ptr());
    if (step == 0) places = now;
    EXPECT_EQ(now, places) << "step " << step;
  }
}

// Buckets use the runtime's buffers. Once those exist, a rank cannot run out of memory.
TEST_F(CudaOptimizer, BucketsNeedNoMemoryOfTheirOwn) {
  grouped_allreduce_async_({torch::ones({1000}, device()), torch::ones({1000}, device())},
                           {.name = "makes the buffers"})
      .wait_all();
  ManyLayers training(32), twin(32, true, {.gradient_as_bucket_view = false});
  std::uint64_t operations = 0;
  for (int step = 0; step < 4; ++step) {
    // No tensor of a step needs a larger allocation.
    if (rank() == size() - 1) refuse_fake_memory_from(129);
    operations = metrics().completed_operations;
    EXPECT_NO_THROW(training.step());
    operations = metrics().completed_operations - operations;
    refuse_fake_memory_from(0);
    twin.step();
  }
  EXPECT_EQ(operations, 2U) << "a bucket, and which parameters have had a gradient";
  const auto expected = twin.parameters();
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(training.parameters()[i].cpu(), expected[i].cpu())) << i;
}

// Gradients whose strides differ from their parameter's, or that share another one's memory.
TEST_F(CudaOptimizer, GradientsOfOtherStridesAndOfSharedMemory) {
  const auto train = [](torch::Device on) {
    torch::Tensor a = torch::arange(6.0F).view({2, 3}).to(on).requires_grad_();
    torch::Tensor b = torch::ones({2, 3}, on).requires_grad_();
    torch::Tensor c = torch::ones({3, 2}, on).t().detach().requires_grad_();
    torch::optim::SGD sgd({a, b, c}, torch::optim::SGDOptions(0.5));
    NamedParameters named{{"a", a}, {"b", b}, {"c", c}};
    DistributedOptimizer optimizer(sgd, named);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const torch::Tensor weights = rank_tensor(rank(), {2, 3}, torch::kFloat32, step).to(on);
      ((a.view(-1) + b.view(-1)) * weights.view(-1)).sum().backward();
      c.mutable_grad() = weights.clone();  // its rows are contiguous, those of c are not
      optimizer.step();
    }
    return std::vector<torch::Tensor>{a.detach().cpu(), b.detach().cpu(), c.detach().cpu()};
  };
  const auto gpu = train(device()), cpu = train(torch::kCPU);
  for (std::size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(torch::equal(gpu[i], cpu[i])) << i;
}

TEST_F(CudaOptimizer, OpensItsQueueBeforeTheFirstStep) {
  Net net = make_net(device());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
  const Metrics before = metrics();
  const int waits = fake_host_waits();
  const DistributedOptimizer optimizer(sgd, net);
  EXPECT_EQ(fake_host_waits(), waits);
  while (metrics().completed_operations == before.completed_operations)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(metrics().failed_operations, before.failed_operations);
}

/// Without comparisons of the parameters, whose waits another test counts.
void expect_no_waits(DistributedOptimizerOptions options) {
  options.check_every = 0;
  Net net = make_net(device());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), options);
  const Batch batch = Batch::of_rank(rank(), 0);
  const torch::Tensor x = batch.x.to(device()), y = batch.y.to(device());
  const auto step = [&] {
    optimizer.zero_grad();
    torch::mse_loss(net->forward(x), y).backward();
    optimizer.step();
  };
  for (int i = 0; i < 4; ++i) step();
  const int host = fake_host_waits();
  const HvdCalls hvd = hvd_calls();
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(fake_host_waits(), host);
  EXPECT_EQ(hvd_calls().synchronize, hvd.synchronize);
  EXPECT_GT(hvd_calls().records, hvd.records);
}

TEST_F(CudaOptimizer, SteadyStepsDoNotWaitForTheDevice) { expect_no_waits({}); }
TEST_F(CudaOptimizer, SteadyStepsThatTravelAs16BitsDoNotEither) {
  expect_no_waits({.compression = Compression::kFloat16});
}
TEST_F(CudaOptimizer, Float16OnTheWireOneByOne) {
  expect_as_on_the_cpu({.compression = Compression::kFloat16, .gradient_as_bucket_view = false});
}

// Gradients come from the streams of the forward pass, and the optimizer steps on another.
TEST_F(CudaOptimizer, StepOnAnotherStreamThanBackward) {
  Net net = make_net(device());
  Net twin = make_net(torch::kCPU);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05)),
      twin_sgd(twin->parameters(), torch::optim::SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters()),
      twin_optimizer(twin_sgd, twin->named_parameters());
  const c10::Stream side = side_stream();
  for (int i = 0; i < kSteps; ++i) {
    const Batch batch = Batch::of_rank(rank(), i);
    const c10::Stream main = current_stream();
    optimizer.zero_grad();
    order(main, side);
    {
      const c10::StreamGuard guard(side);
      loss_on(net, batch, device()).backward();
    }
    order(side, main);
    optimizer.step();
    twin_optimizer.zero_grad();
    loss_on(twin, batch, torch::kCPU).backward();
    twin_optimizer.step();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(net->parameters()[i].detach().cpu(), twin->parameters()[i].detach()));
  }
}

/// Every other parameter accumulates its gradient in a second stream.
class CudaTwoStreams : public CudaTest {
 protected:
  static void accumulate(const DistributedOptimizerOptions& how);
};

void CudaTwoStreams::accumulate(const DistributedOptimizerOptions& how) {
  const c10::Stream side = side_stream();
  std::vector<torch::Tensor> parameters, graphs;
  NamedParameters named;
  for (int i = 0; i < 20; ++i) {
    // The last gradient of a bucket comes from the main stream, which LibTorch has not made wait
    // for the other one.
    const c10::OptionalStreamGuard guard(i % 2 == 1 ? std::optional(side) : std::nullopt);
    parameters.push_back(torch::full({16}, 1.0F * i, device()).requires_grad_());
    graphs.push_back(parameters.back() *
                     1);  // the first use of a parameter decides on the stream of its gradient
    named.insert("p" + std::to_string(i), parameters.back());
  }
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0));
  DistributedOptimizer optimizer(sgd, named, how);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({}, device());
    order(side, current_stream());
    for (const torch::Tensor& parameter : parameters)
      loss = loss + (parameter * parameter).sum() * (rank() + 1);
    loss.backward();
    optimizer.synchronize();
    for (int i = 0; i < 20; ++i) {
      const torch::Tensor expected = torch::full(
          {16}, 2.0F * static_cast<float>(i) * static_cast<float>(size() * (size() + 1) / 2));
      EXPECT_TRUE(near(parameters[static_cast<std::size_t>(i)].grad().cpu(), expected))
          << "parameter " << i << " in step " << step;
    }
    optimizer.step();
  }
}

TEST_F(CudaTwoStreams, Buckets) { accumulate({.op = ReduceOp::kSum}); }
TEST_F(CudaTwoStreams, Groups) {
  accumulate({.op = ReduceOp::kSum, .groups = {{"p0", "p1", "p2"}, {"p8", "p13"}}});
}

TEST_F(CudaOptimizer, ParameterWithoutGradientOnOneRank) {
  torch::Tensor a = torch::ones({3}, device()).requires_grad_(),
                b = torch::ones({5}, device()).requires_grad_();
  torch::optim::SGD sgd({a, b}, torch::optim::SGDOptions(1));
  NamedParameters named{{"a", a}, {"b", b}};
  DistributedOptimizer optimizer(sgd, named, {.op = ReduceOp::kSum});
  for (int i = 0; i < 4; ++i) {
    optimizer.zero_grad();
    (rank() == 0 ? a.sum() + b.sum() : a.sum()).backward();
    optimizer.synchronize();
    EXPECT_TRUE(on_gpu(a.grad(), torch::full({3}, static_cast<float>(size()))));
    EXPECT_TRUE(on_gpu(b.grad(), torch::ones({5})));
    optimizer.step();
  }
}

TEST_F(CudaOptimizer, DiscardedGradientsAreLeftAlone) {
  Net net = make_net(device());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  for (int i = 0; i < 5; ++i) {
    loss_on(net, Batch::of_rank(rank(), i), device()).backward();
    optimizer.zero_grad(/*set_to_none=*/i % 2 == 0);
    loss_on(net, Batch::of_rank(rank(), i + 1), device()).backward();
    optimizer.step();
    net->zero_grad();
  }
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : net->parameters())
    values.push_back(parameter.detach().cpu());
  EXPECT_TRUE(same_on_all_ranks(values));
}

TEST_F(CudaOptimizer, AllReduceOfScaledLosses) {
  Net net = make_net(device()), twin = make_net(torch::kCPU);
  scale_loss(loss_on(net, Batch::of_rank(rank(), 1), device())).backward();
  scale_loss(loss_on(twin, Batch::of_rank(rank(), 1), torch::kCPU)).backward();
  all_reduce(net->parameters());
  all_reduce(twin->parameters());
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(net->parameters()[i].grad().cpu(), twin->parameters()[i].grad()));
  }
}

TEST_F(CudaOptimizer, BroadcastOptimizerState) {
  Net net = make_net(device());
  torch::optim::AdamW adamw(net->parameters(),
                            torch::optim::AdamWOptions(rank() == 0 ? 0.25 : 0.5));
  if (rank() == 0) {
    loss_on(net, Batch::of_rank(0, 1), device()).backward();
    adamw.step();
  }
  broadcast_parameters(net);
  broadcast_optimizer_state(adamw);
  ASSERT_EQ(adamw.state().size(), net->parameters().size());
  std::vector<torch::Tensor> moments;
  for (const torch::Tensor& parameter : net->parameters()) {
    const auto& state = static_cast<torch::optim::AdamWParamState&>(
        *adamw.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg().device(), device());
    moments.push_back(state.exp_avg().cpu());
  }
  EXPECT_TRUE(same_on_all_ranks(moments));
}

TEST_F(CudaOptimizer, GradScalerReadsOnceAndSkipsTogether) {
  Net net = make_net(device());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  GradScaler scaler({.init_scale = 1024});
  const Batch batch = Batch::of_rank(rank(), 0);
  const torch::Tensor x = batch.x.to(device()), y = batch.y.to(device());
  for (int i = 0; i < 6; ++i) {
    const bool overflows = i == 3 && rank() == size() - 1;
    const torch::Tensor before = net->fc1->weight.detach().clone();
    optimizer.zero_grad();
    torch::Tensor loss = torch::mse_loss(net->forward(x), y);
    if (overflows) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    const int host = fake_host_waits();
    EXPECT_EQ(scaler.step(optimizer), i != 3);
    if (i > 1) {
      EXPECT_EQ(fake_host_waits(), host + 1);
    }
    scaler.update();
    EXPECT_EQ(torch::equal(before.cpu(), net->fc1->weight.detach().cpu()), i == 3);
  }
  EXPECT_EQ(scaler.get_scale(), 512);
}

TEST_F(CudaOptimizer, GradScalerUnscalesAsOnTheCpu) {
  const auto run = [](torch::Device on, torch::ScalarType type) {
    torch::Tensor weight =
        torch::ones({4}, torch::TensorOptions().device(on).dtype(type)).requires_grad_();
    torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.5));
    NamedParameters named{{"weight", weight}};
    DistributedOptimizer optimizer(sgd, named);
    GradScaler scaler({.init_scale = 64});
    for (int i = 0; i < 4; ++i) {
      optimizer.zero_grad();
      scaler.scale((weight * weight).sum()).backward();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
    }
    return weight.detach().cpu();
  };
  for (const auto type : {torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64}) {
    EXPECT_TRUE(torch::equal(run(device(), type), run(torch::kCPU, type))) << type;
  }
}

}  // namespace
}  // namespace hvd::testing
