// Batch normalization over the batches of all ranks, whose sizes differ. Rank 0's batch is too
// small for its own statistics.
//   hvdrun -np 2 build/release/examples/sync_batch_norm

#include <hvd/torch.h>

#include <cstdint>
#include <cstdio>

namespace nn = torch::nn;

int main() {
  hvd::init();
  torch::manual_seed(1 + hvd::rank());

  nn::Sequential model(nn::Linear(16, 32), nn::BatchNorm1d(32), nn::ReLU(), nn::Linear(32, 1));
  hvd::convert_sync_batchnorm(model);
  hvd::broadcast_parameters(model);
  torch::optim::SGD sgd(model->parameters(), /*lr=*/0.05);
  hvd::DistributedOptimizer optimizer(sgd, model->named_parameters());

  const torch::Tensor weights = torch::linspace(-1, 1, 16).unsqueeze(1);
  const std::int64_t samples = 2 + 16 * hvd::rank();
  for (int step = 0; step <= 100; ++step) {
    const torch::Tensor x = torch::randn({samples, 16});
    optimizer.zero_grad();
    const torch::Tensor loss = torch::mse_loss(model->forward(x), x.mm(weights));
    loss.backward();
    optimizer.step();

    const torch::Tensor mean_loss = hvd::allreduce(loss.detach(), {.name = "loss"});
    if (step % 20 == 0 && hvd::rank() == 0)
      std::printf("step %3d  loss %.4f\n", step, mean_loss.item<float>());
  }

  model->eval();  // needs no broadcast, since running statistics are equal on all ranks
  const torch::Tensor answer = model->forward(torch::ones({1, 16})).detach();
  const torch::Tensor answers = hvd::allgather(answer);
  const bool one_model = answers.eq(answers[0]).all().item<bool>();
  if (hvd::rank() == 0)
    std::printf("%d ranks evaluate %s\n", hvd::size(),
                one_model ? "one model" : "models that differ");
  hvd::shutdown();
  return one_model ? 0 : 1;
}
