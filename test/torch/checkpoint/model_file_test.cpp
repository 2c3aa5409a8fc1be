#include <gmock/gmock.h>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/support/script_net.h"

// Models in checkpoints that Python reads, and exported models in checkpoints.

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

TEST(ModelFile, IsWrittenBesideTheCheckpointAndRemovedWithIt) {
  for (const bool background : {false, true}) {
    const SharedFolder folder;
    torch::manual_seed(3);
    torch::nn::Linear net(3, 2);
    const torch::Tensor saved = net->weight.detach().clone();
    {
      Checkpointer checkpointer(folder.path(), TrainingState().model(net),
                                {.keep = 1, .background = background, .safetensors = true});
      checkpointer.save(1);
      {
        const torch::NoGradGuard no_grad;
        net->weight.add_(1);
      }
      barrier();
      checkpointer.wait();
      const auto file = load_safetensors(folder.file(1, "model.safetensors"));
      EXPECT_TRUE(file.at("weight").equal(saved)) << background;
      EXPECT_EQ(file.size(), 2U);
      barrier();
      checkpointer.save(2);
      checkpointer.wait();
    }
    EXPECT_FALSE(std::filesystem::exists(folder.file(1, ""))) << background;
    torch::nn::Linear other(3, 2);
    load_safetensors(other, folder.file(2, "model.safetensors"));
    EXPECT_TRUE(other->weight.equal(net->weight)) << background;
    EXPECT_EQ(load_checkpoint(folder.path(), TrainingState().model(other)), 2U);
  }
}

TEST(ModelFile, IsWrittenForEachModelUnderItsName) {
  const SharedFolder folder;
  torch::nn::Linear generator(1, 1), critic(2, 1);
  TrainingState state;
  state.model(generator, "generator").model(critic, "critic");
  save_checkpoint(folder.path(), state, {.step = 1, .safetensors = true});
  EXPECT_EQ(SafetensorsFile(folder.file(1, "generator.safetensors")).tensor("weight").numel(), 1);
  EXPECT_EQ(SafetensorsFile(folder.file(1, "critic.safetensors")).tensor("weight").numel(), 2);
  save_checkpoint(folder.path(), state, {.step = 2});
  EXPECT_FALSE(std::filesystem::exists(folder.file(2, "critic.safetensors")));
  EXPECT_THAT(message_of<Error>([&] {
                save_checkpoint(folder.path(), TrainingState().model(critic, "a/b"),
                                {.step = 3, .safetensors = true});
              }),
              HasSubstr("expected a name without '/'"));
}

TEST(ScriptModel, IsSavedAndLoadedAsAnEqualModuleOfCppIs) {
  const SharedFolder folder;
  const torch::jit::Module net = script_net(7 + rank());
  save_checkpoint(folder.path(), TrainingState().model(net), {.step = 1, .safetensors = true});
  ScriptTwin twin;
  EXPECT_EQ(load_checkpoint(folder.path(), TrainingState().model(twin)), 1U);
  EXPECT_TRUE(same_values(script_net(7), twin));

  const torch::jit::Module other = script_net(100);
  load_checkpoint(folder.path(), TrainingState().model(other));
  EXPECT_TRUE(same_values(other, twin));

  ScriptTwin third;
  load_safetensors(third, folder.file(1, "model.safetensors"));
  EXPECT_TRUE(same_values(other, third));
}

TEST(ScriptModel, AnotherModelChangesNothing) {
  const SharedFolder folder;
  torch::nn::Linear linear(3, 2);
  save_checkpoint(folder.path(), TrainingState().model(linear), {.step = 1});
  const torch::jit::Module net = script_net(7);
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { load_checkpoint(folder.path(), TrainingState().model(net)); }),
              HasSubstr("buffer 'running_mean' of the model is not in the checkpoint"));
  EXPECT_TRUE(net.attr("weight").toTensor().equal(script_net(7).attr("weight").toTensor()));
}

// After join() the ranks continue with the state of the last rank to join.
TEST(ScriptModel, IsBroadcastByJoin) {
  const torch::jit::Module net = script_net(20 + rank());
  TrainingState state;
  state.model(net);
  const int last = join(state);
  EXPECT_TRUE(net.attr("bias").toTensor().equal(script_net(20 + last).attr("bias").toTensor()));
}

}  // namespace
}  // namespace hvd::testing
