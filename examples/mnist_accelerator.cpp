// Trains a small network on MNIST or Fashion-MNIST with hvd::Accelerator. The same program runs on
// one CPU, on N CPUs and on GPUs:
//   build/release/examples/mnist_accelerator
//   hvdrun -np 2 build/release/examples/mnist_accelerator
// Arguments: the folder with the four idx files, and the number of epochs.

#include <hvd/accelerator.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include "images.h"

namespace {

namespace nn = torch::nn;

struct NetImpl : nn::Module {
  nn::Conv2d conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 8, 3).stride(2)));
  nn::Conv2d conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(8, 16, 3).stride(2)));
  nn::Linear fc = register_module("fc", nn::Linear(576, 10));

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv2(torch::relu(conv1(x))));
    return torch::log_softmax(fc(x.flatten(1)).to(torch::kFloat32), 1);
  }
};
TORCH_MODULE(Net);

void run(const std::filesystem::path& folder, std::size_t epochs) {
  hvd::Accelerator accelerator(
      {.mixed_precision = hvd::Precision::kBF16, .gradient_accumulation_steps = 2});
  torch::manual_seed(1);
  auto train = hvd::loader(Images(folder, "train"), {.batch_size = 32});
  auto test = hvd::loader(Images(folder, "t10k"), {.batch_size = 256, .shuffle = false});
  Net net;
  torch::optim::AdamW adamw(net->parameters(), 1e-3);
  torch::optim::StepLR schedule(adamw, 1000, 0.9);
  auto [model, optimizer, train_loader, test_loader, scheduler] =
      accelerator.prepare(net, adamw, train, test, schedule);

  while (train_loader->epoch() < epochs) {
    model->train();
    for (auto& batch : *train_loader) {
      auto step = accelerator.accumulate();
      torch::Tensor loss;
      {
        auto autocast = accelerator.autocast();
        loss = torch::nll_loss(model->forward(batch.data), batch.target);
      }
      accelerator.backward(loss);
      accelerator.clip_grad_norm_(1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }

    model->eval();
    const torch::NoGradGuard no_grad;
    std::int64_t correct = 0, images = 0;
    for (auto& batch : *test_loader) {
      auto predicted = model->forward(batch.data).argmax(1);
      auto [all_predicted, all_labels] = accelerator.gather_for_metrics(predicted, batch.target);
      correct += all_predicted.eq(all_labels).sum().item<std::int64_t>();
      images += all_labels.size(0);
    }
    if (accelerator.is_main_process()) {
      std::printf("epoch %zu: accuracy %.4f on %lld images\n", train_loader->epoch(),
                  static_cast<double>(correct) / static_cast<double>(images),
                  static_cast<long long>(images));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : Images::kFolder, argc > 2 ? std::stoul(argv[2]) : 1);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist_accelerator: %s\n", error.what());
    return 1;
  }
}
