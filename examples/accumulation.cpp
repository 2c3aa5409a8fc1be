// Accumulates the gradients of four small batches before each step, which needs the memory of one
// small batch and one exchange of gradients per step. The two ways to do it, and a batch of four
// times the size without accumulation, give the same model up to roundings.
//   hvdrun -np 2 build/release/examples/accumulation
// The data are synthetic: random rows and a linear function of them.

#include <hvd/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "equal_on_ranks.h"

namespace {

namespace nn = torch::nn;

constexpr int kSteps = 50;
constexpr int kPasses = 4;

/// The data of one step on this rank, the same in every run of this program.
torch::Tensor rows_of_step(int step) {
  torch::manual_seed(1000 * hvd::rank() + step);
  return torch::randn({kPasses * 16, 8});
}

torch::Tensor loss_of(nn::Sequential& model, const torch::Tensor& rows) {
  return torch::mse_loss(model->forward(rows), rows.sum(1, /*keepdim=*/true));
}

struct Training {
  nn::Sequential model{nn::Linear(8, 16), nn::Tanh(), nn::Linear(16, 1)};
  torch::optim::SGD sgd{model->parameters(), /*lr=*/0.05};
  Training() { hvd::broadcast_parameters(model); }
};

/// One pass per step.
void whole_batches(Training& training) {
  hvd::DistributedOptimizer optimizer(training.sgd, training.model);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(training.model, rows_of_step(step)).backward();
    optimizer.step();
  }
}

/// For a fixed number of passes: the optimizer counts them and reduces the gradients in the last.
void counted_passes(Training& training) {
  hvd::DistributedOptimizer optimizer(training.sgd, training.model,
                                      {.backward_passes_per_step = kPasses});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (const torch::Tensor& rows : rows_of_step(step).chunk(kPasses)) {
      // The gradients of all passes are added up, so each pass contributes a part of the mean.
      (loss_of(training.model, rows) / kPasses).backward();
    }
    optimizer.step();
  }
}

/// For any number of passes: while a guard exists, gradients are not reduced.
void guarded_passes(Training& training) {
  hvd::DistributedOptimizer optimizer(training.sgd, training.model);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto batches = rows_of_step(step).chunk(kPasses);
    {
      const auto guard = optimizer.no_sync();
      for (int pass = 0; pass + 1 < kPasses; ++pass) {
        (loss_of(training.model, batches[pass]) / kPasses).backward();
      }
    }
    (loss_of(training.model, batches.back()) / kPasses).backward();
    optimizer.step();
  }
}

/// Trains a new model. @return its parameters in one row
torch::Tensor run(const char* name, void (*train)(Training&)) {
  torch::manual_seed(1);
  Training training;
  const std::uint64_t before = hvd::metrics().bytes;
  train(training);
  const std::uint64_t sent = hvd::metrics().bytes - before;
  const torch::Tensor loss = hvd::allreduce(loss_of(training.model, rows_of_step(kSteps)).detach());
  const bool equal = equal_on_ranks(training.model->parameters());
  if (hvd::rank() == 0) {
    std::printf("%-14s  loss %.5f, %.0f bytes reduced per step, weights %s on %d ranks\n", name,
                loss.item<double>(), static_cast<double>(sent) / kSteps,
                equal ? "equal" : "different", hvd::size());
  }
  return nn::utils::parameters_to_vector(training.model->parameters()).detach();
}

}  // namespace

int main() {
  hvd::init();
  const torch::Tensor whole = run("whole batches", whole_batches);
  const torch::Tensor counted = run("counted passes", counted_passes);
  const torch::Tensor guarded = run("guarded passes", guarded_passes);
  const auto difference = [&whole](const torch::Tensor& other) {
    return (whole - other).abs().max().item<double>();
  };
  const double largest = std::max(difference(counted), difference(guarded));
  if (hvd::rank() == 0) std::printf("the models differ by at most %.1e\n", largest);
  hvd::shutdown();
  return largest < 1e-4 ? 0 : 1;
}
