// The host memory that a checkpoint allocates. In the foreground it allocates no memory, in the
// background only that of the first copy.
#include <algorithm>
#include <optional>
#include <string>

#include "hvd/torch/checkpointer.h"
#include "support/count_allocations.h"
#include "torch/checkpoint/checkpoint_job.h"

namespace hvd::testing {
namespace {

constexpr std::int64_t kElements = std::int64_t{1} << 18;  // elements of the only parameter
constexpr std::uint64_t kParameterBytes = kElements * sizeof(float);
/// An upper bound of the rest: names, messages, LibTorch's archive without its tensors.
constexpr std::uint64_t kBesides = kParameterBytes / 4;

torch::nn::ParameterList large_model() {
  torch::nn::ParameterList model;
  model->append(torch::ones({kElements}).requires_grad_());
  return model;
}

/// A model of one large parameter, and an optimizer.
template <class Wrapper>
struct LargeTraining {
  torch::nn::ParameterList model = large_model();
  torch::optim::Adam adam{model->parameters(), torch::optim::AdamOptions(0.1)};
  Wrapper optimizer{adam, *model};

  void step() {
    optimizer.zero_grad();
    (model[0] * static_cast<double>(rank() + 1)).sum().backward();
    optimizer.step();
  }
  float value() { return model[0][0].template item<float>(); }
};

std::uint64_t allocated_by(const std::function<void()>& act) {
  const std::uint64_t before = allocated_bytes();
  act();
  return allocated_bytes() - before;
}

/// The bytes that the first `save()` and each of the next three allocate on this rank.
template <class Wrapper>
std::vector<std::uint64_t> check_saves(std::uint64_t copied) {
  const SharedFolder folder;
  LargeTraining<Wrapper> training;
  broadcast_parameters(*training.model);
  std::vector<float> values;
  std::vector<std::uint64_t> allocated;
  {
    Checkpointer checkpointer(folder.path(),
                              TrainingState().model(*training.model).optimizer(training.optimizer),
                              {.background = true});
    for (int i = 0; i < 4; ++i) {
      training.step();
      values.push_back(training.value());
      allocated.push_back(allocated_by([&] {
        checkpointer.save();
        checkpointer.wait();
      }));
    }
    EXPECT_GE(allocated.front(), copied) << "the copy is not counted";
    EXPECT_LT(allocated.front(), copied + copied / 4 + kBesides) << "the state was copied twice";
    for (std::size_t i = 1; i < allocated.size(); ++i) EXPECT_LT(allocated[i], kBesides) << i;
    for (const std::uint64_t step : {3U, 0U, 2U}) {
      EXPECT_EQ(checkpointer.load(step), step);
      EXPECT_EQ(training.value(), values[step]);
    }
    // load() frees the memory.
    const auto after = allocated_by([&] {
      training.step();
      checkpointer.save(10);
      checkpointer.wait();
    });
    EXPECT_GE(after, copied);
  }
  return allocated;
}

TEST(CheckpointAllocations, TheSecondCopyUsesTheMemoryOfTheFirst) {
  // The ranks share the model and the optimizer's state, which is twice as large.
  const auto ranks = static_cast<std::uint64_t>(size());
  check_saves<DistributedOptimizer>(3 * kParameterBytes / ranks);
  check_saves<ShardedOptimizer>(3 * kParameterBytes / ranks);
}

/// The most that one of three saves in the foreground allocates, on any rank.
template <class Wrapper>
std::int64_t allocated_in_foreground() {
  const SharedFolder folder;
  LargeTraining<Wrapper> training;
  broadcast_parameters(*training.model);
  const TrainingState state = TrainingState().model(*training.model).optimizer(training.optimizer);
  std::int64_t most = 0;
  for (int i = 0; i < 3; ++i) {
    training.step();
    most = std::max(most, static_cast<std::int64_t>(
                              allocated_by([&] { save_checkpoint(folder.path(), state); })));
  }
  return allreduce(torch::tensor(most), {.op = ReduceOp::kMax}).item<std::int64_t>();
}

TEST(CheckpointAllocations, InTheForegroundNoTensorIsCopied) {
  EXPECT_LT(allocated_in_foreground<DistributedOptimizer>(), std::int64_t{kBesides});
  EXPECT_LT(allocated_in_foreground<ShardedOptimizer>(), std::int64_t{kBesides});
}

/// Saves the state. Loads it while the last rank cannot allocate large memory, and then without
/// that limit.
void load_without_memory_on_last_rank(const TrainingState& state) {
  const SharedFolder folder;
  save_checkpoint(folder.path(), state);
  std::string error;
  {
    std::optional<RefuseLargeAllocations> refuse;
    if (rank() == size() - 1) refuse.emplace(kParameterBytes / 4);
    error = message_of<CheckpointError>([&] { load_checkpoint(folder.path(), state); });
  }
  EXPECT_PRED2(contains, error,
               "load_checkpoint: rank " + std::to_string(size() - 1) + ": out of memory");
  EXPECT_EQ(load_checkpoint(folder.path(), state), 0U);
}

// A rank that throws outside a vote would leave the others waiting in a broadcast.
TEST(CheckpointAllocations, ARankWithoutMemoryToLoadIsAnErrorOnAllRanks) {
  torch::Tensor value = torch::ones({kElements});  // in the file of the replicated state
  load_without_memory_on_last_rank(TrainingState().value("value", value));
  torch::nn::ParameterList model = large_model();  // in the shares of the ranks
  load_without_memory_on_last_rank(TrainingState().model(*model));
  LargeTraining<ShardedOptimizer> training;  // in the ranks' own state, sent to all
  training.step();
  load_without_memory_on_last_rank(TrainingState().optimizer(training.optimizer));
}

TEST(CheckpointAllocations, InTheForegroundNothingIsKept) {
  const SharedFolder folder;
  torch::Tensor value = torch::ones({kElements});
  Checkpointer checkpointer(folder.path(), TrainingState().value("value", value));
  for (int i = 0; i < 2; ++i) {
    const auto allocated = allocated_by([&] { checkpointer.save(); });
    if (rank() == 0) {
      EXPECT_GE(allocated, kParameterBytes) << i;
    }
  }
}

}  // namespace
}  // namespace hvd::testing
