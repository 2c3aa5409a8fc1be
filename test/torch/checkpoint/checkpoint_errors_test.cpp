#include <fstream>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/checkpoint/file_size_limit.h"

// A bad checkpoint is an error that names the cause on every rank. The state does not change, and
// the job continues.

namespace hvd::testing {
namespace {

using Act = std::function<void()>;

/// Checks that every rank gets the same error.
template <class E = CheckpointError>
std::string error_on_all(const Act& act) {
  const std::string own = message_of<E>(act);
  for (const std::string& other : allgather_object(own)) EXPECT_EQ(other, own);
  return own;
}

template <class Model>
std::string error_of_loading(const SharedFolder& folder, Model& model) {
  for (auto& tensor : model->parameters()) torch::NoGradGuard(), tensor.detach().fill_(rank());
  std::string error =
      error_on_all([&] { load_checkpoint(folder.path(), TrainingState().model(model)); });
  for (auto& tensor : model->parameters())
    EXPECT_TRUE((tensor == rank()).all().template item<bool>()) << "the state has changed";
  return error;
}

TEST(CheckpointErrors, AnotherModel) {
  const SharedFolder folder;
  const torch::nn::Sequential saved(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  save_checkpoint(folder.path(), TrainingState().model(saved));
  torch::nn::Sequential more(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2),
                             torch::nn::Linear(2, 2));
  EXPECT_TRUE(contains(error_of_loading(folder, more),
                       "'model': parameter '2.weight' of the model is not in the checkpoint"));
  torch::nn::Sequential fewer(torch::nn::Linear(4, 3));
  EXPECT_TRUE(contains(error_of_loading(folder, fewer),
                       "parameter '1.weight' of the checkpoint is not in the model"));
  torch::nn::Sequential wider(torch::nn::Linear(4, 3), torch::nn::Linear(3, 5));
  EXPECT_TRUE(
      contains(error_of_loading(folder, wider),
               "parameter '1.weight': expected Float [5,3], the checkpoint has Float [2,3]"));
  torch::nn::Sequential doubled(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  doubled->to(torch::kFloat64);
  EXPECT_TRUE(contains(error_of_loading(folder, doubled), "expected Double"));
}

// The model fits but is not loaded, since another item does not fit.
TEST(CheckpointErrors, AnotherOptimizerDataSetOrVariable) {
  const SharedFolder folder;
  torch::nn::Linear net(3, 3);
  torch::optim::Adam adam(net->parameters());
  DistributedSampler sampler(10);
  int epoch = 1;
  save_checkpoint(folder.path(), TrainingState().model(net).optimizer(adam).sampler(sampler).value(
                                     "epoch", epoch));
  const auto refuses = [&](TrainingState rest, const std::string& expected) {
    torch::NoGradGuard(), net->weight.detach().fill_(rank());
    const std::string error =
        error_on_all([&] { load_checkpoint(folder.path(), rest.model(net)); });
    EXPECT_TRUE(contains(error, expected)) << error;
    EXPECT_TRUE((net->weight == rank()).all().item<bool>());
  };
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::Adam part({net->weight});
  DistributedSampler larger(11);
  double real = 1;
  refuses(TrainingState().optimizer(sgd).sampler(sampler).value("epoch", epoch),
          "'optimizer': expected the checkpoint's torch::optim::Adam, got torch::optim::SGD");
  refuses(TrainingState().optimizer(part).sampler(sampler).value("epoch", epoch),
          "expected the checkpoint's 2 parameters, got 1");
  refuses(TrainingState().optimizer(adam).sampler(larger).value("epoch", epoch),
          "'sampler': DistributedSampler::load: expected the state of a data set of samples: 11");
  refuses(TrainingState().optimizer(adam).sampler(sampler).value("epoch", real),
          "'epoch': expected value d, the checkpoint has value i");
  refuses(TrainingState().optimizer(adam).sampler(sampler).value("epoch", epoch).value("x", real),
          "'x' is not in the checkpoint, which has model, optimizer, sampler, epoch");
  refuses(TrainingState().optimizer(adam).value("epoch", epoch),
          "the checkpoint has 'sampler' (sampler), which the state does not name");
  EXPECT_EQ(load_checkpoint(folder.path(), TrainingState().model(net), {.allow_unused = true}), 0U);
  EXPECT_FALSE((net->weight == rank()).all().item<bool>());
}

/// Damages every kind of file, as seen by the last rank.
TEST(CheckpointErrors, ADamagedFileIsNamedAndTheOneBeforeLoads) {
  int epoch = 0;
  const TrainingState state = TrainingState().value("epoch", epoch).random();
  const std::string last = "rank-" + std::to_string(size() - 1);
  const auto flip = [](const std::filesystem::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(20);
    const int byte = file.get();
    file.seekp(20);
    file.put(static_cast<char>(byte ^ 4));
  };
  const auto truncate = [](const std::filesystem::path& path) {
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  };
  const auto remove = [](const std::filesystem::path& path) { std::filesystem::remove(path); };
  struct Damage {
    std::string file;
    std::function<void(const std::filesystem::path&)> act;
    std::string error;
  };
  for (const Damage& damage :
       {Damage{"common", flip, "common is damaged: its checksum is wrong"},
        Damage{"common", truncate, "common is damaged: expected"},
        Damage{"common", remove, "common is missing"},
        Damage{last, flip, last + " is damaged: its checksum is wrong"},
        Damage{last, truncate, last + " is damaged: expected"},
        Damage{last, remove, last + " is missing"}, Damage{"manifest", flip, "manifest is damaged"},
        Damage{"manifest", truncate, "manifest is damaged"}}) {
    SCOPED_TRACE(damage.error);
    const SharedFolder folder;
    for (epoch = 1; epoch <= 2; ++epoch) save_checkpoint(folder.path(), state);
    if (rank() == 0) damage.act(folder.file(1, damage.file));
    barrier();
    epoch = -1;
    const std::string error = error_on_all([&] { load_checkpoint(folder.path(), state); });
    EXPECT_TRUE(contains(error, damage.error)) << error;
    EXPECT_EQ(epoch, -1);
    EXPECT_EQ(load_checkpoint(folder.path(), state, {.step = 0}), 0U);
    EXPECT_EQ(epoch, 1);
  }
}

TEST(CheckpointErrors, AnotherVersionOrNoSuchStep) {
  const SharedFolder folder;
  int epoch = 0;
  const TrainingState state = TrainingState().value("epoch", epoch);
  save_checkpoint(folder.path(), state);
  EXPECT_TRUE(contains(error_on_all([&] { load_checkpoint(folder.path(), state, {.step = 8}); }),
                       "no complete checkpoint of step 8"));
  if (rank() == 0) std::ofstream(folder.file(0, "manifest")) << "hvd-checkpoint 9\nnews\n";
  barrier();
  EXPECT_TRUE(contains(error_on_all([&] { load_checkpoint(folder.path(), state); }),
                       "expected a checkpoint of version 1 to 2, got version 9"));
}

TEST(CheckpointErrors, AFolderThatCannotBeWrittenTo) {
  const SharedFolder folder;
  if (rank() == 0) std::ofstream(folder.path() / "file") << "x";
  barrier();
  int epoch = 0;
  const std::string error = error_on_all([&] {
    save_checkpoint(folder.path() / "file" / "checkpoints", TrainingState().value("epoch", epoch));
  });
  EXPECT_TRUE(contains(error, "save_checkpoint: rank 0: ")) << error;
  EXPECT_TRUE(contains(error, "Not a directory")) << error;
}

TEST(CheckpointErrors, OneRankThatCannotWriteFailsAllAndTheOneBeforeStays) {
  const SharedFolder folder;
  int epoch = 1;
  const TrainingState state = TrainingState().value("epoch", epoch).random();
  save_checkpoint(folder.path(), state);
  epoch = 2;
  {
    const LimitOnLastRank limit;
    const std::string error =
        error_on_all([&] { save_checkpoint(folder.path(), state, {.keep = 1}); });
    EXPECT_TRUE(contains(error, "rank " + std::to_string(size() - 1) + ": cannot write")) << error;
    EXPECT_TRUE(contains(error, "File too large")) << error;
  }
  EXPECT_FALSE(std::filesystem::exists(folder.file(1, ""))) << "the failed step was not removed";
  epoch = 0;
  EXPECT_EQ(load_checkpoint(folder.path(), state), 0U);
  EXPECT_EQ(epoch, 1);
  EXPECT_EQ(save_checkpoint(folder.path(), state, {.keep = 1}), 1U);
}

TEST(CheckpointErrors, AStepThatIsNotTheNewest) {
  const SharedFolder folder;
  int epoch = 0;
  const TrainingState state = TrainingState().value("epoch", epoch);
  save_checkpoint(folder.path(), state, {.step = 10});
  EXPECT_TRUE(contains(error_on_all([&] { save_checkpoint(folder.path(), state, {.step = 10}); }),
                       "which has a checkpoint of step 10"));
}

TEST(CheckpointErrors, RanksWithDifferentArguments) {
  if (size() == 1) return;
  const SharedFolder folder;
  int epoch = 0;
  double loss = 0;
  const bool differs = rank() == size() - 1;
  const TrainingState state = TrainingState().value("epoch", epoch);
  TrainingState other = state;
  if (differs) other.value("loss", loss);
  const std::string names =
      error_on_all<MismatchError>([&] { save_checkpoint(folder.path(), other); });
  EXPECT_TRUE(contains(names, "has epoch (value int) for the step after the newest, rank"));
  const std::uint64_t step = differs ? 2 : 1;
  const std::string steps =
      error_on_all<MismatchError>([&] { save_checkpoint(folder.path(), state, {.step = step}); });
  EXPECT_TRUE(contains(steps, "step 1, rank " + std::to_string(size() - 1) + " has")) << steps;
  save_checkpoint(folder.path(), state);
  EXPECT_TRUE(contains(error_on_all<MismatchError>([&] { load_checkpoint(folder.path(), other); }),
                       "loss"));
  EXPECT_EQ(load_checkpoint(folder.path(), state), 0U);
}

TEST(CheckpointErrors, AModuleWithoutParameters) {
  const SharedFolder folder;
  torch::nn::Sequential empty{torch::nn::ReLU()};
  const TrainingState state = TrainingState().model(empty);
  const std::string error = error_on_all([&] { save_checkpoint(folder.path(), state); });
  EXPECT_TRUE(contains(error, "rank 0: the module torch::nn::SequentialImpl has no parameters"))
      << error;
  EXPECT_EQ(load_checkpoint(folder.path(), state), std::nullopt);
}

TEST(CheckpointErrors, SamplersWhoseEpochDiffersByRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const SharedFolder folder;
  DistributedSampler sampler(64);
  sampler.set_epoch(rank() == 1 ? 5 : 4);
  const TrainingState state = TrainingState().sampler(sampler);
  const std::string error =
      message_of<MismatchError>([&] { save_checkpoint(folder.path(), state); });
  EXPECT_TRUE(contains(error, "rank 0 has sampler (sampler, epoch 4 with ")) << error;
  EXPECT_TRUE(contains(error, "rank 1 has sampler (sampler, epoch 5 with ")) << error;
  EXPECT_EQ(load_checkpoint(folder.path(), state), std::nullopt) << "a checkpoint was written";
  sampler.set_epoch(4);
  save_checkpoint(folder.path(), state);
  sampler.set_epoch(static_cast<std::size_t>(rank()));
  EXPECT_TRUE(load_checkpoint(folder.path(), state).has_value());
  EXPECT_EQ(sampler.epoch(), 4U);
}

TEST(CheckpointErrors, WrongCalls) {
  int epoch = 0;
  EXPECT_THROW(TrainingState().value("", epoch), UsageError);
  EXPECT_THROW(TrainingState().value("epoch", epoch).value("epoch", epoch), UsageError);
  EXPECT_THROW(TrainingState().random(at::Generator(), "r"), UsageError);
  const SharedFolder folder;
  EXPECT_THROW(save_checkpoint(folder.path(), TrainingState(), {.keep = -1}), UsageError);
  const ProcessSet first = add_process_set({0});
  if (rank() != 0) {
    EXPECT_THROW(save_checkpoint(folder.path(), TrainingState(), {.process_set = first}),
                 UsageError);
    EXPECT_THROW(load_checkpoint(folder.path(), TrainingState(), {.process_set = first}),
                 UsageError);
  }
  remove_process_set(first);
}

}  // namespace
}  // namespace hvd::testing
