#include <hvd/collectives.h>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

/// The first row of a member's share of `rows` rows.
std::int64_t first_row(std::int64_t rows, const ProcessSet& set, int position) {
  std::int64_t first = 0;
  for (int p = 0; p < position; ++p) first += rows_of_member(rows, set.size(), p);
  return first;
}

torch::Tensor own_rows(const torch::Tensor& whole, const ProcessSet& set) {
  const std::int64_t rows = whole.size(0);
  return whole.narrow(0, first_row(rows, set, set.rank()),
                      rows_of_member(rows, set.size(), set.rank()));
}

TEST(Reducescatter, EveryTypeAndNumberOfRowsMatchesASerialReference) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type :
         {torch::kUInt8, torch::kInt32, torch::kInt64, torch::kBool, torch::kFloat16,
          torch::kBFloat16, torch::kFloat32, torch::kFloat64}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        for (const std::int64_t rows : {0, 1, 2, 7, 12}) {
          SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::string(to_string(op)) + " " +
                       std::to_string(rows));
          const auto inputs = every_member(set, {rows, 3}, type);
          const AllreduceOptions options{.name = "matrix", .op = op, .process_set = set};
          if (type == torch::kBool && op == ReduceOp::kAverage) {
            EXPECT_THROW(reducescatter(own_of(inputs, set), options), UsageError);
            continue;
          }
          const torch::Tensor expected = own_rows(reference_reduce(inputs, op), set);
          const torch::Tensor result = reducescatter(own_of(inputs, set), options);
          EXPECT_TRUE(near(result, expected, 1e-3));
          EXPECT_TRUE(result.is_contiguous());
          EXPECT_TRUE(
              near(reducescatter_async(own_of(inputs, set), options).wait(), expected, 1e-3));
        }
      }
    }
  });
}

TEST(Reducescatter, StridesFactorsAndCompression) {
  for_each_set([](const ProcessSet& set) {
    const auto inputs = every_member(set, {3, 5}, torch::kFloat32);
    const torch::Tensor sum = own_rows(reference_reduce(inputs, ReduceOp::kSum).t(), set);
    AllreduceOptions options{.name = "scaled",
                             .op = ReduceOp::kSum,
                             .prescale_factor = 0.5,
                             .postscale_factor = 3,
                             .process_set = set};
    EXPECT_TRUE(near(reducescatter(own_of(inputs, set).t(), options), sum * 1.5));
    options.compression = Compression::kBFloat16;
    const torch::Tensor compressed = reducescatter(own_of(inputs, set).t() / 3, options);
    EXPECT_TRUE(near(compressed, sum * 0.5, 0.05));
    EXPECT_TRUE(torch::equal(compressed, compressed.to(torch::kBFloat16).to(torch::kFloat32)));
  });
}

TEST(Reducescatter, Grouped) {
  for_each_set([](const ProcessSet& set) {
    std::vector<torch::Tensor> own, expected;
    for (const int i : {0, 1, 2, 3, 4}) {
      const auto inputs = every_member(set, {i, 2}, torch::kFloat32, i);
      own.push_back(own_of(inputs, set));
      expected.push_back(own_rows(reference_reduce(inputs, ReduceOp::kSum), set));
    }
    const AllreduceOptions options{.name = "grouped", .op = ReduceOp::kSum, .process_set = set};
    const auto results = grouped_reducescatter(own, options);
    const auto later = grouped_reducescatter_async(own, options).wait_all();
    EXPECT_EQ(results.size(), own.size());
    EXPECT_EQ(later.size(), own.size());
    for (std::size_t i = 0; i < results.size() && i < later.size(); ++i) {
      EXPECT_TRUE(near(results[i], expected[i]));
      EXPECT_TRUE(near(later[i], expected[i]));
    }
  });
}

