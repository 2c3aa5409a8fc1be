// Trains on Fashion-MNIST in an elastic job: ranks may die and join while it runs, and the others
// go on with what they have learned. Each image of an epoch is used in one committed step.
//   hvdrun -np 4 --min-np 2 build/release/examples/mnist_elastic
// Kill one of the processes, and see the others go on. It also runs under 'hvdrun -np 2' and alone.
// Arguments: the folder of the images and the number of epochs.

#include <hvd/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "images.h"

namespace {

namespace nn = torch::nn;

/// Images of a step, on all ranks together: the training does not depend on their number.
constexpr std::int64_t kGlobalBatch = 128;
/// Steps from one printed loss to the next.
constexpr std::uint64_t kStepsPerLine = 10;

nn::Sequential make_model() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).stride(2)), nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 3).stride(2)), nn::ReLU(),
                        nn::Flatten(), nn::Dropout(0.2), nn::Linear(32 * 6 * 6, 10));
}

double test_accuracy(nn::Sequential& model, const Images& images) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const torch::data::Example<> all = images.all();
  const double accuracy =
      model->forward(all.data).argmax(1).eq(all.target).to(torch::kFloat64).mean().item<double>();
  model->train();
  return accuracy;
}

/// The mean loss of a step's images on all ranks. @param loss the mean over this rank's images
double mean_on_all_ranks(const torch::Tensor& loss, std::int64_t images) {
  const auto weight = static_cast<double>(images);
  const torch::Tensor sums =
      hvd::allreduce(torch::tensor({loss.item<double>() * weight, weight}, torch::kFloat64),
                     {.name = "loss", .op = hvd::ReduceOp::kSum});
  return (sums[0] / sums[1]).item<double>();
}

void train(const std::string& folder, std::size_t epochs) {
  if (std::getenv("OMP_NUM_THREADS") == nullptr) torch::set_num_threads(1);
  const Images images(folder, "train");
  const Images test(folder, "t10k");

  // Nothing here asks for a rank: a worker of an elastic job has none before run().
  torch::manual_seed(1);
  nn::Sequential model = make_model();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  hvd::DistributedOptimizer optimizer(sgd, model);
  auto loader =
      hvd::make_data_loader(images, {.global_batch = kGlobalBatch, .workers = 1, .seed = 1});

  // The state holds everything that a step changes. Dropout draws by seed, rank and step.
  hvd::elastic::TorchState state(model, optimizer);
  state.track("loader", *loader).random(1);
  state.on_change([&](const hvd::elastic::Change& change) {
    if (change.new_rank != 0) return;
    std::printf("step %llu: %d -> %d ranks\n", static_cast<unsigned long long>(state.commits()),
                change.old_size, change.new_size);
  });

  // Entered again after each change of the ranks, with the state of the last commit.
  hvd::elastic::run(state, [&] {
    while (loader->epoch() < epochs) {
      for (auto& batch : *loader) {
        optimizer.zero_grad();
        const std::int64_t images_here = batch.target.size(0);
        optimizer.set_weight(images_here);  // the ranks' batches may differ by an image
        const torch::Tensor loss =
            nn::functional::cross_entropy(model->forward(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        state.commit();
        if (state.commits() % kStepsPerLine != 0) continue;
        const double all = mean_on_all_ranks(loss, images_here);
        if (hvd::rank() == 0)
          std::printf("step %llu: loss %.4f\n", static_cast<unsigned long long>(state.commits()),
                      all);
      }
      if (hvd::rank() == 0)
        std::printf("epoch %zu: accuracy %.4f\n", loader->epoch(), test_accuracy(model, test));
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    hvd::init();
    train(argc > 1 ? argv[1] : Images::kFolder,
          argc > 2 ? static_cast<std::size_t>(std::max(1, std::atoi(argv[2]))) : 2);
    hvd::shutdown();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist_elastic: %s\n", error.what());
    return 1;
  }
}
