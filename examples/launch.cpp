// A program that starts its ranks itself. Each rank trains the same model on its own data, and the
// parent compares the losses that the ranks return.
//   build/release/examples/launch [RANKS]

#include <hvd/launch.h>
#include <hvd/torch.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace nn = torch::nn;

/// The result of one rank.
struct Outcome {
  int rank;
  double first_loss, last_loss;
  torch::Tensor weights;
};

Outcome train(int steps) {
  hvd::init();
  torch::manual_seed(1 + hvd::rank());
  nn::Sequential model(nn::Linear(16, 32), nn::ReLU(), nn::Linear(32, 1));
  hvd::broadcast_parameters(model);
  torch::optim::SGD sgd(model->parameters(), /*lr=*/0.05);
  hvd::DistributedOptimizer optimizer(sgd, *model);

  const torch::Tensor weights = torch::linspace(-1, 1, 16).unsqueeze(1);
  double first_loss = 0, last_loss = 0;
  for (int step = 0; step < steps; ++step) {
    const torch::Tensor x = torch::randn({64, 16});
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(x), x.mm(weights));
    loss.backward();
    optimizer.step();
    last_loss = loss.item<double>();
    if (step == 0) first_loss = last_loss;
  }
  return {hvd::rank(), first_loss, last_loss,
          nn::utils::parameters_to_vector(model->parameters()).detach()};
}

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  try {
    const std::vector<Outcome> all = hvd::launch(train, {.num_processes = ranks}, /*steps=*/100);
    bool identical = true;
    for (const Outcome& one : all) {
      std::printf("rank %d: loss %.4f, then %.4f\n", one.rank, one.first_loss, one.last_loss);
      identical = identical && one.weights.equal(all.front().weights);
    }
    std::printf("weights are %s on %d ranks\n", identical ? "identical" : "different", ranks);
    return identical ? 0 : 1;
  } catch (const hvd::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
