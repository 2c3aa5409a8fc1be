// Sends a tenth of each gradient: a gradient hook takes the numbers with the largest magnitude and
// keeps the rest for the next step (error feedback; Stich and others, "Sparsified SGD with
// Memory", 2018).
//   hvdrun -np 2 build/release/examples/gradient_hook
// The data are synthetic: random rows and a linear function of them.

#include <hvd/torch.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <tuple>

#include "equal_on_ranks.h"

namespace {

namespace nn = torch::nn;

/// Reduces the largest tenth of a bucket's gradients.
class TopTenth {
 public:
  /// Called once for each bucket and step, in the same order on every rank, while backward runs.
  std::function<torch::Tensor()> operator()(const hvd::BucketGradients& bucket) {
    torch::Tensor& kept = kept_[bucket.name];
    const torch::Tensor gradients = kept.defined() ? bucket.values + kept : bucket.values.clone();
    const std::int64_t count = (gradients.numel() + 9) / 10;
    const torch::Tensor largest = std::get<1>(gradients.abs().topk(count));
    hvd::Handle values =
        hvd::allgather_async(gradients.index_select(0, largest),
                             {.name = bucket.name + ".values", .process_set = bucket.process_set});
    hvd::Handle places = hvd::allgather_async(
        largest, {.name = bucket.name + ".places", .process_set = bucket.process_set});
    kept = gradients.index_fill(0, largest, 0);
    sent_ += count;
    all_ += gradients.numel();
    // Called by optimizer.step(): waits, and returns the mean over the ranks.
    return [values, places, like = bucket.values, ranks = bucket.process_set.size()] {
      return torch::zeros_like(like).index_add_(0, places.wait(), values.wait()).div_(ranks);
    };
  }

  double sent_fraction() const { return static_cast<double>(sent_) / static_cast<double>(all_); }

 private:
  std::map<std::string, torch::Tensor> kept_;
  std::int64_t sent_ = 0, all_ = 0;
};

}  // namespace

int main() {
  hvd::init();
  torch::manual_seed(1 + hvd::rank());
  nn::Sequential model(nn::Linear(64, 64), nn::Tanh(), nn::Linear(64, 1));
  hvd::broadcast_parameters(model);
  torch::optim::SGD sgd(model->parameters(), /*lr=*/0.05);
  TopTenth top_tenth;
  hvd::DistributedOptimizer optimizer(sgd, model, {.gradient_hook = std::ref(top_tenth)});

  const torch::Tensor weights = torch::linspace(-0.2, 0.2, 64).unsqueeze(1);
  for (int step = 0; step <= 400; ++step) {
    const torch::Tensor x = torch::randn({64, 64});
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(x), x.mm(weights));
    loss.backward();
    optimizer.step();
    const torch::Tensor mean_loss = hvd::allreduce(loss.detach(), {.name = "loss"});
    if (step % 100 == 0 && hvd::rank() == 0)
      std::printf("step %3d  loss %.4f\n", step, mean_loss.item<double>());
  }

  const bool equal = equal_on_ranks(model->parameters());
  if (hvd::rank() == 0)
    std::printf("%.1f %% of the gradients were sent, weights are %s on %d ranks\n",
                100 * top_tenth.sent_fraction(), equal ? "equal" : "different", hvd::size());
  hvd::shutdown();
  return equal ? 0 : 1;
}
