// What a checkpoint in the background takes of the host's memory: that of its first copy of the
// state, and of no other.
#include <numeric>

#include "hvd/torch/checkpointer.h"
#include "support/count_allocations.h"
#include "torch/checkpoint/checkpoint_job.h"

namespace hvd::testing {
namespace {

constexpr std::int64_t kElements = std::int64_t{1} << 18;  // of the only parameter
constexpr std::uint64_t kParameterBytes = kElements * sizeof(float);
/// What else a checkpoint allocates: names, messages, LibTorch's archive without its tensors.
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
    EXPECT_GE(allocated.front(), copied) << "nothing is counted";
    EXPECT_LT(allocated.front(), copied + copied / 4 + kBesides) << "the state was copied twice";
    for (std::size_t i = 1; i < allocated.size(); ++i) EXPECT_LT(allocated[i], kBesides) << i;
    for (const std::uint64_t step : {3U, 0U, 2U}) {
      EXPECT_EQ(checkpointer.load(step), step);
      EXPECT_EQ(training.value(), values[step]);
    }
    // Loading has let the memory go.
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
  // The first rank copies the model and the optimizer's state, twice as large; the others nothing.
  check_saves<DistributedOptimizer>(rank() == 0 ? 3 * kParameterBytes : 0);
}

TEST(CheckpointAllocations, SoDoesEachRanksPartOfAShardedOptimizer) {
  const auto ranks = static_cast<std::uint64_t>(size());
  check_saves<ShardedOptimizer>((rank() == 0 ? kParameterBytes : 0) + 2 * kParameterBytes / ranks);
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
