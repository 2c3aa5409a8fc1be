#include <functional>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

/// Rank r's loss is sum(weight_r * y_r), so the gradient that arrives at y_r is weight_r.
torch::Tensor weight_of(int r, at::IntArrayRef shape) {
  return rank_tensor(r, shape, torch::kFloat64, /*seed=*/9) + 0.5;
}

torch::Tensor leaf(at::IntArrayRef shape) {
  return rank_tensor(rank(), shape, torch::kFloat64).requires_grad_();
}

torch::Tensor summed_weights(at::IntArrayRef shape) {
  torch::Tensor sum = torch::zeros(shape, torch::kFloat64);
  for (int r = 0; r < size(); ++r) sum = sum + weight_of(r, shape);
  return sum;
}

TEST(Backward, OfASumIsASumAndOfAnAverageAnAverage) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    const torch::Tensor x = leaf({3, 2});
    const torch::Tensor y =
        allreduce(x, {.name = "y", .op = op, .prescale_factor = 2, .postscale_factor = 0.25});
    EXPECT_TRUE(y.requires_grad());
    (weight_of(rank(), {3, 2}) * y).sum().backward();
    const double scale = op == ReduceOp::kSum ? 0.5 : 0.5 / size();
    EXPECT_TRUE(near(x.grad(), summed_weights({3, 2}) * scale));
  }
}

TEST(Backward, OfAnAllgatherIsTheOwnSliceOfTheSummedGradient) {
  const int rows = rank() + 1;
  const int total = size() * (size() + 1) / 2;
  const int first = rank() * (rank() + 1) / 2;
  const torch::Tensor x = leaf({rows, 2});
  const torch::Tensor y = allgather(x, {.name = "g"});
  (weight_of(rank(), {total, 2}) * y).sum().backward();
  EXPECT_TRUE(near(x.grad(), summed_weights({total, 2}).narrow(0, first, rows)));

  const torch::Tensor scalar = torch::tensor(1.0 + rank(), torch::kFloat64).requires_grad_();
  (weight_of(rank(), {size()}) * allgather(scalar)).sum().backward();
  EXPECT_TRUE(near(scalar.grad(), summed_weights({size()})[rank()]));
}

TEST(Backward, OfAnAllgatherOfEqualSharesMovesNoMoreThanTheShares) {
  const torch::Tensor x = leaf({2, 3});
  const torch::Tensor y = allgather(x, {.name = "equal"});
  const torch::Tensor weight = weight_of(rank(), {2 * size(), 3});
  const torch::Tensor expected = summed_weights({2 * size(), 3}).narrow(0, 2 * rank(), 2);
  if (rank() == 0 && size() > 1) {  // an error on all ranks if backward ran another operation
    EXPECT_TRUE(
        near(reducescatter(weight, {.name = "equal.backward", .op = ReduceOp::kSum}), expected));
  } else {
    (weight * y).sum().backward();
    EXPECT_TRUE(near(x.grad(), expected));
  }
}

TEST(Asynchronous, ATensorThatRequiresGradIsAUsageError) {
  const torch::Tensor x = leaf({2 * size()});
  const std::vector<std::function<Handle()>> calls = {
      [&] { return allreduce_async(x); },
      [&] { return allgather_async(x); },
      [&] { return broadcast_async(x, 0); },
      [&] { return reducescatter_async(x); },
      [&] { return alltoall_async(x); },
      [&] { return gather_async(x, 0); },
      [&] { return grouped_allreduce_async({x}); },
      [&] { return grouped_allgather_async({x}); },
      [&] { return grouped_reducescatter_async({x}); }};
  for (const auto& call : calls) {
    const std::string message = message_of<UsageError>([&] { call(); });
    EXPECT_NE(message.find("detach()"), std::string::npos) << message;
    const torch::NoGradGuard no_grad;  // no derivative is recorded
    EXPECT_FALSE(call().wait_all().empty());
  }
}

