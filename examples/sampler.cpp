// Fits a line with LibTorch's own data loader and hvd's sampler, and checks that every sample was
// used. The sampler gives each rank its share of the samples, in a new order in every epoch.
// (hvd::make_data_loader, as in mnist and resume, needs no sampler and can resume in mid-epoch.)
//   hvdrun -np 2 build/release/examples/sampler

#include <hvd/torch.h>

#include <cstdint>
#include <cstdio>
#include <optional>

namespace {

constexpr std::int64_t kSamples = 1000;

/// Points of y = 3 x - 1, each with its number.
class Line : public torch::data::datasets::Dataset<Line> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    const torch::Tensor x = torch::tensor({static_cast<float>(index) / kSamples});
    return {torch::cat({x, torch::tensor({static_cast<float>(index)})}), 3 * x - 1};
  }
  std::optional<std::size_t> size() const override { return kSamples; }
};

/// @return whether every epoch used every sample
bool train() {
  torch::manual_seed(1);
  torch::nn::Linear model(1, 1);
  hvd::broadcast_parameters(model);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  hvd::DistributedOptimizer optimizer(sgd, model->named_parameters());

  hvd::DistributedSampler sampler(kSamples, {.seed = 1});
  auto loader =
      torch::data::make_data_loader(Line().map(torch::data::transforms::Stack<>()), sampler,
                                    torch::data::DataLoaderOptions().batch_size(16).workers(1));
  bool complete = true;
  for (std::size_t epoch = 0; epoch < 10; ++epoch) {
    sampler.set_epoch(epoch);  // a new order, also in the copy inside the loader
    torch::Tensor seen = torch::zeros({kSamples});
    hvd::Metric mean_loss("loss");
    for (auto& batch : *loader) {
      const torch::Tensor x = batch.data.narrow(1, 0, 1);
      seen.index_fill_(0, batch.data.select(1, 1).to(torch::kInt64), 1);
      optimizer.zero_grad();
      const torch::Tensor loss = torch::mse_loss(model->forward(x), batch.target);
      loss.backward();
      optimizer.step();
      mean_loss.update(loss, static_cast<double>(x.size(0)));
    }
    seen = hvd::allreduce(seen, {.name = "seen", .op = hvd::ReduceOp::kMax});
    complete = complete && seen.sum().item<std::int64_t>() == kSamples;
    const double loss = mean_loss.compute();
    if (hvd::rank() == 0) std::printf("epoch %zu  loss %.6f\n", epoch, loss);
  }
  return complete;
}

}  // namespace

int main() {
  hvd::init();
  const bool complete = train();
  if (hvd::rank() == 0) {
    std::printf("%d ranks used %s samples in every epoch\n", hvd::size(),
                complete ? "all" : "not all");
  }
  hvd::shutdown();
  return complete ? 0 : 1;
}
