#include <gmock/gmock.h>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/state_item.h"
#include "state/optimizer_state.h"
#include "torch/checkpoint/checkpoint_job.h"

// The files of a checkpoint: their sizes, which ranks read them, and those of older versions.

namespace hvd::testing {
namespace {

/// Counts the opened files and the bytes that are read.
class CountingCalls final : public libtorch::FileCalls {
 public:
  std::int64_t opened = 0, bytes = 0;

  int open(const std::string& path, int flags, mode_t mode) override {
    ++opened;
    return FileCalls::open(path, flags, mode);
  }
  ssize_t read(int file, void* data, std::size_t count) override {
    const ssize_t got = FileCalls::read(file, data, count);
    if (got > 0) bytes += got;
    return got;
  }
};

constexpr std::int64_t kWidth = 512;

torch::nn::Linear wide_layer() {
  torch::manual_seed(3);
  return torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
}

template <class Wrapper, class Options>
struct WideTraining {
  torch::nn::Linear net = wide_layer();
  torch::optim::Adam adam{net->parameters(), torch::optim::AdamOptions(0.01)};
  Wrapper optimizer;
  int epoch = 0;

  explicit WideTraining(const ProcessSet& set)
      : optimizer(adam, net, Options{.process_set = set}) {}
  void step() {
    optimizer.zero_grad();
    net->forward(torch::ones({2, kWidth})).square().mean().backward();
    optimizer.step();
  }
  TrainingState state() {
    return TrainingState().model(net).optimizer(optimizer).random().value_per_rank("epoch", epoch);
  }
};
using WholeTraining = WideTraining<DistributedOptimizer, DistributedOptimizerOptions>;
using ShardedTraining = WideTraining<ShardedOptimizer, ShardedOptimizerOptions>;

std::int64_t sum_of(std::int64_t value) {
  return allreduce(torch::tensor(value), {.op = ReduceOp::kSum}).item<std::int64_t>();
}

/// Saves on the ranks of one set and loads on those of another.
template <class Training>
void check_reads(const ProcessSet& from, const ProcessSet& to) {
  const SharedFolder folder;
  if (from.included()) {
    Training training(from);
    training.step();
    save_checkpoint(folder.path(), training.state(), {.step = 4, .process_set = from});
  }
  barrier();
  std::int64_t files = 0, size = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder.file(4, ""))) {
    ++files;
    size += static_cast<std::int64_t>(file.file_size());
  }
  EXPECT_EQ(files, from.size() + 2);
  CountingCalls calls;
  if (to.included()) {
    Training training(to);
    training.step();
    const torch::Tensor saved = training.net->weight.detach().clone();
    training.step();
    libtorch::CheckpointReader reader(folder.path(), {to, "reader"}, calls);
    EXPECT_EQ(reader.load(training.state(), std::nullopt, false), 4U);
    EXPECT_TRUE(torch::equal(training.net->weight, saved));
  }
  EXPECT_EQ(sum_of(calls.opened), files) << "some rank reads a file that another one has read";
  EXPECT_EQ(sum_of(calls.bytes), size);
}

TEST(CheckpointFiles, AreReadByOneRankEachAtAnyNumberOfRanks) {
  const ProcessSet first = add_process_set({0});
  for (const auto& [from, to] : {std::pair(ProcessSet(), ProcessSet()),
                                 std::pair(ProcessSet(), first), std::pair(first, ProcessSet())}) {
    check_reads<WholeTraining>(from, to);
    check_reads<ShardedTraining>(from, to);
  }
  remove_process_set(first);
}

