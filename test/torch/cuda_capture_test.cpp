#include <hvd/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "torch/support/cuda_test.h"
#include "torch/support/fake_cuda.h"

// Operations of hvd cannot be captured into CUDA graphs. The attempt is an error, after which the
// rank can continue, and no rank hangs.

namespace hvd::testing {
namespace {

/// The tests work on a side stream, since the default one cannot be captured.
class CudaCapture : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    stream_ = side_stream();
    guard_.emplace(*stream_);
  }
  c10::Stream stream() const { return *stream_; }

  template <class Call>
  void expect_refused(const std::string& name, const Call& call) {
    const FakeCapture capture(stream());
    try {
      call();
      ADD_FAILURE() << name << ": expected an error";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("captured into a CUDA graph"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::StreamGuard> guard_;
};

/// A model and its optimizer.
struct Training {
  explicit Training(const DistributedOptimizerOptions& options = {}) {
    torch::manual_seed(3);
    net = Net();
    net->to(device());
    sgd = std::make_unique<torch::optim::SGD>(net->parameters(),
                                              torch::optim::SGDOptions(0.05).momentum(0.9));
    optimizer = std::make_unique<DistributedOptimizer>(*sgd, net->named_parameters(), options);
  }
  torch::Tensor loss(int step) {
    const Batch batch = Batch::of_rank(rank(), step);
    return torch::mse_loss(net->forward(batch.x.to(device())), batch.y.to(device()));
  }
  void step(int number) {
    optimizer->zero_grad();
    loss(number).backward();
    optimizer->step();
  }
  std::vector<torch::Tensor> values() const {
    std::vector<torch::Tensor> values;
    for (const torch::Tensor& parameter : net->parameters())
      values.push_back(parameter.detach().cpu());
    return values;
  }

  Net net{nullptr};
  std::unique_ptr<torch::optim::SGD> sgd;
  std::unique_ptr<DistributedOptimizer> optimizer;
};

void expect_equal(const std::vector<torch::Tensor>& actual,
                  const std::vector<torch::Tensor>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << "parameter " << i;
}

TEST_F(CudaCapture, OperationsAreRefusedAndWorkAfterwards) {
  const torch::Tensor tensor = gpu_tensor({100}, torch::kFloat32);
  expect_refused("allreduce 'captured'",
                 [&] { allreduce(tensor, {.name = "captured", .op = ReduceOp::kSum}); });
  expect_refused("allreduce 'captured'",
                 [&] { allreduce_async(tensor, {.name = "captured", .op = ReduceOp::kSum}); });
  expect_refused("broadcast", [&] { broadcast(tensor, 0, {.name = "captured b"}); });
  expect_refused("allgather", [&] { allgather(tensor, {.name = "captured g"}); });
  const torch::Tensor sum = allreduce(tensor, {.name = "captured", .op = ReduceOp::kSum});
  EXPECT_TRUE(on_gpu(sum, reference_reduce(every_rank({100}, torch::kFloat32), ReduceOp::kSum)));
}

TEST_F(CudaCapture, OneRankIsRefusedAndJoinsTheOthersLater) {
  const torch::Tensor tensor = gpu_tensor({100}, torch::kFloat32);
  if (rank() == 0)
    expect_refused("allreduce", [&] { allreduce(tensor, {.name = "one", .op = ReduceOp::kSum}); });
  EXPECT_TRUE(on_gpu(allreduce(tensor, {.name = "one", .op = ReduceOp::kSum}),
                     reference_reduce(every_rank({100}, torch::kFloat32), ReduceOp::kSum)));
}

TEST_F(CudaCapture, ResultsCanBeWaitedForAfterwards) {
  const torch::Tensor tensor = gpu_tensor({100}, torch::kFloat32);
  const Handle handle = allreduce_async(tensor, {.name = "before", .op = ReduceOp::kSum});
  expect_refused("wait_for_event", [&] { handle.wait(); });
  EXPECT_TRUE(
      on_gpu(handle.wait(), reference_reduce(every_rank({100}, torch::kFloat32), ReduceOp::kSum)));
}

/// Trains while some ranks capture some steps, and drop or finish these. Afterwards the result
/// equals training without captures.
void train_with_a_captured_step(int capturing_ranks, const DistributedOptimizerOptions& options,
                                const std::function<void(const std::function<void()>&)>& refused) {
  for (int warm_up = 0; warm_up < 3; ++warm_up) {  // before and after there are buckets
    Training training(options);
    Training plain(options);
    for (int i = 0; i < warm_up; ++i) {
      training.step(i);
      plain.step(i);
    }
    training.optimizer->zero_grad();
    plain.optimizer->zero_grad();
    const torch::Tensor loss = training.loss(10);
    if (rank() < capturing_ranks) {
      refused([&] { loss.backward(); });
    } else {
      loss.backward();
    }
    if (capturing_ranks == size()) {
      training.optimizer->zero_grad();  // drops the step
    } else {
      training.optimizer->step();
      EXPECT_TRUE(same_on_all_ranks(training.values()));
    }
    for (int i = 0; i < 3; ++i) {
      training.step(20 + i);
      if (capturing_ranks == size()) plain.step(20 + i);
    }
    EXPECT_TRUE(same_on_all_ranks(training.values()));
    if (capturing_ranks == size()) expect_equal(training.values(), plain.values());
  }
}

TEST_F(CudaCapture, BackwardIsRefusedOnAllRanks) {
  for (const bool buckets : {true, false}) {
    train_with_a_captured_step(size(), {.gradient_as_bucket_view = buckets},
                               [&](const auto& call) { expect_refused("allreduce 'opt", call); });
  }
}

TEST_F(CudaCapture, BackwardIsRefusedOnOneRank) {
  if (size() == 1) GTEST_SKIP() << "there is no other rank";
  for (const bool buckets : {true, false}) {
    train_with_a_captured_step(1, {.gradient_as_bucket_view = buckets},
                               [&](const auto& call) { expect_refused("allreduce 'opt", call); });
  }
}

TEST_F(CudaCapture, StepIsRefusedAndCanBeRepeated) {
  for (int warm_up = 0; warm_up < 3; ++warm_up) {
    Training training;
    Training plain;
    for (int i = 0; i < warm_up; ++i) {
      training.step(i);
      plain.step(i);
    }
    training.optimizer->zero_grad();
    training.loss(10).backward();
    expect_refused("", [&] { training.optimizer->step(); });
    training.optimizer->step();
    plain.step(10);
    expect_equal(training.values(), plain.values());
  }
}

// Captures forward and backward under no_sync(), and calls step() outside the capture. The
// gradients of a replay, which calls no hooks, are reduced.
TEST_F(CudaCapture, ForwardAndBackwardCanBePartOfAGraph) {
  for (const bool buckets : {true, false}) {
    for (int warm_up = 0; warm_up < 3; ++warm_up) {  // before and after there are buckets
      Training training({.gradient_as_bucket_view = buckets});
      Training plain;
      for (int i = 0; i < warm_up; ++i) {
        training.step(10 + i);
        plain.step(10 + i);
      }
      training.optimizer->zero_grad();
      std::vector<torch::Tensor> memory;
      {
        const NoSync no_sync = training.optimizer->no_sync();
        const FakeCapture capture(stream());
        training.loss(0).backward();
        for (const torch::Tensor& parameter : training.net->parameters())
          memory.push_back(parameter.grad());
      }
      for (int step = 0; step < 4; ++step) {
        const std::vector<torch::Tensor> gradients =
            torch::autograd::grad({training.loss(step)}, training.net->parameters());
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i].copy_(gradients[i]);
        training.optimizer->step();
        plain.step(step);
        for (std::size_t i = 0; i < memory.size(); ++i)
          EXPECT_TRUE(training.net->parameters()[i].grad().is_set_to(memory[i])) << i;
      }
      expect_equal(training.values(), plain.values());
    }
  }
}

}  // namespace
}  // namespace hvd::testing
