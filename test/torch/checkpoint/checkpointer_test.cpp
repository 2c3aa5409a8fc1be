#include "hvd/torch/checkpointer.h"

#include <csignal>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/checkpoint/file_size_limit.h"

namespace hvd::testing {
namespace {

// The program continues after save(), and its changes are not in the checkpoint.
TEST(Checkpointer, WritesTheStateOfTheCallInTheBackground) {
  const SharedFolder folder;
  torch::manual_seed(rank());
  Program program;
  broadcast_parameters(program.net);
  Checkpointer checkpointer(folder.path(), program.state(), {.keep = 2, .background = true});
  EXPECT_EQ(checkpointer.load(), std::nullopt);
  std::vector<std::vector<std::string>> before;
  for (std::uint64_t step = 0; step < 4; ++step) {
    program.train();
    program.losses = broadcast_object(program.losses);
    broadcast_buffers(program.net);
    before.push_back(program.everything());
    EXPECT_EQ(checkpointer.save(), step);
  }
  program.train();
  EXPECT_EQ(checkpointer.load(), 3U);
  EXPECT_EQ(program.everything(), before[3]);
  EXPECT_EQ(checkpointer.load(2), 2U);
  EXPECT_EQ(program.everything(), before[2]);
  EXPECT_TRUE(contains(message_of<CheckpointError>([&] { checkpointer.load(1); }),
                       "no complete checkpoint of step 1"));
}

// The copy of the state is kept from one checkpoint to the next.
TEST(Checkpointer, TheStateMayGrowAndShrinkBetweenCheckpoints) {
  const SharedFolder folder;
  torch::nn::ParameterList model(torch::zeros({8}));
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<double> history;
  torch::Tensor table;
  TrainingState state;
  state.model(*model).optimizer(sgd).value("history", history).value("table", table).random();
  Checkpointer checkpointer(folder.path(), state, {.background = true});
  const std::vector<std::int64_t> sizes = {1000, 10, 0, 5000, 5000, 7};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    history.assign(static_cast<std::size_t>(sizes[i]), static_cast<double>(i));
    table = torch::full({sizes[i], 2}, static_cast<double>(i));
    model[0].set_data(torch::full({sizes[i] + 1}, static_cast<float>(i)));
    sgd.state().clear();
    if (i % 2 == 1) {  // there is no state before the first step
      model[0].mutable_grad() = torch::ones_like(model[0]);
      sgd.step();
    }
    checkpointer.save(i);
    model[0].set_data(torch::zeros({3}));
    history.clear();
  }
  for (std::size_t i = sizes.size(); i-- > 0;) {
    model[0].set_data(torch::zeros({sizes[i] + 1}));
    EXPECT_EQ(checkpointer.load(i), i);
    EXPECT_EQ(history, std::vector<double>(static_cast<std::size_t>(sizes[i]), i));
    EXPECT_TRUE(torch::equal(table, torch::full({sizes[i], 2}, static_cast<double>(i))));
    const float stepped = i % 2 == 1 ? 0.1F : 0.0F;
    EXPECT_TRUE(near(model[0].detach(),
                     torch::full({sizes[i] + 1}, static_cast<float>(i) - stepped), 1e-6));
    EXPECT_EQ(sgd.state().size(), i % 2);
  }
}

// Reductions and the writing thread's operations run at the same time.
TEST(Checkpointer, TrainingGoesOnBesideIt) {
  const SharedFolder folder;
  torch::manual_seed(3);
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  torch::Tensor ballast = torch::full({1 << 20}, 1.5);
  Checkpointer checkpointer(folder.path(),
                            TrainingState().model(net).optimizer(optimizer).value("b", ballast),
                            {.keep = 1, .background = true});
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    optimizer.step();
    if (step % 8 == 0) checkpointer.save(static_cast<std::uint64_t>(step));
  }
  checkpointer.wait();
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  EXPECT_EQ(checkpointer.load(), 32U);
}

TEST(Checkpointer, AnErrorInTheBackgroundIsRaisedOnEveryRankByTheNextCall) {
  const SharedFolder folder;
  int epoch = 1;
  Checkpointer checkpointer(folder.path(), TrainingState().value("epoch", epoch).random(),
                            {.background = true});
  checkpointer.save();
  checkpointer.wait();
  const auto fail = [&] {
    const LimitOnLastRank limit;
    checkpointer.save();
    const std::string error = message_of<CheckpointError>([&] { checkpointer.wait(); });
    EXPECT_TRUE(contains(error, "rank " + std::to_string(size() - 1) + ": cannot write")) << error;
    for (const std::string& other : allgather_object(error)) EXPECT_EQ(other, error);
  };
  fail();
  checkpointer.wait();
  epoch = 2;
  EXPECT_EQ(checkpointer.save(), 1U) << "the error was thrown again";
  checkpointer.wait();
  fail();
  EXPECT_EQ(checkpointer.load(), 1U);
  EXPECT_EQ(epoch, 2);
}

