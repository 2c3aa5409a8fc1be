// Compares the allocations of a training step with a wrapper with those that LibTorch itself makes
// in the same step with empty hooks.
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/version.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "layers/layer_exchange.h"
#include "support/count_allocations.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

using torch::autograd::variable_list;

/// LibTorch requires a pre-hook to return a list, which is an allocation.
class IdleHook : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list& gradients) override { return gradients; }
};

/// A model, its optimizer, and a training step.
struct Training {
  Net net;
  SGD sgd = SGD(net->parameters(), SGDOptions(0.01));
  std::unique_ptr<DistributedOptimizer> distributed = {};
  bool weighted = false;
  const Batch batch = Batch::of_rank(rank(), 1);
  std::vector<decltype(torch::autograd::impl::grad_accumulator(torch::Tensor()))> hooked = {};

  void add_idle_hooks() {
    for (const torch::Tensor& parameter : net->parameters()) {
      hooked.push_back(torch::autograd::impl::grad_accumulator(parameter));
      hooked.back()->add_pre_hook(std::make_unique<IdleHook>());
      hooked.back()->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [](const variable_list& outputs, const variable_list&) { return outputs; }));
    }
  }

  void step() {
    distributed ? distributed->zero_grad() : sgd.zero_grad();
    if (weighted) distributed->set_weight(batch.x.size(0));
    loss_of(net, batch).backward();
    distributed ? distributed->step() : sgd.step();
  }
  /// The allocations of one step: the least of several, since other threads of the process allocate
  /// now and then.
  std::uint64_t allocated() {
    // Long enough to learn the buckets, and to replay the schedule.
    for (int i = 0; i < 40; ++i) step();
    std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
    for (int i = 0; i < 20; ++i) {
      const std::uint64_t before = allocations();
      step();
      least = std::min(least, allocations() - before);
    }
    return least;
  }
};

TEST(SteadyAllocations, TheWrapperAddsNone) {
  Training bare;
  bare.add_idle_hooks();
  const std::uint64_t own = bare.allocated();
  ASSERT_GT(own, 0U) << "nothing is counted";

  const DistributedOptimizerOptions kinds[] = {
      {}, {.compression = Compression::kFloat16}, {.check_every = 1}, {}};
  for (const DistributedOptimizerOptions& options : kinds) {
    Training wrapped;
    wrapped.weighted = &options == &kinds[3];
    wrapped.distributed = std::make_unique<DistributedOptimizer>(
        wrapped.sgd, wrapped.net->named_parameters(), options);
    broadcast_parameters(wrapped.net);
    const std::uint64_t replayed = metrics().locked_operations;
    const std::uint64_t with_hvd = wrapped.allocated();
    EXPECT_GT(metrics().locked_operations, replayed) << "the schedule has not been locked";
    // From LibTorch 2.13 on, a step makes one tensor less for each parameter, because its gradient
    // is a view that exists already.
    const std::size_t views = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 213
                                  ? wrapped.net->parameters().size()
                                  : 0;
    EXPECT_LE(with_hvd, own - views) << to_string(options.compression) << ", parameters compared "
                                     << (options.check_every ? "in every step" : "now and then")
                                     << (wrapped.weighted ? ", weighted" : "");
  }
}

TEST(SteadyAllocations, ALayersExchangeHasNone) {
  libtorch::LayerExchange exchange("steady", {});
  const torch::Tensor row = torch::ones({1, 130});
  std::uint64_t least = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t replayed = metrics().locked_operations;
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t before = allocations();
    exchange.gathered(row);
    exchange.summed(row);
    least = std::min(least, allocations() - before);
  }
  EXPECT_GT(metrics().locked_operations, replayed) << "the schedule has not been locked";
  EXPECT_EQ(least, 0U);
}

}  // namespace
}  // namespace hvd::testing
