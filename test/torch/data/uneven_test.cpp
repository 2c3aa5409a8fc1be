#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "torch/support/torch_test.h"

// Epochs in which some ranks have more batches than others, with join(state).

namespace hvd::testing {
namespace {

namespace data = torch::data;

/// Inputs and targets that are computed from the index.
class IndexedSamples : public data::datasets::Dataset<IndexedSamples> {
 public:
  explicit IndexedSamples(std::size_t size) : size_(size) {}
  data::Example<> get(std::size_t index) override {
    const torch::Tensor x = torch::sin(torch::arange(1, 5) * (static_cast<double>(index) + 1));
    return {x, torch::stack({x.sum(), x.prod()})};
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

constexpr std::int64_t kBatch = 2;

/// The first of several ranks has one batch more.
std::size_t uneven_size() { return static_cast<std::size_t>(6 * size() + 1); }

auto uneven_loader() {
  return make_data_loader(
      IndexedSamples(uneven_size()).map(data::transforms::Stack<>()),
      {.batch_size = kBatch, .workers = 2, .seed = 4, .remainder = Remainder::kUneven});
}

/// The mean loss of the ranks that have a batch in this step of this epoch; undefined if there is
/// no such rank.
torch::Tensor serial_loss(Net& net, std::size_t epoch, std::size_t step) {
  IndexedSamples samples(uneven_size());
  torch::Tensor sum;
  int have = 0;
  for (int r = 0; r < size(); ++r) {
    libtorch::LoaderProgress progress(uneven_size(), {.seed = 4, .remainder = Remainder::kUneven},
                                      static_cast<std::size_t>(r),
                                      static_cast<std::size_t>(size()));
    progress.set_epoch(epoch);
    const auto own = progress.samples();
    std::vector<torch::Tensor> x, y;
    for (std::size_t i = step * kBatch; i < std::min(own.size(), (step + 1) * kBatch); ++i) {
      const auto example = samples.get(own[i]);
      x.push_back(example.data);
      y.push_back(example.target);
    }
    if (x.empty()) continue;
    const torch::Tensor loss = torch::mse_loss(net->forward(torch::stack(x)), torch::stack(y));
    sum = have++ == 0 ? loss : sum + loss;
  }
  return have == 0 ? torch::Tensor() : sum / have;
}

TEST(Uneven, TrainingEqualsOneProcessThatAveragesOverTheRanksWithData) {
  torch::manual_seed(3);
  Net net = same_net();
  Net serial;
  copy_values(*net, *serial);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD reference(serial->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), {.check_every = 1});
  auto loader = uneven_loader();
  TrainingState state;
  state.model(net).optimizer(optimizer).loader(*loader);
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    int steps = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch.data), batch.target).backward();
      optimizer.step();
      ++steps;
    }
    EXPECT_EQ(steps, rank() == 0 ? 4 : 3);
    EXPECT_EQ(join(state), 0);
    EXPECT_EQ(loader->epoch(), epoch + 1);
    for (std::size_t step = 0;; ++step) {
      const torch::Tensor loss = serial_loss(serial, epoch, step);
      if (!loss.defined()) break;
      reference.zero_grad();
      loss.backward();
      reference.step();
    }
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(near(item.value(), serial->named_parameters()[item.key()], 1e-5)) << item.key();
}

TEST(Uneven, JoinGivesEveryRankTheStateOfTheLast) {
  torch::manual_seed(3 + rank());
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
  broadcast_parameters(net);
  DistributedOptimizer optimizer(adam, net->named_parameters());
  GradScaler scaler({.init_scale = 4, .growth_interval = 1});
  std::vector<int> history;
  auto own = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(rank()));
  auto loader = make_data_loader(IndexedSamples(64), {});
  TrainingState state;
  state.model(net).optimizer(optimizer).scaler(scaler).loader(*loader);
  state.random(own, "own").value("history", history);
  auto batch = loader->begin();
  for (int step = 0; step < 2 + rank(); ++step) {  // the last rank has the most
    EXPECT_EQ(batch->size(), 1U);
    ++batch;
    optimizer.zero_grad();
    scaler.scale(net->forward(rank_tensor(rank(), {5, 4}, torch::kFloat32, step)).square().mean())
        .backward();
    scaler.step(optimizer);
    scaler.update();
    history.push_back(100 * rank() + step);
  }
  const int last = size() - 1;
  const double scale = scaler.get_scale();
  const torch::Tensor stream = own.get_state().clone();
  const auto buffers = [&] {
    std::vector<torch::Tensor> tensors;
    for (const auto& buffer : net->buffers()) tensors.push_back(buffer.clone());
    return tensors;
  };
  const std::vector<torch::Tensor> before = buffers();
  EXPECT_EQ(join(state), last);
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  EXPECT_TRUE(same_on_all_ranks(buffers()));
  EXPECT_EQ(scaler.get_scale(), 4.0 * static_cast<double>(1 << (2 + last)));
  EXPECT_EQ(history.size(), static_cast<std::size_t>(2 + last));
  EXPECT_EQ(history.front(), 100 * last);
  EXPECT_EQ(loader->samples_used(), static_cast<std::size_t>((2 + last) * size()));
  EXPECT_TRUE(own.get_state().equal(stream));
  for (const auto& group : adam.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& kept = static_cast<const torch::optim::AdamParamState&>(
          *adam.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_EQ(kept.step(), 2 + last);
      EXPECT_TRUE(same_on_all_ranks({kept.exp_avg(), kept.exp_avg_sq()}));
    }
  }
  if (rank() == last) {  // its scale must be unchanged
    EXPECT_EQ(scaler.get_scale(), scale);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].equal(buffers()[i]));
  }
}

TEST(Uneven, StatesThatDifferAreNamedOnEveryRankAndTheJobGoesOn) {
  if (size() < 2) GTEST_SKIP() << "needs two ranks";
  int epoch = rank(), step = 7;
  TrainingState state;
  state.value("epoch", epoch);
  if (rank() == 1) state.value("step", step);
  EXPECT_PRED2(contains, message_of<MismatchError>([&] { join(state); }), "step (value");
  EXPECT_EQ(epoch, rank());

  // The items' names agree, but rank 1 cannot load the others' loader.
  const ProcessSet odd = add_process_set({1});
  std::vector<int> others;
  for (int r = 0; r < size(); ++r) {
    if (r != 1) others.push_back(r);
  }
  const ProcessSet rest = add_process_set(others);
  auto loader = make_data_loader(IndexedSamples(rank() == 1 ? 9 : 8),
                                 {.process_set = rank() == 1 ? odd : rest});
  TrainingState loaders;
  loaders.loader(*loader);
  // Rank 0 joins last, since the sum is not complete before rank 1 has joined.
  if (rank() == 0) allreduce(torch::ones({}), {.name = "all but those that have joined"});
  const auto act = [&] { join(loaders); };
  const std::string error =
      rank() == 1 ? message_of<UsageError>(act) : message_of<MismatchError>(act);
  EXPECT_PRED2(contains, error, "expected a state of 9 samples");
  remove_process_set(rest);
  remove_process_set(odd);
}

}  // namespace
}  // namespace hvd::testing
