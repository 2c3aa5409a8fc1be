// Trains the same network in float32, in bfloat16 and in float16, and compares the results. With
// float16, small gradients would become zero: a GradScaler multiplies the loss by a large number
// and divides the gradients by it. If that makes a gradient infinite on any rank, all ranks skip
// the step and the scale is halved.
//   hvdrun -np 2 build/release/examples/mixed_precision
// The argument is the folder with the four idx files.

#include <hvd/torch.h>

#include <cstdio>
#include <exception>

#include "equal_on_ranks.h"
#include "images.h"

namespace {

namespace nn = torch::nn;

constexpr int kSteps = 100;

void train(const Images& images, torch::ScalarType type) {
  const bool reduced = type != torch::kFloat32;
  const torch::Device device = hvd::device();  // this rank's GPU, or the CPU
  torch::manual_seed(1);
  nn::Sequential model(nn::Flatten(), nn::Linear(784, 64), nn::ReLU(), nn::Linear(64, 10));
  model->to(device);
  hvd::broadcast_parameters(model);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  hvd::DistributedOptimizer optimizer(sgd, model);
  // The default of init_scale is 2^16. Starting above it shows how steps are skipped.
  hvd::GradScaler scaler({.init_scale = 1 << 30, .enabled = type == torch::kFloat16});
  auto loader = hvd::make_data_loader(images, {.batch_size = 64 / hvd::size()});

  hvd::Metric mean_loss("mean loss");
  int step = 0, skipped = 0;
  while (step < kSteps) {
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        // Inside of the guard LibTorch computes layers in 16 bits. The parameters stay float32.
        const hvd::Autocast autocast(device, reduced ? type : torch::kBFloat16, reduced);
        const torch::Tensor scores = model->forward(batch.data.to(device)).to(torch::kFloat32);
        loss = nn::functional::cross_entropy(scores, batch.target.to(device));
      }
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);  // needed only to clip
      optimizer.clip_grad_norm_(5.0);
      if (!scaler.step(optimizer)) ++skipped;
      scaler.update();
      if (++step > kSteps / 2) mean_loss.update(loss);
      if (step == kSteps) break;
    }
  }

  const double loss = mean_loss.compute();
  const bool equal = equal_on_ranks(model->parameters());
  if (hvd::rank() != 0) return;
  std::printf("%-8s  loss %.4f, %d steps skipped, scale %.0f, weights %s on %d ranks\n",
              c10::toString(type), loss, skipped, scaler.get_scale(), equal ? "equal" : "different",
              hvd::size());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    hvd::init();
    const Images images(argc > 1 ? argv[1] : Images::kFolder, "train");
    for (const auto type : {torch::kFloat32, torch::kBFloat16, torch::kFloat16}) {
      train(images, type);
    }
    hvd::shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mixed_precision: %s\n", error.what());
    return 1;
  }
}
