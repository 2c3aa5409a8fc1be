#include <gmock/gmock.h>

#include <set>

#include "torch/checkpoint/checkpoint_job.h"

// Saves and loads a program's state at the same and at another number of ranks.

namespace hvd::testing {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Checkpoint, BringsBackEverythingBitForBit) {
  const SharedFolder folder;
  torch::manual_seed(17 + rank());
  Program program;
  broadcast_parameters(program.net);
  program.sampler.set_epoch(2);
  program.epoch = 2;
  for (int i = 0; i < 3; ++i) program.train();
  program.losses = broadcast_object(program.losses);  // all ranks load the first rank's
  broadcast_buffers(program.net);
  program.adam.param_groups()[1].options().set_lr(0.125);
  EXPECT_EQ(save_checkpoint(folder.path(), program.state(), {.step = 42}), 42U);
  const auto before = program.everything();

  for (int i = 0; i < 2; ++i) program.train();
  program.epoch = 9;
  program.adam.param_groups()[1].options().set_lr(7);
  EXPECT_NE(program.everything(), before);
  EXPECT_EQ(load_checkpoint(folder.path(), program.state()), 42U);
  EXPECT_EQ(program.everything(), before);

  Program fresh;
  torch::manual_seed(1);
  EXPECT_EQ(load_checkpoint(folder.path(), fresh.state()), 42U);
  EXPECT_EQ(fresh.everything(), before);
}

// Dropout uses the rank's own random stream; the batches are the sampler's.
TEST(Checkpoint, AResumedRunIsTheUninterruptedOneBitForBit) {
  const SharedFolder folder;
  std::vector<std::string> uninterrupted;
  {
    torch::manual_seed(5 + rank());
    Program program;
    broadcast_parameters(program.net);
    for (int i = 0; i < 3; ++i) program.train();
    program.losses.clear();
    broadcast_buffers(program.net);
    save_checkpoint(folder.path(), program.state());
    for (int i = 0; i < 3; ++i) program.train();
    uninterrupted = program.everything();
  }
  torch::manual_seed(1000 + rank());
  Program resumed;
  EXPECT_EQ(load_checkpoint(folder.path(), resumed.state()), 0U);
  for (int i = 0; i < 3; ++i) resumed.train();
  EXPECT_EQ(resumed.everything(), uninterrupted);
}

TEST(Checkpoint, AllRanksLoadTheFirstRanksState) {
  const SharedFolder folder;
  torch::manual_seed(rank());
  torch::nn::BatchNorm1d norm(3);
  norm->running_mean.fill_(rank() + 1);
  std::string text = "of rank " + std::to_string(rank());
  save_checkpoint(folder.path(), TrainingState().model(norm).value("text", text));
  norm->running_mean.fill_(-1);
  text.clear();
  load_checkpoint(folder.path(), TrainingState().model(norm).value("text", text));
  EXPECT_TRUE((norm->running_mean == 1).all().item<bool>());
  EXPECT_EQ(text, "of rank 0");
}

TEST(Checkpoint, LargeTensorsAndAwkwardOnes) {
  const SharedFolder folder;
  struct OddImpl : torch::nn::Module {
    OddImpl() {
      register_parameter("large", torch::full({9, 1 << 20}, rank() + 1.5));  // more than one piece
      register_parameter("transposed", torch::arange(6.0).reshape({2, 3}).t() + rank());
      register_buffer("empty", torch::empty({0, 4}));
      register_buffer("scalar", torch::tensor(std::int64_t{7} + rank()));
      register_buffer("half", torch::full({3}, 0.5 + rank(), torch::kBFloat16));
      register_buffer("flags", torch::tensor({true, false}));
      register_buffer("complex", torch::full({2}, c10::complex<double>(rank(), 2)).conj());
      register_buffer("undefined", torch::Tensor());
    }
  };
  OddImpl saved;
  save_checkpoint(folder.path(), TrainingState().model(saved));
  OddImpl loaded;
  {
    const torch::NoGradGuard no_grad;
    for (auto& tensor : loaded.parameters()) tensor.zero_();
    for (auto& tensor : loaded.buffers()) tensor.zero_();
  }
  load_checkpoint(folder.path(), TrainingState().model(loaded));
  broadcast_parameters(saved);
  const auto expect_equal = [](const auto& ours, const auto& theirs) {
    ASSERT_EQ(ours.size(), theirs.size());
    for (const auto& item : ours)
      EXPECT_TRUE(torch::equal(item.value(), theirs[item.key()])) << item.key();
  };
  expect_equal(loaded.named_parameters(), saved.named_parameters());
  expect_equal(loaded.named_buffers(), saved.named_buffers());
}

/// The learning rates after each of `steps` steps.
template <class Scheduler>
std::vector<double> rates_of(Scheduler& scheduler, torch::optim::Optimizer& optimizer, int steps) {
  std::vector<double> rates;
  for (int i = 0; i < steps; ++i) {
    scheduler.step();
    rates.push_back(optimizer.param_groups()[0].options().get_lr());
  }
  return rates;
}

