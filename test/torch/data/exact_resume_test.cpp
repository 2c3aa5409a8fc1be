#include <sstream>
#include <utility>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/support/torch_test.h"

// Training that is interrupted after any step and resumed equals uninterrupted training bit for
// bit.

namespace hvd::testing {
namespace {

namespace data = torch::data;

/// A regression problem whose samples are computed from their indices.
class Samples : public data::datasets::Dataset<Samples> {
 public:
  explicit Samples(std::size_t size) : size_(size) {}
  data::Example<> get(std::size_t index) override {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(index);
    const torch::Tensor x = torch::randn({4}, generator);
    return {x, torch::stack({x.sum().sin(), x.prod()})};
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

data::Example<> with_noise(data::Example<> example, at::Generator& generator) {
  example.data = example.data + 0.1 * torch::randn({4}, generator);
  return example;
}

constexpr std::size_t kEpochs = 2;
constexpr std::size_t kSamples = 61;

auto dataset() {
  return Samples(kSamples).map(random_transform(&with_noise)).map(data::transforms::Stack<>());
}

/// The state that a program saves.
struct Saved {
  std::string model, optimizer, loader;
};

template <class T>
std::string saved(const T& object) {
  torch::serialize::OutputArchive archive;
  object.save(archive);
  std::stringstream stream;
  archive.save_to(stream);
  return stream.str();
}

template <class T>
void load(T& object, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  object.load(archive);
}

class Training {
 public:
  explicit Training(DataLoaderOptions options) : loader_(make_data_loader(dataset(), options)) {
    broadcast_parameters(net_);
  }
  Training(DataLoaderOptions options, const Saved& saved) : Training(std::move(options)) {
    load(*net_, saved.model);
    load(adam_, saved.optimizer);
    load(*loader_, saved.loader);
  }

  /// Trains to the end. @return this rank's losses
  std::vector<double> run(std::vector<Saved>* after_each_step = nullptr) {
    std::vector<double> losses;
    DistributedOptimizer optimizer(adam_, net_->named_parameters());
    while (loader_->epoch() < kEpochs) {
      for (auto& batch : *loader_) {
        optimizer.zero_grad();
        const torch::Tensor loss = torch::mse_loss(net_->forward(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        losses.push_back(loss.item<double>());
        if (after_each_step != nullptr)
          after_each_step->push_back({saved(*net_), saved(adam_), saved(*loader_)});
      }
    }
    return losses;
  }
  std::vector<torch::Tensor> parameters() const { return net_->parameters(); }

 private:
  Net net_;
  torch::optim::Adam adam_{net_->parameters(), torch::optim::AdamOptions(0.01)};
  std::unique_ptr<DataLoader<decltype(dataset())>> loader_;
};

TEST(ExactResume, AfterAnyStepIsTheRunThatWasNotInterrupted) {
  torch::manual_seed(10 + rank());
  const DataLoaderOptions options{.batch_size = 5, .workers = 2, .seed = 3};
  Training whole(options);
  std::vector<Saved> states;
  const std::vector<double> losses = whole.run(&states);
  ASSERT_EQ(states.size(), losses.size());
  const auto per_epoch =
      (kSamples + static_cast<std::size_t>(size()) - 1) / static_cast<std::size_t>(size());
  ASSERT_EQ(losses.size(), kEpochs * ((per_epoch + 4) / 5));
  for (std::size_t step = 0; step < states.size(); ++step) {
    DataLoaderOptions other = options;
    other.workers = static_cast<std::int64_t>(step % 4);
    Training resumed(other, states[step]);
    const std::vector<double> rest = resumed.run();
    ASSERT_EQ(rest.size(), losses.size() - step - 1);
    for (std::size_t i = 0; i < rest.size(); ++i)
      EXPECT_EQ(rest[i], losses[step + 1 + i]) << "resumed after " << step << ", step " << i;
    for (std::size_t i = 0; i < whole.parameters().size(); ++i)
      EXPECT_TRUE(resumed.parameters()[i].equal(whole.parameters()[i])) << "after " << step;
  }
}

TEST(ExactResume, SeedsChangeTheSamples) {
  torch::manual_seed(10 + rank());
  const DataLoaderOptions options{.batch_size = 5, .seed = 3};
  Training first(options);
  std::vector<Saved> states;
  const std::vector<double> losses = first.run(&states);
  DataLoaderOptions other = options;
  other.seed = 4;
  EXPECT_THROW(Training(other, states.front()), UsageError);
  Saved mixed = states.front();
  mixed.loader = saved(*make_data_loader(dataset(), other));
  Training second(other, mixed);
  EXPECT_NE(second.run().back(), losses.back());
}

/// Uses dropout, whose random stream differs by rank, and a checkpoint of the complete state.
struct TrainingWithDropout {
  torch::nn::Sequential net{torch::nn::Linear(4, 8), torch::nn::Dropout(0.3),
                            torch::nn::Linear(8, 2)};
  torch::optim::SGD sgd{net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)};
  DistributedOptimizer optimizer{sgd, net->named_parameters()};
  std::unique_ptr<DataLoader<decltype(dataset())>> loader;

  explicit TrainingWithDropout(std::uint64_t seed = 8)
      : loader(make_data_loader(dataset(), {.batch_size = 4, .workers = 3, .seed = seed})) {}
  TrainingState state() {
    return TrainingState().model(net).optimizer(optimizer).loader(*loader).random();
  }
  std::vector<double> train(const std::function<void(std::size_t)>& after_step = {}) {
    std::vector<double> losses;
    while (loader->epoch() < kEpochs) {
      for (auto& batch : *loader) {
        optimizer.zero_grad();
        const torch::Tensor loss = torch::mse_loss(net->forward(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        losses.push_back(loss.item<double>());
        if (after_step) after_step(losses.size());
      }
    }
    return losses;
  }
};

TEST(ExactResume, FromACheckpointInMidEpochWithDropoutAndWorkers) {
  const SharedFolder folder;
  torch::manual_seed(20 + rank());
  TrainingWithDropout whole;
  broadcast_parameters(whole.net);
  const auto losses = whole.train([&](std::size_t step) {
    if (step % 3 == 0) save_checkpoint(folder.path(), whole.state(), {.step = step});
  });
  for (std::size_t step = 3; step <= losses.size(); step += 3) {
    torch::manual_seed(1);
    TrainingWithDropout resumed;
    EXPECT_EQ(load_checkpoint(folder.path(), resumed.state(), {.step = step}), step);
    const auto rest = resumed.train();
    ASSERT_EQ(rest.size(), losses.size() - step);
    for (std::size_t i = 0; i < rest.size(); ++i)
      EXPECT_EQ(rest[i], losses[step + i]) << "resumed after " << step << ", step " << i;
    for (std::size_t i = 0; i < whole.net->parameters().size(); ++i)
      EXPECT_TRUE(resumed.net->parameters()[i].equal(whole.net->parameters()[i]));
  }
  TrainingWithDropout other(9);
  EXPECT_PRED2(contains, message_of<CheckpointError>([&] {
                 load_checkpoint(folder.path(), other.state(), {.step = 3});
               }),
               "61 samples shuffled with seed 8");
  EXPECT_EQ(other.loader->samples_used(), 0U);
}

}  // namespace
}  // namespace hvd::testing
