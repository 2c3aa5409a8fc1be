// Trains a model that Python has exported, and hands it back:
//   python examples/torchscript/export_model.py net.pt
//   hvdrun -np 2 build/release/examples/torchscript net.pt trained
//   python examples/torchscript/use_model.py trained.pt trained.safetensors
// It writes trained.pt (code and weights) and trained.safetensors (weights alone). A third argument
// is the folder with the four idx files.

#include <hvd/torch.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <string>

#include "images.h"

namespace {

constexpr int kSteps = 300;

torch::Tensor scores_of(torch::jit::Module& model, const torch::Tensor& images) {
  return model.forward({images.to(hvd::device())}).toTensor().cpu();
}

/// The fraction of images that are classified correctly. Each rank evaluates a part of the images.
/// Collective.
double accuracy(torch::jit::Module& model, const torch::data::Example<>& test) {
  const torch::NoGradGuard no_grad;
  model.eval();
  hvd::broadcast_buffers(model);  // BatchNorm has statistics of each rank's own batches
  const auto part = [](const torch::Tensor& all) {
    return all.slice(0, hvd::rank(), all.size(0), hvd::size());
  };
  hvd::Metric correct("correct");
  correct.update(
      scores_of(model, part(test.data)).argmax(1).eq(part(test.target)).to(torch::kFloat32));
  return correct.compute();
}

void run(const std::string& file, const std::string& result, const char* folder) {
  const Images train(folder, "train");
  torch::jit::Module model = torch::jit::load(file, hvd::device());
  hvd::broadcast_parameters(model);
  torch::optim::AdamW adamw(hvd::parameters_of(model), 2e-3);
  hvd::DistributedOptimizer optimizer(adamw, model);
  auto loader = hvd::make_data_loader(train, {.batch_size = 64 / hvd::size()});

  model.train();
  int step = 0;
  for (auto& batch : *loader) {
    optimizer.zero_grad();
    torch::cross_entropy_loss(scores_of(model, batch.data), batch.target).backward();
    optimizer.step();
    if (++step == kSteps) break;
  }

  const double share = accuracy(model, Images(folder, "t10k").all());
  if (hvd::rank() != 0) return;
  std::printf("test accuracy %.4f after %d steps\n", share, step);
  model.to(torch::kCPU);
  model.save(result + ".pt");
  hvd::save_safetensors(model, result + ".safetensors");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: torchscript MODEL.pt RESULT [FOLDER]\n");
    return 2;
  }
  try {
    hvd::init();
    run(argv[1], argv[2], argc > 3 ? argv[3] : Images::kFolder);
    hvd::shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "torchscript: %s\n", error.what());
    return 1;
  }
}
