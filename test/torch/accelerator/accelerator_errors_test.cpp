#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/accelerator/accelerator_program.h"
#include "torch/checkpoint/checkpoint_job.h"

// Wrong uses of an Accelerator are errors on every rank.

namespace hvd::testing {
namespace {

/// The error of prepare(), the same on every rank.
template <class... Objects>
std::string refused(Accelerator& accelerator, Objects&... objects) {
  return message_of<UsageError>([&] { accelerator.prepare(objects...); });
}

TEST(Prepare, RefusesArgumentsThatWouldTrainWrongly) {
  Accelerator accelerator;
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  EXPECT_TRUE(contains(refused(accelerator, sgd),
                       "Accelerator::prepare: argument 0: none of the 6 parameters of "
                       "torch::optim::SGD belongs to a prepared module; pass the module"));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  EXPECT_TRUE(contains(refused(accelerator, net), "argument 0: the module is prepared already"));
  EXPECT_TRUE(contains(refused(accelerator, sgd), "argument 0: the optimizer is prepared already"));
  torch::optim::StepLR schedule(sgd, 1);
  EXPECT_TRUE(contains(refused(accelerator, schedule, schedule),
                       "argument 1: the scheduler is prepared already"));

  Net second = same_net();
  torch::optim::SGD of_second(second->parameters(), 0.1);
  const DistributedOptimizer wrapped(of_second, second);
  EXPECT_TRUE(contains(refused(accelerator, second),
                       "parameter 'fc1.weight' of hvd::testing::NetImpl belongs to an optimizer "
                       "that is wrapped already; expected the module to be prepared before"));

  Net third = same_net();
  torch::optim::SGD of_third(third->parameters(), 0.1);
  third->replace_module("fc2", torch::nn::Linear(8, 2));
  const std::string replaced = refused(accelerator, third, of_third);
  EXPECT_TRUE(contains(replaced,
                       "argument 1: parameter 2 of parameter group 0, shape [2,8], and 1 more of "
                       "the 6 parameters of torch::optim::SGD belong to no prepared module: they "
                       "were replaced after the optimizer was constructed"))
      << replaced;

  Net empty = nullptr;
  std::unique_ptr<torch::optim::SGD> none;
  EXPECT_TRUE(contains(refused(accelerator, empty), "argument 0: the module is null"));
  EXPECT_TRUE(contains(refused(accelerator, none), "argument 0: the optimizer is null"));
  if (size() > 1) {
    auto few = hvd::loader(Numbers(1), {.name = "few"});
    EXPECT_TRUE(contains(refused(accelerator, few),
                         "the loader 'few' has 1 samples in an epoch, and the job has " +
                             std::to_string(size()) + " ranks; expected at least one sample"));
  }
}

TEST(Prepare, RanksThatDifferAreAnErrorOnEveryRank) {
  if (size() == 1) return;
  const int last = size() - 1;
  EXPECT_TRUE(
      contains(message_of<MismatchError>([&] {
                 const Accelerator differs({.gradient_accumulation_steps = rank() == last ? 2 : 1});
               }),
               "Accelerator: gradient_accumulation_steps differs: rank 0 has 1, rank " +
                   std::to_string(last) + " has 2; expected the same options on every rank"));
  Accelerator accelerator;
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), rank() == last ? 0.2 : 0.1);
  const std::string text = message_of<MismatchError>([&] { accelerator.prepare(net, sgd); });
  EXPECT_TRUE(contains(text,
                       "Accelerator::prepare: argument 1 differs: rank 0 passes the optimizer "
                       "torch::optim::SGD, parameter group 0 with learning rate 0.1"))
      << text;
  // An error on one rank is an error on all ranks.
  Net other = same_net();
  if (rank() == last) other = nullptr;
  if (rank() == last) {
    EXPECT_TRUE(contains(refused(accelerator, other), "the module is null"));
  } else {
    EXPECT_TRUE(contains(message_of<MismatchError>([&] { accelerator.prepare(other); }),
                         "rank " + std::to_string(last) + " failed: "));
  }
}

TEST(AcceleratorErrors, OptionsAndArguments) {
  EXPECT_TRUE(contains(
      message_of<UsageError>([] { const Accelerator none({.gradient_accumulation_steps = 0}); }),
      "gradient_accumulation_steps: expected at least 1, got 0"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([] { const Accelerator none({.grad_scaler = {.growth_factor = 1}}); }),
      "Accelerator: grad_scaler: GradScaler: growth_factor"));
  Accelerator accelerator({.mixed_precision = Precision::kFP16});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { accelerator.backward({}); }),
                       "Accelerator::backward: the loss is undefined"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { accelerator.clip_grad_norm_(1.0); }),
                       "Accelerator::clip_grad_norm_: no optimizer is prepared"));
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::StepLR schedule(sgd, 1);
  auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, schedule);
  EXPECT_TRUE(contains(message_of<UsageError>([&, &optimizer = optimizer] {
                         optimizer.step([] { return torch::zeros({}); });
                       }),
                       "a closure cannot be evaluated with a loss scale"));
  EXPECT_TRUE(contains(message_of<UsageError>([&, &scheduler = scheduler] { scheduler.step(1.0); }),
                       "only a ReduceLROnPlateauScheduler takes a metric"));
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] {
                 accelerator.clip_grad_norm_({torch::ones({1}, torch::requires_grad())}, 1.0);
               }),
               "Accelerator::clip_grad_norm_: 1 of 1 parameters belong to no prepared optimizer"));
}