TEST(CheckpointFiles, EachRankWritesItsShareOfReplicatedTensors) {
  const SharedFolder folder;
  WholeTraining training{ProcessSet()};
  training.step();
  save_checkpoint(folder.path(), training.state(), {.step = 1});
  constexpr std::uintmax_t kTensors = 3 * sizeof(float) * kWidth * kWidth;
  constexpr std::uintmax_t kBesides = 32 << 10;
  const std::uintmax_t common = std::filesystem::file_size(folder.file(1, "common"));
  if (size() == 1) {
    EXPECT_GE(common, kTensors);
    return;
  }
  EXPECT_LT(common, kBesides);
  const std::uintmax_t share = kTensors / static_cast<std::uintmax_t>(size());
  for (int r = 0; r < size(); ++r) {
    const auto bytes = std::filesystem::file_size(folder.file(1, "rank-" + std::to_string(r)));
    EXPECT_GE(bytes, share) << r;
    EXPECT_LT(bytes, share + kBesides) << r;
  }
}

/// The model differs on the last rank, so the first rank writes all of its own.
TEST(CheckpointFiles, TensorsThatDifferBetweenRanksAreTheFirstRanks) {
  const SharedFolder folder;
  torch::nn::Linear net = wide_layer();
  const torch::Tensor expected = net->weight.detach().clone();
  {
    const torch::NoGradGuard no_grad;
    if (size() > 1 && rank() == size() - 1) net->weight.view({-1})[kWidth * kWidth - 1].neg_();
  }
  save_checkpoint(folder.path(), TrainingState().model(net), {.step = 1});
  EXPECT_GE(std::filesystem::file_size(folder.file(1, "common")), expected.nbytes());
  load_checkpoint(folder.path(), TrainingState().model(net));
  EXPECT_TRUE(torch::equal(net->weight, expected));
}

/// The bytes of one item, without borrowed tensors.
std::string bytes_of(const libtorch::StateItem& item) {
  libtorch::ObjectWriter writer;
  item.encode(writer);
  return writer.take();
}

// Version 1: all replicated state is in one file, and an optimizer is LibTorch's archive.
TEST(CheckpointFiles, OfTheFirstVersionAreLoaded) {
  const SharedFolder folder;
  WholeTraining training{ProcessSet()};
  training.step();
  training.step();
  const torch::Tensor weight = training.net->weight.detach().clone();
  const auto moment = [&] {
    const auto& state = *training.adam.state().at(training.net->weight.unsafeGetTensorImpl());
    return static_cast<const torch::optim::AdamParamState&>(state).exp_avg().clone();
  };
  const torch::Tensor expected = moment();
  if (rank() == 0) {
    using Table = std::vector<std::tuple<std::string, std::string, std::uint64_t>>;
    const std::string model = bytes_of(libtorch::ModuleItem(*training.net));
    libtorch::ObjectWriter optimizer;
    libtorch::ObjectCodec<libtorch::OptimizerLayout>::write(optimizer,
                                                            libtorch::layout_of(training.adam));
    optimizer.string([&] { libtorch::save_optimizer(training.adam, optimizer); });
    const std::string archive = optimizer.take();
    const std::string common =
        libtorch::encode_object(
            Table{{"model", "model", model.size()}, {"optimizer", "optimizer", archive.size()}}) +
        model + archive;
    libtorch::CheckpointFolder files(folder.path());
    files.begin(3);
    const auto write = [&](const std::string& name, const std::string& bytes) {
      return files.write(3, name, [&](const libtorch::ByteSink& sink) { sink(bytes); });
    };
    const std::string none = libtorch::encode_object(Table{});
    libtorch::Manifest manifest{.step = 3, .files = {write("common", common)}};
    for (const std::string name : {"rank-0", "rank-1"}) manifest.files.push_back(write(name, none));
    EXPECT_TRUE(manifest.encode().starts_with("hvd-checkpoint 1\n"));
    files.commit(manifest);
  }
  barrier();
  training.step();
  EXPECT_FALSE(torch::equal(training.net->weight, weight));
  EXPECT_EQ(load_checkpoint(folder.path(),
                            TrainingState().model(training.net).optimizer(training.optimizer)),
            3U);
  EXPECT_TRUE(torch::equal(training.net->weight, weight));
  EXPECT_TRUE(torch::equal(moment(), expected));
}

}  // namespace
}  // namespace hvd::testing