TEST(Checkpointer, TheDestructorWaits) {
  const SharedFolder folder;
  int epoch = 1;
  const TrainingState state = TrainingState().value("epoch", epoch);
  { Checkpointer(folder.path(), state, {.background = true}).save(7); }
  barrier();
  EXPECT_EQ(load_checkpoint(folder.path(), state), 7U);
}

TEST(Checkpointer, OnSigtermOfOneRankAllSaveTheSameStepAndStop) {
  for (const bool background : {false, true}) {
    const SharedFolder folder;
    int epoch = 0;
    std::uint64_t last = 0;
    {
      Checkpointer checkpointer(folder.path(), TrainingState().value("epoch", epoch),
                                {.background = background, .save_on_sigterm = true});
      for (std::uint64_t step = 0; step < 1000; ++step) {
        epoch = static_cast<int>(step) + 100;
        if (step == 5) checkpointer.save(step);
        if (step == 7 && rank() == size() - 1) std::raise(SIGTERM);
        last = step;
        if (checkpointer.should_stop(step)) break;
      }
      EXPECT_TRUE(checkpointer.should_stop(last)) << "the signal was forgotten";
    }
    EXPECT_EQ(last, 7U);
    epoch = 0;
    EXPECT_EQ(load_checkpoint(folder.path(), TrainingState().value("epoch", epoch)), 7U);
    EXPECT_EQ(epoch, 107);
  }
}

// save() was already called for this step, or the previous save has failed.
TEST(Checkpointer, SavesUnsavedStepsOnSigterm) {
  const SharedFolder folder;
  int epoch = 3;
  const TrainingState state = TrainingState().value("epoch", epoch).random();
  Checkpointer checkpointer(folder.path(), state, {.background = true, .save_on_sigterm = true});
  checkpointer.save(4);
  if (rank() == 0) std::raise(SIGTERM);
  EXPECT_TRUE(checkpointer.should_stop(4));
  {
    const LimitOnLastRank limit;
    checkpointer.save(5);
    EXPECT_THROW(checkpointer.should_stop(5), CheckpointError) << "the disk is still full";
  }
  EXPECT_TRUE(checkpointer.should_stop(5));
  EXPECT_EQ(load_checkpoint(folder.path(), state), 5U);
}

// The newest checkpoint is damaged, so training continues from an older one.
TEST(Checkpointer, AfterAnOlderStepWasLoadedNewerOnesAreReplacedOnRequest) {
  for (const bool background : {false, true}) {
    const SharedFolder folder;
    int epoch = 0;
    const TrainingState state = TrainingState().value("epoch", epoch);
    for (const std::uint64_t step : {10U, 20U, 30U}) save_checkpoint(folder.path(), state, {step});
    Checkpointer refuses(folder.path(), state, {.background = background});
    EXPECT_EQ(refuses.load(10), 10U);
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { refuses.save(20); }), "replace_newer"));
    Checkpointer checkpointer(folder.path(), state,
                              {.background = background, .replace_newer = true});
    EXPECT_TRUE(
        contains(message_of<CheckpointError>([&] { checkpointer.save(20); }), "load it first"))
        << "no checkpoint has been loaded";
    EXPECT_EQ(checkpointer.load(10), 10U);
    epoch = 20;
    EXPECT_EQ(checkpointer.save(20), 20U);
    checkpointer.wait();
    EXPECT_TRUE(contains(message_of<CheckpointError>([&] { checkpointer.save(20); }),
                         "would stay the newest"))
        << "newer checkpoints are replaced only once";
    EXPECT_FALSE(std::filesystem::exists(folder.file(30, "manifest")));
    EXPECT_EQ(load_checkpoint(folder.path(), state), 20U);
    EXPECT_EQ(epoch, 20);
    EXPECT_EQ(save_checkpoint(folder.path(), state, {.step = 15, .replace_newer_than = 10}), 15U);
    EXPECT_EQ(load_checkpoint(folder.path(), state), 15U);
  }
}

TEST(Checkpointer, WrongCalls) {
  const SharedFolder folder;
  EXPECT_THROW(Checkpointer(folder.path(), TrainingState(), {.keep = -1}), UsageError);
  Checkpointer checkpointer(folder.path(), TrainingState());
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { checkpointer.should_stop(1); }), "save_on_sigterm"));
  const ProcessSet first = add_process_set({0});
  if (rank() != 0) {
    EXPECT_THROW(Checkpointer(folder.path(), TrainingState(), {.process_set = first}), UsageError);
  }
  remove_process_set(first);
}

}  // namespace
}  // namespace hvd::testing
