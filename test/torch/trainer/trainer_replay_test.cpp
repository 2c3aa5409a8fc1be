#include <cstdint>
#include <cstring>
#include <memory>

#include "torch/trainer/trainer_program.h"

// replay_every in a whole training. replay_check_test has the cases of the check itself.

namespace hvd::testing {
namespace {

std::vector<torch::Tensor> trained(TrainingArguments arguments, std::int64_t replay_every) {
  arguments.replay_every = replay_every;
  Net net = same_net();
  PointTrainer trainer(net, arguments, points(44));
  trainer.train();
  return values_of(*net);
}

TEST(TrainerReplay, DoesNotChangeTheTraining) {
  for (const std::int64_t accumulated : {1, 3}) {
    const SharedFolder folder;
    TrainingArguments arguments = quiet(folder);
    arguments.gradient_accumulation_steps = accumulated;
    EXPECT_TRUE(same_bits(trained(arguments, 0), trained(arguments, 1)));
  }
}

/// The ranks that a training's CorruptionError names; empty if it ends without one.
std::vector<int> ranks_at_fault(PointTrainer& trainer) {
  try {
    trainer.train();
  } catch (const CorruptionError& error) {
    EXPECT_TRUE(contains(error.what(), "at step 2 ")) << error.what();
    return error.ranks();
  }
  return {};
}

/// Computes a wrong loss once, on the last rank.
struct WrongOnce : PointTrainer {
  using PointTrainer::PointTrainer;
  int calls = 0;
  torch::Tensor compute_loss(Net& model, const torch::data::Example<>& inputs) override {
    const torch::Tensor loss = PointTrainer::compute_loss(model, inputs);
    // The first call of step 2. Step 1 is not checked and has one call.
    return ++calls == 2 && rank() == size() - 1 ? loss * 1.001 : loss;
  }
};

TEST(TrainerReplay, NamesTheRankOfAWrongGradient) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.replay_every = 2;
  WrongOnce trainer(same_net(), arguments, points(44));
  EXPECT_EQ(ranks_at_fault(trainer), std::vector<int>{size() - 1});
}

/// Flips the lowest bit of a weight on the last rank, before step 2.
struct FlipABit : TrainerCallback {
  explicit FlipABit(Net net) : net_(std::move(net)) {}
  void on_step_begin(const TrainingArguments&, const TrainerState& state,
                     TrainerControl&) override {
    if (state.global_step != 1 || rank() != size() - 1) return;
    auto* const weight = net_->parameters().front().data_ptr<float>();
    std::uint32_t bits = 0;
    std::memcpy(&bits, weight, sizeof bits);
    bits ^= 1U;
    std::memcpy(weight, &bits, sizeof bits);
  }
  Net net_;
};

TEST(TrainerReplay, NamesTheRankOfAWrongWeight) {
  if (size() == 1) return;
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.replay_every = 2;
  Net net = same_net();
  PointTrainer trainer(net, arguments, points(44));
  trainer.add_callback(FlipABit(net));
  // Two ranks have no majority.
  const auto expected = size() == 2 ? std::vector<int>{0, 1} : std::vector<int>{size() - 1};
  EXPECT_EQ(ranks_at_fault(trainer), expected);
}

/// A batch with a part that hvd cannot copy to another rank.
class Opaque {
 public:
  explicit Opaque(torch::Tensor data) : data_(std::make_shared<torch::Tensor>(std::move(data))) {}
  const torch::Tensor& data() const { return *data_; }
  void to(torch::Device) {}

 private:
  std::shared_ptr<torch::Tensor> data_;
};

struct OpaqueSet : torch::data::datasets::BatchDataset<OpaqueSet, Opaque> {
  Opaque get_batch(c10::ArrayRef<std::size_t> indices) override {
    return Opaque(torch::ones({static_cast<std::int64_t>(indices.size()), 4}));
  }
  std::optional<std::size_t> size() const override { return 16; }
};

struct OpaqueTrainer : Trainer<Net, Opaque> {
  using Trainer::Trainer;
  torch::Tensor compute_loss(Net& model, const Opaque& inputs) override {
    return model->forward(inputs.data()).sum();
  }
};

TEST(TrainerReplay, RefusesBatchesThatCannotBeSent) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.replay_every = 2;
  OpaqueTrainer trainer(same_net(), arguments, OpaqueSet());
  try {
    trainer.train();
    ADD_FAILURE() << "expected an error";
  } catch (const UsageError& error) {
    EXPECT_TRUE(contains(error.what(), "batches of this type cannot be sent")) << error.what();
  }
}

}  // namespace
}  // namespace hvd::testing