TEST(Checkpoint, ASchedulerGoesOnWhereItWas) {
  const SharedFolder folder;
  const torch::nn::Linear net(2, 2);
  torch::optim::SGD sgd(net->parameters(), 1.0), other(net->parameters(), 5.0);
  torch::optim::StepLR scheduler(sgd, 3, 0.5);
  rates_of(scheduler, sgd, 4);
  save_checkpoint(folder.path(), TrainingState().optimizer(sgd).scheduler(scheduler));
  torch::optim::StepLR resumed(other, 3, 0.5);
  rates_of(resumed, other, 2);  // its count is replaced
  load_checkpoint(folder.path(), TrainingState().optimizer(other).scheduler(resumed));
  EXPECT_EQ(rates_of(resumed, other, 7), rates_of(scheduler, sgd, 7));
  EXPECT_EQ(rates_of(scheduler, sgd, 3).back(), 0.0625);
}

TEST(Checkpoint, SchedulersThatHaveMadeOtherStepsAreNamed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const SharedFolder folder;
  const torch::nn::Linear net(2, 2);
  torch::optim::SGD sgd(net->parameters(), 1.0);
  torch::optim::StepLR scheduler(sgd, 3, 0.5);
  rates_of(scheduler, sgd, rank() == 1 ? 3 : 2);
  const std::string error = message_of<MismatchError>(
      [&] { save_checkpoint(folder.path(), TrainingState().scheduler(scheduler)); });
  EXPECT_TRUE(contains(error, "scheduler (scheduler, 2 steps)")) << error;
  EXPECT_TRUE(contains(error, "scheduler (scheduler, 3 steps)")) << error;
}

TEST(Checkpoint, WithoutOneNothingChanges) {
  const SharedFolder folder;
  int epoch = 5;
  EXPECT_EQ(load_checkpoint(folder.path() / "nowhere", TrainingState().value("epoch", epoch)),
            std::nullopt);
  EXPECT_EQ(epoch, 5);
}

TEST(Checkpoint, CountsOnAndKeepsTheLastOnes) {
  const SharedFolder folder;
  int epoch = 0;
  const TrainingState state = TrainingState().value("epoch", epoch);
  for (; epoch < 4; ++epoch) {
    EXPECT_EQ(save_checkpoint(folder.path(), state, {.keep = 2}),
              static_cast<std::uint64_t>(epoch));
  }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-000000000002", "step-000000000003"));
  EXPECT_EQ(names_in(folder.file(3, "")).size(), static_cast<std::size_t>(size()) + 2);
  EXPECT_EQ(load_checkpoint(folder.path(), state, {.step = 2}), 2U);
  EXPECT_EQ(epoch, 2);
  EXPECT_EQ(load_checkpoint(folder.path(), state), 3U);
  EXPECT_EQ(epoch, 3);
}

/// The next number of LibTorch's generator, without advancing the generator.
std::int64_t next_number() {
  at::Generator probe = at::detail::getDefaultCPUGenerator().clone();
  return torch::randint(std::int64_t{1} << 60, {1}, probe).item<std::int64_t>();
}

TEST(Checkpoint, LoadsAtAnotherNumberOfRanks) {
  const SharedFolder folder;
  const ProcessSet first = add_process_set({0});
  torch::manual_seed(77 + rank());
  std::vector<std::string> saved;
  std::int64_t next = 0;
  if (rank() == 0) {
    Program alone(first);
    for (int i = 0; i < 3; ++i) alone.train();
    save_checkpoint(folder.path(), alone.state(), {.process_set = first});
    saved = alone.but_for_sampler();
    next = next_number();
  }
  barrier();
  torch::manual_seed(1);
  {
    Program together;
    load_checkpoint(folder.path(), together.state());
    if (rank() == 0) {
      EXPECT_EQ(together.but_for_sampler(), saved);
      EXPECT_EQ(next_number(), next);
    }
    EXPECT_EQ(together.sampler.index(), 12U / static_cast<std::size_t>(size()));
    const auto streams = allgather_object(next_number());
    EXPECT_EQ(std::set(streams.begin(), streams.end()).size(), streams.size())
        << "two ranks have the same stream";
    torch::manual_seed(2);
    load_checkpoint(folder.path(), together.state());
    EXPECT_EQ(allgather_object(next_number()), streams) << "new streams differ between two loads";

    torch::manual_seed(123 + rank());
    save_checkpoint(folder.path(), together.state());
  }
  if (rank() == 0) {
    next = next_number();
    torch::manual_seed(1);
    Program alone(first);
    load_checkpoint(folder.path(), alone.state(), {.process_set = first});
    EXPECT_EQ(next_number(), next);
    EXPECT_EQ(alone.sampler.index(), 12U);
  }
  remove_process_set(first);
}

}  // namespace
}  // namespace hvd::testing
