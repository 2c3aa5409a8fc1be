// A generative adversarial network: two models, each with an optimizer of its own, train in turns.
// The generator learns to draw numbers from the normal distribution with mean 3 and deviation 0.5.
//   hvdrun -np 2 build/release/examples/gan

#include <hvd/torch.h>

#include <cstdint>
#include <cstdio>

#include "equal_on_ranks.h"

namespace nn = torch::nn;

int main() {
  constexpr std::int64_t kBatch = 64, kNoise = 4;
  hvd::init();
  hvd::RandomStreams(/*seed=*/1).seed_default();  // other numbers on every rank

  nn::Sequential generator(nn::Linear(kNoise, 32), nn::ReLU(), nn::Linear(32, 1));
  nn::Sequential discriminator(nn::Linear(1, 32), nn::LeakyReLU(), nn::Linear(32, 1));
  hvd::broadcast_parameters(generator);
  hvd::broadcast_parameters(discriminator);
  const auto options = torch::optim::AdamOptions(2e-3).betas({0.5, 0.9});
  torch::optim::Adam generator_adam(generator->parameters(), options);
  torch::optim::Adam discriminator_adam(discriminator->parameters(), options);
  hvd::DistributedOptimizer generator_optimizer(generator_adam, generator);
  hvd::DistributedOptimizer discriminator_optimizer(discriminator_adam, discriminator);

  const auto loss_of = [](const torch::Tensor& scores, double label) {
    return nn::functional::binary_cross_entropy_with_logits(scores,
                                                            torch::full_like(scores, label));
  };
  for (int step = 1; step <= 800; ++step) {
    // The sum of both losses needs one backward pass. This also removes the gradients that the
    // generator's backward pass of the previous step has left in the discriminator.
    discriminator_optimizer.zero_grad();
    const torch::Tensor real = 3 + 0.5 * torch::randn({kBatch, 1});
    const torch::Tensor fake = generator->forward(torch::randn({kBatch, kNoise}));
    torch::Tensor loss = loss_of(discriminator->forward(real), 1) +
                         loss_of(discriminator->forward(fake.detach()), 0);
    loss.backward();
    discriminator_optimizer.step();

    generator_optimizer.zero_grad();
    torch::Tensor generator_loss = loss_of(discriminator->forward(fake), 1);
    generator_loss.backward();
    generator_optimizer.step();

    if (step % 200 == 0) {
      const torch::Tensor means =
          hvd::allreduce(torch::stack({loss, generator_loss}).detach(), {.name = "losses"});
      if (hvd::rank() == 0)
        std::printf("step %d  discriminator's loss %.3f, generator's loss %.3f\n", step,
                    means[0].item<double>(), means[1].item<double>());
    }
  }

  const torch::NoGradGuard no_grad;
  const torch::Tensor samples =
      hvd::allgather(generator->forward(torch::randn({4000 / hvd::size(), kNoise})));
  const bool equal =
      equal_on_ranks(generator->parameters()) && equal_on_ranks(discriminator->parameters());
  if (hvd::rank() == 0)
    std::printf("generated: mean %.2f, deviation %.2f; both models are %s on %d ranks\n",
                samples.mean().item<double>(), samples.std().item<double>(),
                equal ? "equal" : "different", hvd::size());
  hvd::shutdown();
  return equal ? 0 : 1;
}