TEST(Backward, OfASumOfComplexNumbers) {
  const torch::Tensor x = torch::full({2}, c10::complex<double>(1, rank())).requires_grad_();
  const torch::Tensor y = allreduce(x, {.name = "complex", .op = ReduceOp::kSum});
  EXPECT_EQ(y[0].item<c10::complex<double>>(),
            c10::complex<double>(size(), size() * (size() - 1) / 2.0));
  const torch::Tensor mean = allreduce(x.detach().conj(), {.name = "conjugated"});
  EXPECT_EQ(mean[1].item<c10::complex<double>>(), c10::complex<double>(1, -(size() - 1) / 2.0));
  torch::real(y).sum().backward();
  EXPECT_EQ(x.grad()[0].item<c10::complex<double>>(), c10::complex<double>(size(), 0));
  EXPECT_THROW(allreduce(x.detach(), {.op = ReduceOp::kMax}), UsageError);
}

TEST(Backward, OfABroadcastIsASumAtTheRootAndZerosElsewhere) {
  const int root = size() - 1;
  const torch::Tensor x = leaf({4});
  (weight_of(rank(), {4}) * broadcast(x, root, {.name = "b"})).sum().backward();
  EXPECT_TRUE(
      near(x.grad(), rank() == root ? summed_weights({4}) : torch::zeros({4}, torch::kFloat64)));
}

TEST(Backward, OfAGroup) {
  const torch::Tensor x = leaf({3});
  const torch::Tensor plain = torch::ones({2}, torch::kFloat64);
  const torch::Tensor z = leaf({2, 2});
  const auto y = grouped_allreduce({x, plain, z}, {.name = "group", .op = ReduceOp::kSum});
  EXPECT_FALSE(y[1].requires_grad());
  ((weight_of(rank(), {3}) * y[0]).sum() + (weight_of(rank(), {2, 2}) * y[2]).sum()).backward();
  EXPECT_TRUE(near(x.grad(), summed_weights({3})));
  EXPECT_TRUE(near(z.grad(), summed_weights({2, 2})));

  const torch::Tensor u = leaf({2});
  const auto gathered = grouped_allgather({u}, {.name = "gathered"});
  (weight_of(rank(), {2 * size()}) * gathered[0]).sum().backward();
  EXPECT_TRUE(near(u.grad(), summed_weights({2 * size()}).narrow(0, 2 * rank(), 2)));
}

TEST(Backward, ThroughTwoCollectivesAndTwice) {
  const torch::Tensor x = leaf({3});
  // f = sum over ranks of (s^2), s = sum over ranks of x: df/dx = 2 s size, d2f/dx2 v = 2 size
  // sum(v).
  const torch::Tensor s = allreduce(x, {.op = ReduceOp::kSum});
  const torch::Tensor f = allreduce(s.square().sum(), {.op = ReduceOp::kSum});
  const torch::Tensor gradient =
      torch::autograd::grad({f}, {x}, {torch::ones_like(f)},
                            /*retain_graph=*/true, /*create_graph=*/true)[0];
  const torch::Tensor total = reference_reduce(every_rank({3}, torch::kFloat64), ReduceOp::kSum);
  // The backward of f adds the ones of every rank.
  EXPECT_TRUE(near(gradient, 2.0 * size() * size() * total));
  gradient.sum().backward();
  EXPECT_TRUE(near(x.grad(), torch::full({3}, 2.0 * size() * size() * size(), torch::kFloat64)));
}

TEST(Backward, OperationsWithoutADerivativeAreAUsageError) {
  const torch::Tensor x = leaf({3});
  for (const ReduceOp op :
       {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAdasum}) {
    const std::string message =
        message_of<UsageError>([&] { allreduce(x, {.name = "n", .op = op}); });
    EXPECT_NE(message.find(to_string(op)), std::string::npos) << message;
    EXPECT_THROW(grouped_allreduce({x}, {.op = op}), UsageError);
  }
  EXPECT_FALSE(allreduce(x.detach(), {.op = ReduceOp::kMax}).requires_grad());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(allreduce(x, {.op = ReduceOp::kMax}).requires_grad());
  EXPECT_FALSE(allreduce(x).requires_grad());
  EXPECT_FALSE(allgather(x).requires_grad());
}

}  // namespace
}  // namespace hvd::testing