TEST(Reducescatter, MistakesOfOneRankAreUsageErrors) {
  const auto message = [](const torch::Tensor& tensor, const AllreduceOptions& options) {
    return message_of<UsageError>([&] { reducescatter(tensor, options); });
  };
  EXPECT_NE(message(torch::tensor(1.0), {.name = "loss"}).find("'loss'"), std::string::npos);
  for (const ReduceOp op :
       {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAdasum}) {
    const std::string text = message(torch::ones({4}), {.op = op});
    EXPECT_NE(text.find("got " + std::string(to_string(op))), std::string::npos) << text;
    EXPECT_THROW(grouped_reducescatter({torch::ones({4})}, {.op = op}), UsageError);
    EXPECT_THROW(reducescatter_async(torch::ones({4}), {.op = op}), UsageError);
  }
  EXPECT_THROW(reducescatter(torch::Tensor()), UsageError);
}

TEST(Reducescatter, ADisagreementReachesEveryRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  EXPECT_THROW(reducescatter(torch::ones({rank() == 0 ? 3 : 4}), {.name = "ragged"}),
               MismatchError);
  EXPECT_THROW(
      grouped_reducescatter({torch::ones({4}), torch::ones({rank() == 0 ? 3 : 4})}, {.name = "g"}),
      MismatchError);
  EXPECT_TRUE(near(reducescatter(torch::ones({size()}), {.name = "ragged"}), torch::ones({1})));
}

/// Rank r's loss is sum(weight_r * y_r).
torch::Tensor weight(int r, at::IntArrayRef shape) {
  return rank_tensor(r, shape, torch::kFloat64, /*seed=*/4) + 0.25;
}

torch::Tensor all_weights(const ProcessSet& set, std::int64_t rows) {
  std::vector<torch::Tensor> parts;
  for (int p = 0; p < set.size(); ++p) {
    parts.push_back(
        weight(set.ranks()[static_cast<std::size_t>(p)], {rows_of_member(rows, set.size(), p), 2}));
  }
  return torch::cat(parts);
}

TEST(Backward, OfAReducescatterIsAnAllgather) {
  for_each_set([](const ProcessSet& set) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      // With one row the other members get an empty share, and run backward too.
      for (const std::int64_t rows : {1, 5}) {
        const torch::Tensor x = rank_tensor(rank(), {rows, 2}, torch::kFloat64).requires_grad_();
        const torch::Tensor y = reducescatter(x, {.name = "y",
                                                  .op = op,
                                                  .prescale_factor = 3,
                                                  .postscale_factor = 0.5,
                                                  .process_set = set});
        EXPECT_TRUE(y.requires_grad());
        (weight(rank(), y.sizes()) * y).sum().backward();
        const double scale = op == ReduceOp::kSum ? 1.5 : 1.5 / set.size();
        EXPECT_TRUE(near(x.grad(), all_weights(set, rows) * scale));
      }
    }
  });
}

TEST(Backward, OfAGroupedReducescatterAndTwice) {
  for_each_set([](const ProcessSet& set) {
    const torch::Tensor x = rank_tensor(rank(), {3, 2}, torch::kFloat64).requires_grad_();
    const auto y = grouped_reducescatter({x, torch::ones({2})},
                                         {.name = "g", .op = ReduceOp::kSum, .process_set = set});
    EXPECT_FALSE(y[1].requires_grad());
    // f = sum over ranks of y^2: df/dx = 2 * the summed x, d2f/dx2 v = 2 * the summed v.
    const torch::Tensor gradient =
        torch::autograd::grad({y[0].square().sum()}, {x}, {}, /*retain_graph=*/true,
                              /*create_graph=*/true)[0];
    const auto inputs = every_member(set, {3, 2}, torch::kFloat64);
    EXPECT_TRUE(near(gradient.detach(), 2 * reference_reduce(inputs, ReduceOp::kSum)));
    gradient.sum().backward();
    EXPECT_TRUE(near(x.grad(), torch::full({3, 2}, 2.0 * set.size(), torch::kFloat64)));
  });
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(reducescatter(torch::ones({4}, torch::requires_grad())).requires_grad());
}

}  // namespace
}  // namespace hvd::testing
