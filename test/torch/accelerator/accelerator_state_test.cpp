#include <memory>
#include <utility>

#include "torch/accelerator/accelerator_program.h"
#include "torch/checkpoint/checkpoint_job.h"

// Saved states, and the results of prepare().

namespace hvd::testing {
namespace {

/// An object of a program, with members that save and load it.
struct Counter {
  torch::Tensor value = torch::zeros({1});
  void save(torch::serialize::OutputArchive& archive) const { archive.write("value", value); }
  void load(torch::serialize::InputArchive& archive) { archive.read("value", value); }
};

struct Outcome {
  std::vector<torch::Tensor> parameters;
  std::vector<double> losses;  ///< of the passes after the resume
  int steps = 0;
  float counted = 0;
};

/// Trains for two epochs, with dropout. @param resume_after a step whose state is loaded first; 0:
/// trains from the beginning, and saves the state after each step below `folder`
Outcome run(const AcceleratorOptions& options, const std::filesystem::path& folder,
            int resume_after) {
  torch::manual_seed(10 + rank() + resume_after);
  Accelerator accelerator(options);
  auto train = hvd::loader(points(41), {.batch_size = 4, .workers = 1, .seed = 2});
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Dropout(0.5),
                            torch::nn::Linear(8, 2));
  torch::optim::Adam adam(net->parameters(), 1e-2);
  torch::optim::StepLR schedule(adam, 3, 0.5);
  auto [model, optimizer, train_loader, scheduler] =
      accelerator.prepare(net, adam, train, schedule);
  Counter counter;
  Outcome outcome;
  accelerator.register_for_checkpointing(counter, outcome.steps);
  if (resume_after > 0) {
    accelerator.load_state(folder / std::to_string(resume_after));
    EXPECT_EQ(outcome.steps, resume_after);
  }
  while (train_loader->epoch() < 2) {
    for (auto& batch : *train_loader) {
      auto step = accelerator.accumulate();
      torch::Tensor loss;
      {
        auto autocast = accelerator.autocast();
        loss = torch::mse_loss(model->forward(batch.data).to(torch::kFloat32), batch.target);
      }
      accelerator.backward(loss);
      accelerator.clip_grad_norm_(1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      outcome.losses.push_back(loss.item<double>());
      if (!accelerator.sync_gradients()) continue;
      ++outcome.steps;
      counter.value += 1;
      if (resume_after == 0) accelerator.save_state(folder / std::to_string(outcome.steps));
    }
  }
  outcome.counted = counter.value.item<float>();
  for (const torch::Tensor& parameter : net->parameters())
    outcome.parameters.push_back(parameter.detach().clone());
  return outcome;
}

TEST(AcceleratorState, AResumedRunIsTheRunThatWasNotInterrupted) {
  const AcceleratorOptions modes[] = {{.gradient_accumulation_steps = 2},
                                      {.sharded = true},
                                      {.mixed_precision = Precision::kFP16,
                                       .gradient_accumulation_steps = 2,
                                       .grad_scaler = {.init_scale = 1024, .growth_interval = 2}}};
  for (const AcceleratorOptions& options : modes) {
    const SharedFolder folder;
    const Outcome whole = run(options, folder.path(), 0);
    for (const int step : {1, 2, whole.steps - 1, whole.steps}) {
      const Outcome resumed = run(options, folder.path(), step);
      EXPECT_EQ(resumed.steps, whole.steps);
      EXPECT_EQ(resumed.counted, static_cast<float>(whole.steps));
      ASSERT_LT(resumed.losses.size(), whole.losses.size());
      EXPECT_TRUE(std::equal(resumed.losses.rbegin(), resumed.losses.rend(), whole.losses.rbegin()))
          << "after step " << step;
      for (std::size_t i = 0; i < whole.parameters.size(); ++i)
        EXPECT_TRUE(torch::equal(resumed.parameters[i], whole.parameters[i])) << step;
    }
  }
}

TEST(AcceleratorState, AnotherSaveReplacesTheFirstAndAnEmptyFolderIsAnError) {
  Accelerator accelerator;
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const SharedFolder folder;
  EXPECT_NE(message_of<CheckpointError>([&] {
              accelerator.load_state(folder.path());
            }).find("no complete checkpoint in '" + folder.path().string()),
            std::string::npos);
  EXPECT_EQ(accelerator.save_state(folder.path()), 0U);
  EXPECT_EQ(accelerator.save_state(folder.path()), 1U);
  EXPECT_FALSE(std::filesystem::exists(folder.file(0, "")));
  EXPECT_EQ(accelerator.load_state(folder.path()), 1U);
}

TEST(AcceleratorState, RunCallsTheFunctionOnceAndLoadsTheNewestState) {
  const SharedFolder folder;
  for (const int before : {0, 3}) {
    Accelerator accelerator;
    Net net = same_net();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto prepared = accelerator.prepare(net, sgd);
    int steps = 0, calls = 0, changes = 0;
    accelerator.register_for_checkpointing(steps);
    EXPECT_NE(message_of<UsageError>([&] {
                accelerator.commit();
              }).find("outside the function of Accelerator::run()"),
              std::string::npos);
    accelerator.run(
        [&] {
          auto& [model, optimizer] = prepared;
          EXPECT_EQ(steps, before);
          EXPECT_EQ(++calls, 1);
          const std::uint64_t commits = accelerator.commits();
          for (int i = 0; i < 3; ++i) {
            const auto step = accelerator.accumulate();
            accelerator.backward(model->forward(torch::ones({2, 4})).square().mean());
            optimizer.step();
            optimizer.zero_grad();
            ++steps;
            accelerator.commit();
          }
          EXPECT_EQ(accelerator.commits(), commits + 3);
          accelerator.save_state(folder.path());
        },
        {.resume_from = folder.path(), .on_change = [&](const elastic::Change& change) {
           EXPECT_EQ(change.new_size, size());
           ++changes;
         }});
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(changes, 1);
    EXPECT_EQ(steps, before + 3);
    EXPECT_EQ(accelerator.commits(), 0U);
  }
}

TEST(AcceleratorState, AModelIsSavedOnceAndAFailureIsAnErrorOnEveryRank) {
  const Accelerator accelerator;
  Net net = same_net(), loaded;
  const SharedFolder folder;
  accelerator.save_model(net, folder.path() / "out");
  load_safetensors(loaded, folder.path() / "out" / "model.safetensors");
  EXPECT_TRUE(torch::equal(loaded->fc1->weight, net->fc1->weight));
  barrier();
  if (rank() == 0) std::filesystem::create_directories(folder.path() / "bad/model.safetensors/x");
  barrier();
  EXPECT_THROW(accelerator.save_model(net, folder.path() / "bad"), Error);
}

TEST(AcceleratorState, SkippedBatchesAreNotLoadedAndNotSkippedTwice) {
  Accelerator accelerator;
  auto data = hvd::loader(Numbers(static_cast<std::size_t>(8 * size())),
                          {.batch_size = 2, .shuffle = false});
  auto prepared = accelerator.prepare(data);
  auto skipped = accelerator.skip_first_batches(prepared, 3);
  EXPECT_EQ(skipped->batches_left(), 1U);
  EXPECT_EQ(accelerator.skip_first_batches(prepared, 2)->batches_left(), 1U);
  int batches = 0;
  for (auto& batch : *accelerator.skip_first_batches(prepared, 3)) {
    EXPECT_EQ(batch[0].item<std::int64_t>(), 6 * size() + rank());
    ++batches;
  }
  EXPECT_EQ(batches, 1);
  EXPECT_EQ(prepared->epoch(), 1U);
  EXPECT_EQ(prepared->batches_left(), 4U);
}

TEST(Prepare, ReturnsTheArgumentsInOrderAndEachIsUsable) {
  Accelerator accelerator;
  Net net = same_net();
  auto owned = std::make_shared<torch::nn::LinearImpl>(4, 2);
  torch::optim::AdamW adamw(net->parameters(), 1e-3);
  auto pointer = std::make_unique<torch::optim::SGD>(owned->parameters(), 0.1);
  auto data = hvd::loader(points(static_cast<std::size_t>(2 * size())));
  torch::optim::StepLR schedule(adamw, 1);
  auto [loader, scheduler, optimizer, model, other_optimizer, other] =
      accelerator.prepare(data, schedule, adamw, net, pointer, owned);
  static_assert(std::is_same_v<decltype(model), Net>);
  static_assert(std::is_same_v<decltype(other), std::shared_ptr<torch::nn::LinearImpl>>);
  static_assert(std::is_same_v<decltype(optimizer), AcceleratedOptimizer&>);
  static_assert(std::is_same_v<decltype(scheduler), AcceleratedScheduler&>);
  EXPECT_EQ(model.ptr(), net.ptr());
  EXPECT_EQ(&optimizer.inner(), &adamw);
  EXPECT_EQ(&other_optimizer.inner(), pointer.get());
  EXPECT_EQ(&accelerator.unwrap_model(model), &model);
  Halving later(optimizer);  // of the optimizer that prepare() has returned
  auto& bound = accelerator.prepare(later);
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  for (auto& batch : *loader) {
    accelerator.backward(loss_of(model, {batch.data, batch.target}) +
                         other->forward(batch.data).sum());
    optimizer.step();
    other_optimizer.step();
    bound.step();
    optimizer.zero_grad();
    other_optimizer.zero_grad();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  EXPECT_TRUE(same_on_all_ranks(owned->parameters()));
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3 / 4);
  accelerator.free_memory();
  auto [again, optimizer_again] = accelerator.prepare(net, adamw);
  EXPECT_EQ(&optimizer_again.inner(), &adamw);
}

}  // namespace
}  // namespace hvd::testing
