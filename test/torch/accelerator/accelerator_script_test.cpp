#include "torch/accelerator/accelerator_program.h"
#include "torch/checkpoint/checkpoint_job.h"
#include "torch/support/script_net.h"

// Modules that Python has exported, prepared like modules of C++.

namespace hvd::testing {
namespace {

torch::Tensor output_of(torch::jit::Module& net, const torch::Tensor& x) {
  return net.forward({x}).toTensor();
}
torch::Tensor output_of(ScriptTwin& net, const torch::Tensor& x) { return net->forward(x); }

/// Trains a prepared module for six passes, and saves the state in `folder` after four.
template <class Module>
void train_prepared(Accelerator& accelerator, Module& net, AcceleratedOptimizer& optimizer,
                    const std::filesystem::path& folder) {
  for (int pass = 0; pass < 6; ++pass) {
    if (pass == 4) accelerator.save_state(folder);
    auto step = accelerator.accumulate(net);
    torch::Tensor loss;
    {
      auto autocast = accelerator.autocast();
      const torch::Tensor x = rank_tensor(rank(), {4, 3}, torch::kFloat, pass);
      loss = output_of(net, x).to(torch::kFloat32).square().mean();
    }
    accelerator.backward(loss);
    accelerator.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(AcceleratorScript, TrainsAndSavesAsAModuleOfCppDoes) {
  const AcceleratorOptions modes[] = {
      {.gradient_accumulation_steps = 2}, {.sharded = true}, {.mixed_precision = Precision::kBF16}};
  for (const AcceleratorOptions& options : modes) {
    const bool half = options.mixed_precision == Precision::kBF16;
    const SharedFolder folder, twin_folder;
    Accelerator accelerator(options);
    torch::jit::Module net = script_net(1 + rank());  // rank 0's values count
    ScriptTwin twin;
    {
      const torch::NoGradGuard no_grad;
      const torch::jit::Module first = script_net(1);
      twin->weight.copy_(first.attr("weight").toTensor());
      twin->bias.copy_(first.attr("bias").toTensor());
    }
    torch::optim::Adam adam(parameters_of(net), 0.1), twin_adam(twin->parameters(), 0.1);
    {
      auto [model, optimizer] = accelerator.prepare(net, adam);
      EXPECT_EQ(model._ivalue(), net._ivalue());
      EXPECT_TRUE(net.attr("running_mean").toTensor().equal(torch::full({2}, 1.0F)));
      train_prepared(accelerator, model, optimizer, folder.path());
    }
    accelerator.save_model(net, folder.path() / "out");
    const torch::Tensor trained = net.attr("weight").toTensor().detach().clone();
    EXPECT_TRUE(same_on_all_ranks(trained));
    // A loaded state is the state of pass 4, which differs.
    accelerator.load_state(folder.path());
    EXPECT_FALSE(net.attr("weight").toTensor().equal(trained));
    accelerator.free_memory();

    auto [twin_model, twin_optimizer] = accelerator.prepare(twin, twin_adam);
    train_prepared(accelerator, twin_model, twin_optimizer, twin_folder.path());
    EXPECT_TRUE(near(trained, twin->weight.detach(), half ? 2e-2 : 1e-5));
    torch::jit::Module reread = script_net(9);
    load_safetensors(reread, folder.path() / "out" / "model.safetensors");
    EXPECT_TRUE(reread.attr("weight").toTensor().equal(trained));
  }
}

TEST(AcceleratorScript, WrongArgumentsAreRefusedAndChangeNothing) {
  Accelerator accelerator({.sync_batch_norm = true});
  torch::jit::Module net = script_net(1 + rank());
  torch::optim::SGD sgd(parameters_of(net), 0.1);
  const auto refused = [&](auto&... arguments) {
    return message_of<UsageError>([&] { accelerator.prepare(arguments...); });
  };
  torch::jit::Module empty;
  EXPECT_TRUE(contains(refused(empty), "argument 0: the module is null; expected a module"));
  EXPECT_TRUE(contains(refused(sgd), "none of the 2 parameters of torch::optim::SGD"));
  EXPECT_TRUE(contains(refused(net, net), "argument 1: the module is prepared already"));
  torch::jit::Module with_layer = script_net(3);
  with_layer.register_module("norm",
                             torch::jit::Module("__torch__.torch.nn.modules.batchnorm.BatchNorm2d",
                                                std::make_shared<torch::jit::CompilationUnit>()));
  EXPECT_TRUE(contains(refused(net, with_layer), "argument 1: convert_sync_batchnorm: cannot "));
  EXPECT_TRUE(net.attr("running_mean").toTensor().equal(torch::full({2}, 1.0F + rank())));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  EXPECT_TRUE(contains(refused(net), "argument 0: the module is prepared already"));
}

}  // namespace
}  // namespace hvd::testing
