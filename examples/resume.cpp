// Training that can be stopped at any step and resumed with the same losses, bit for bit, although
// workers load ahead and transforms and dropout are random. The second argument is the step to stop
// at; run the program again to resume.
//   hvdrun -np 2 build/release/examples/resume /tmp/checkpoints
//   hvdrun -np 2 build/release/examples/resume /tmp/checkpoints 7

#include <hvd/torch.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>

namespace nn = torch::nn;

namespace {

constexpr std::uint64_t kSeed = 1;
constexpr std::size_t kEpochs = 3;

/// Points on a spiral for each of two classes, computed on request.
class Spirals : public torch::data::datasets::Dataset<Spirals> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    const double angle = 0.04 * static_cast<double>(index / 2);
    const double sign = index % 2 == 0 ? 1 : -1;
    const torch::Tensor point = torch::tensor({std::cos(angle), std::sin(angle)}) * angle * sign;
    return {point.to(torch::kFloat32), torch::tensor(static_cast<std::int64_t>(index % 2))};
  }
  std::optional<std::size_t> size() const override { return 250; }
};

/// The generator depends on seed, epoch and sample, not on the worker.
torch::data::Example<> jitter(torch::data::Example<> example, at::Generator& generator) {
  example.data = example.data + 0.05 * torch::randn({2}, generator);
  return example;
}

void train(const char* folder, std::size_t stop_at) {
  hvd::RandomStreams(kSeed)
      .seed_default();  // for rank 0's weights, and for dropout, which differs by rank
  nn::Sequential model(nn::Linear(2, 32), nn::Tanh(), nn::Dropout(0.1), nn::Linear(32, 2));
  torch::optim::AdamW adamw(model->parameters(), /*lr=*/0.01);
  hvd::broadcast_parameters(model);
  hvd::DistributedOptimizer optimizer(adamw, model->named_parameters());
  auto loader = hvd::make_data_loader(
      Spirals().map(hvd::random_transform(&jitter)).map(torch::data::transforms::Stack<>()),
      {.batch_size = 16, .workers = 2, .seed = kSeed});

  std::size_t step = 0;
  hvd::TrainingState state;
  state.model(model).optimizer(optimizer).loader(*loader).random().value("step", step);
  hvd::load_checkpoint(folder, state);

  while (loader->epoch() < kEpochs) {
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      const torch::Tensor loss =
          nn::functional::cross_entropy(model->forward(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      ++step;
      const auto mean = hvd::allreduce(loss.detach(), {.name = "loss"}).item<float>();
      if (hvd::rank() == 0)
        std::printf("epoch %zu step %zu loss %.9g\n", loader->epoch(), step, mean);
      if (step % 10 == 0 || step == stop_at)
        hvd::save_checkpoint(folder, state, {.step = step, .keep = 2});
      if (step == stop_at) return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: resume FOLDER [STEP]\n");
    return 2;
  }
  hvd::init();
  train(argv[1], argc > 2 ? static_cast<std::size_t>(std::strtoull(argv[2], nullptr, 10)) : 0);
  hvd::shutdown();
  return 0;
}
