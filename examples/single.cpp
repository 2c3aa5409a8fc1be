// single.cpp trains on one process, distributed.cpp on any number of ranks. Their difference is
// what hvd needs:
//   diff examples/single.cpp examples/distributed.cpp
//   build/release/examples/single
//   hvdrun -np 2 build/release/examples/distributed
// If the number of ranks divides 64, each step uses the same 64 images in both, and both print the
// same numbers, up to roundings. The argument is the folder with the four idx files.

#include <torch/torch.h>

#include <cstdio>

#include "images.h"

namespace nn = torch::nn;

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : Images::kFolder;
  const Images train(folder, "train");
  const torch::data::Example<> test = Images(folder, "t10k").all();

  torch::manual_seed(1);
  nn::Sequential model(nn::Flatten(), nn::Linear(784, 64), nn::ReLU(), nn::Linear(64, 10));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(train, 64);

  for (int epoch = 1; epoch <= 2; ++epoch) {
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      nn::functional::cross_entropy(model->forward(batch.data), batch.target).backward();
      optimizer.step();
    }
    const torch::NoGradGuard no_grad;
    const torch::Tensor scores = model->forward(test.data);
    const auto loss = nn::functional::cross_entropy(scores, test.target).item<double>();
    const auto correct = scores.argmax(1).eq(test.target).to(torch::kFloat32).mean().item<double>();
    std::printf("epoch %d: test loss %.5f, accuracy %.4f\n", epoch, loss, correct);
  }
}
