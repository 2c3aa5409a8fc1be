// A minimal data-parallel program. Every rank computes gradients of its own data, and all ranks
// make the same step with the sum of the gradients.
//   hvdrun -np 2 build/release/examples/minimal

#include <hvd/torch.h>

#include <cstdio>

namespace nn = torch::nn;

int main() {
  hvd::init();
  torch::manual_seed(1 + hvd::rank());  // weights and data differ by rank

  nn::Sequential model(nn::Linear(16, 32), nn::ReLU(), nn::Linear(32, 1));
  hvd::broadcast_parameters(model);  // now all ranks have rank 0's weights
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.05);

  const torch::Tensor weights = torch::linspace(-1, 1, 16).unsqueeze(1);
  for (int step = 0; step <= 100; ++step) {
    const torch::Tensor x = torch::randn({64, 16});
    const torch::Tensor y = x.mm(weights);

    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    hvd::scale_loss(loss).backward();      // loss / number of ranks
    hvd::all_reduce(model->parameters());  // adds up the gradients of all ranks
    optimizer.step();

    const torch::Tensor mean_loss = hvd::allreduce(loss.detach(), {.name = "loss"});
    if (step % 20 == 0 && hvd::rank() == 0) {
      std::printf("step %3d  loss %.4f\n", step, mean_loss.item<float>());
    }
  }

  const torch::Tensor flat = nn::utils::parameters_to_vector(model->parameters()).detach();
  const torch::Tensor smallest = hvd::allreduce(flat, {.op = hvd::ReduceOp::kMin});
  const torch::Tensor largest = hvd::allreduce(flat, {.op = hvd::ReduceOp::kMax});
  const bool identical = smallest.equal(largest);
  if (hvd::rank() == 0) {
    std::printf("weights are %s on %d ranks\n", identical ? "identical" : "different", hvd::size());
  }
  hvd::shutdown();
  return identical ? 0 : 1;
}