TEST(Prepare, RefusesAWrapperAndALoaderThatIsPreparedOrForSomeRanksOnly) {
  Accelerator accelerator;
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  DistributedOptimizer wrapper(sgd, net);
  EXPECT_TRUE(contains(refused(accelerator, wrapper),
                       "argument 0: the optimizer is a hvd::DistributedOptimizer; expected the "
                       "optimizer that it wraps, since prepare() wraps it"));
  auto data = hvd::loader(points(static_cast<std::size_t>(size())));
  const auto prepared = accelerator.prepare(data);
  EXPECT_TRUE(contains(refused(accelerator, data), "argument 0: the loader is prepared already"));
  if (size() == 1) return;
  std::vector<ProcessSet> alone;
  for (int r = 0; r < size(); ++r) alone.push_back(add_process_set({r}));
  auto own = hvd::loader(points(8), {.process_set = own_of(alone, ProcessSet()), .name = "own"});
  EXPECT_TRUE(contains(refused(accelerator, own),
                       "the loader 'own' divides its samples among 1 of " + std::to_string(size()) +
                           " ranks; expected a loader for all ranks"));
  for (const ProcessSet& set : alone) remove_process_set(set);
}

struct OnMetaImpl : torch::nn::Module {
  torch::Tensor weight = register_parameter("weight", torch::empty({2}, torch::kMeta));
};
TORCH_MODULE(OnMeta);

TEST(Prepare, RefusesAnOptimizerWithAStateOnAnotherDevice) {
  Accelerator accelerator;
  OnMeta net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto state = std::make_unique<torch::optim::SGDParamState>();
  state->momentum_buffer(torch::empty({2}, torch::kMeta));
  sgd.state()[net->weight.unsafeGetTensorImpl()] = std::move(state);
  const std::string message = refused(accelerator, net, sgd);
  EXPECT_TRUE(contains(message,
                       "argument 1: torch::optim::SGD has a state on meta already, and prepare() "
                       "moves the parameters to " +
                           accelerator.device().str() +
                           "; expected an optimizer that has not stepped"))
      << message;
}

TEST(AcceleratorErrors, OptionsThatDifferAreNamed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const bool last = rank() == size() - 1;
  const auto message = [](const AcceleratorOptions& options) {
    return message_of<MismatchError>([&] { const Accelerator differs(options); });
  };
  EXPECT_TRUE(contains(message({.mixed_precision = last ? Precision::kBF16 : Precision::kNo}),
                       "Accelerator: mixed_precision differs: rank 0 has no, rank " +
                           std::to_string(size() - 1) + " has bf16"));
  EXPECT_TRUE(
      contains(message({.sharded = last}), "Accelerator: sharded differs: rank 0 has false"));
  EXPECT_TRUE(contains(message({.compression = last ? Compression::kBFloat16 : Compression::kNone}),
                       "Accelerator: compression differs"));
  Accelerator accelerator;
  auto data = hvd::loader(points(static_cast<std::size_t>(size())));
  Net net = same_net();
  const std::string kind = message_of<MismatchError>([&] {
    last ? static_cast<void>(accelerator.prepare(net))
         : static_cast<void>(accelerator.prepare(data));
  });
  EXPECT_TRUE(contains(kind, "argument 0 differs: rank 0 passes a loader of " +
                                 std::to_string(size()) + " samples, rank "))
      << kind;
}

TEST(AcceleratorErrors, SeveralShardedOptimizersAreClippedOneByOne) {
  Accelerator accelerator({.sharded = true});
  Net first = same_net(), second = same_net();
  torch::optim::SGD of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.1);
  auto [a, b, optimizer_a, optimizer_b] = accelerator.prepare(first, second, of_first, of_second);
  accelerator.backward(loss_of(a, Batch::of_rank(rank(), 0)) +
                       loss_of(b, Batch::of_rank(rank(), 0)));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { accelerator.clip_grad_norm_(1.0); }),
                       "the parameters belong to 2 sharded optimizers; expected those of one: call "
                       "clip_grad_norm_() of each optimizer"));
  EXPECT_GT(accelerator.clip_grad_norm_(first->parameters(), 1.0), 0);
  EXPECT_GT(optimizer_b.clip_grad_norm_(1.0), 0);
  optimizer_a.step();
  optimizer_b.step();
}

TEST(AcceleratorErrors, ATensorWithoutTheDimensionIsNamed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const int last = size() - 1;
  Accelerator accelerator;
  const torch::Tensor own = rank() == last ? torch::ones({2}) : torch::ones({2, 2});
  const auto pad = [&] { accelerator.pad_across_processes(own, 1); };
  if (rank() == last) {
    EXPECT_TRUE(contains(message_of<UsageError>(pad),
                         "dim: expected a dimension of the tensor, which has 1, got 1"));
  } else {
    EXPECT_TRUE(contains(message_of<MismatchError>(pad),
                         "the tensor of rank " + std::to_string(last) +
                             " has no dimension 1; expected tensors of as many dimensions"));
  }
}

TEST(AcceleratorErrors, ALogThatCannotBeWrittenIsNamed) {
  const SharedFolder folder;
  Accelerator accelerator({.project_dir = folder.path() / "file"});
  barrier();
  if (rank() == 0) std::ofstream(folder.path() / "file") << "x";
  barrier();
  if (rank() != 0) return accelerator.log({{"loss", 1.0}});
  EXPECT_TRUE(contains(message_of<Error>([&] { accelerator.log({{"loss", 1.0}}); }),
                       "Accelerator::log: cannot write '" + (folder.path() / "file").string()));
}

}  // namespace
}  // namespace hvd::testing
