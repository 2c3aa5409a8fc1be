#include <numeric>

#include "torch/support/torch_test.h"

// Alltoall, gather, and allgather along any dimension.

namespace hvd::testing {
namespace {

const std::vector<torch::ScalarType> kTypes = {torch::kUInt8,   torch::kInt64,   torch::kBool,
                                               torch::kFloat16, torch::kFloat32, torch::kFloat64};

/// The number of rows from member `from` to member `to`: different, and sometimes 0.
std::int64_t rows_between(int from, int to) { return (from + 2 * to) % 3; }

std::vector<std::int64_t> splits_of(int from, const ProcessSet& set) {
  std::vector<std::int64_t> splits;
  for (int to = 0; to < set.size(); ++to) splits.push_back(rows_between(from, to));
  return splits;
}

std::int64_t total(const std::vector<std::int64_t>& splits) {
  return std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
}

/// The rows of `from` that go to member `to`.
torch::Tensor part(const torch::Tensor& all, int from, int to) {
  std::int64_t first = 0;
  for (int t = 0; t < to; ++t) first += rows_between(from, t);
  return all.narrow(0, first, rows_between(from, to));
}

struct Exchange {
  std::vector<torch::Tensor> inputs;
  torch::Tensor splits, received, expected;

  Exchange(const ProcessSet& set, torch::ScalarType type) {
    std::vector<torch::Tensor> parts;
    std::vector<std::int64_t> rows;
    for (int from = 0; from < set.size(); ++from) {
      const int world = set.ranks()[static_cast<std::size_t>(from)];
      inputs.push_back(rank_tensor(world, {total(splits_of(from, set)), 2}, type));
      parts.push_back(part(inputs.back(), from, set.rank()));
      rows.push_back(rows_between(from, set.rank()));
    }
    splits = torch::tensor(splits_of(set.rank(), set));
    received = torch::tensor(rows, torch::kInt64);
    expected = torch::cat(parts);
  }
};

TEST(Alltoall, UnevenSplitsOfEveryType) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type : kTypes) {
      SCOPED_TRACE(c10::toString(type));
      const Exchange exchange(set, type);
      const torch::Tensor& own = own_of(exchange.inputs, set);
      const CollectiveOptions options{.name = "uneven", .process_set = set};
      const AlltoallResult result = alltoall(own, exchange.splits, options);
      EXPECT_TRUE(near(result.output, exchange.expected));
      EXPECT_TRUE(result.output.is_contiguous());
      EXPECT_TRUE(near(result.received_splits, exchange.received));
      const auto later = alltoall_async(own, exchange.splits.to(torch::kInt32), options).wait_all();
      EXPECT_EQ(later.size(), 2U);
      EXPECT_TRUE(near(later[0], exchange.expected));
      EXPECT_TRUE(near(later[1], exchange.received));
    }
  });
}

TEST(Alltoall, WithoutSplitsEqualShares) {
  for_each_set([](const ProcessSet& set) {
    for (const std::int64_t share : {0, 1, 3}) {
      const auto inputs = every_member(set, {2, share * set.size()}, torch::kFloat32);
      std::vector<torch::Tensor> parts;
      for (const auto& input : inputs)
        parts.push_back(input.t().narrow(0, share * set.rank(), share));
      const AlltoallResult result =
          alltoall(own_of(inputs, set).t(), {}, {.name = "equal", .process_set = set});
      EXPECT_TRUE(near(result.output, torch::cat(parts)));
      EXPECT_TRUE(near(result.received_splits, torch::full({set.size()}, share, torch::kInt64)));
    }
  });
}

TEST(Alltoall, AllRowsToOneRankAndNone) {
  // Every rank sends rank + 1 rows to the last rank.
  const int last = size() - 1;
  torch::Tensor splits = torch::zeros({size()}, torch::kInt32);
  splits[last] = rank() + 1;
  const AlltoallResult result =
      alltoall(rank_tensor(rank(), {rank() + 1, 3}, torch::kFloat32), splits, {.name = "one"});
  std::vector<torch::Tensor> all;
  for (int r = 0; r < size(); ++r) all.push_back(rank_tensor(r, {r + 1, 3}, torch::kFloat32));
  EXPECT_TRUE(near(result.output, rank() == last ? torch::cat(all) : torch::empty({0, 3})));
  EXPECT_EQ(result.received_splits.sum().item<std::int64_t>(),
            rank() == last ? size() * (size() + 1) / 2 : 0);
}

TEST(Alltoall, SplitsThatDoNotFitAreUsageErrors) {
  const std::int64_t n = size();
  const torch::Tensor own = torch::ones({2 * n, 2});
  const auto message = [&](const torch::Tensor& tensor, const torch::Tensor& splits) {
    return message_of<UsageError>([&] { alltoall(tensor, splits, {.name = "rows"}); });
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(message(torch::tensor(1.0), {}), "'rows'");
  if (n > 1) contains(message(torch::ones({2 * n + 1}), {}), "got " + std::to_string(2 * n + 1));
  contains(message(own, torch::ones({n + 1}, torch::kInt64)), "[" + std::to_string(n + 1) + "]");
  contains(message(own, torch::ones({n, 1}, torch::kInt64)), "shape");
  contains(message(own, torch::ones({n})), "Float");
  contains(message(own, torch::ones({n}, torch::kInt64)), "add up to " + std::to_string(n));
  torch::Tensor negative = torch::full({n}, 2, torch::kInt64);
  negative[0] = -1;
  contains(message(own, negative), "-1");
  EXPECT_THROW(alltoall_async(own, negative), UsageError);
  EXPECT_THROW(alltoall(torch::Tensor()), UsageError);
}

TEST(Alltoall, ADisagreementReachesEveryRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  EXPECT_THROW(alltoall(torch::ones({size(), rank() == 0 ? 2 : 3}), {}, {.name = "ragged"}),
               MismatchError);
  const auto type = rank() == 0 ? torch::kFloat32 : torch::kFloat64;
  EXPECT_THROW(alltoall(torch::ones({size()}, type), {}, {.name = "ragged"}), MismatchError);
  EXPECT_TRUE(
      near(alltoall(torch::ones({size()}), {}, {.name = "ragged"}).output, torch::ones({size()})));
}

/// Rank r's loss is sum(weight_r * y_r).
torch::Tensor weight(int r, at::IntArrayRef shape) {
  return rank_tensor(r, shape, torch::kFloat64, /*seed=*/3) + 0.5;
}

TEST(Backward, OfAnAlltoallIsTheReverseExchange) {
  for_each_set([](const ProcessSet& set) {
    const Exchange exchange(set, torch::kFloat64);
    const torch::Tensor x = own_of(exchange.inputs, set).clone().requires_grad_();
    const AlltoallResult y = alltoall(x, exchange.splits, {.name = "forward", .process_set = set});
    EXPECT_FALSE(y.received_splits.requires_grad());
    (weight(rank(), y.output.sizes()) * y.output).sum().backward();
    // The weight that each member `to` gave to this rank's rows.
    std::vector<torch::Tensor> parts;
    for (int to = 0; to < set.size(); ++to) {
      std::int64_t first = 0, rows = 0;
      for (int from = 0; from < set.size(); ++from) {
        if (from < set.rank()) first += rows_between(from, to);
        rows += rows_between(from, to);
      }
      parts.push_back(weight(set.ranks()[static_cast<std::size_t>(to)], {rows, 2})
                          .narrow(0, first, rows_between(set.rank(), to)));
    }
    EXPECT_TRUE(near(x.grad(), torch::cat(parts)));

    // Second derivative: the gradient of sum(y^2) is 2x, whose gradient is 2.
    const torch::Tensor z = alltoall(x, exchange.splits, {.process_set = set}).output;
    const torch::Tensor gradient = torch::autograd::grad(
        {z.square().sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    EXPECT_TRUE(near(gradient.detach(), 2 * x.detach()));
    x.mutable_grad().reset();
    gradient.sum().backward();
    EXPECT_TRUE(near(x.grad(), torch::full_like(x, 2.0).detach()));
  });
}

TEST(Gather, RaggedRowsAtEveryDestination) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type : kTypes) {
      for (const int destination : set.ranks()) {
        SCOPED_TRACE(std::string(c10::toString(type)) + " at " + std::to_string(destination));
        std::vector<torch::Tensor> parts;
        // The set's last member has no rows.
        for (const int r : set.ranks())
          parts.push_back(rank_tensor(r, {r == set.ranks().back() ? 0 : r + 1, 3}, type));
        const CollectiveOptions options{.name = "ragged", .process_set = set};
        const torch::Tensor& own = own_of(parts, set);
        for (const torch::Tensor& result :
             {gather(own, destination, options), gather_async(own, destination, options).wait()}) {
          EXPECT_EQ(result.defined(), rank() == destination);
          if (rank() == destination) {
            EXPECT_TRUE(near(result, torch::cat(parts)));
          }
        }
      }
    }
  });
}

TEST(Gather, ScalarsAndStrides) {
  const torch::Tensor ranks = gather(torch::tensor(rank()), 0);
  const auto inputs = every_rank({2, 3}, torch::kInt32);
  const torch::Tensor columns = gather(inputs[static_cast<std::size_t>(rank())].t(), 0);
  if (rank() != 0) return;
  EXPECT_TRUE(torch::equal(ranks, torch::arange(size(), ranks.options())));
  std::vector<torch::Tensor> transposed;
  for (const torch::Tensor& input : inputs) transposed.push_back(input.t());
  EXPECT_TRUE(torch::equal(columns, torch::cat(transposed)));
}

TEST(Gather, WrongCallsAreUsageErrors) {
  EXPECT_THROW(gather(torch::ones({2}), size()), UsageError);
  EXPECT_THROW(gather(torch::ones({2}), -1), UsageError);
  const torch::Tensor x = torch::ones({2}, torch::requires_grad());
  EXPECT_NE(message_of<UsageError>([&] { gather(x, 0, {.name = "g"}); }).find("requires grad"),
            std::string::npos);
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(gather(x, 0, {.name = "g"}).defined(), rank() == 0);
}

TEST(Gather, ADisagreementReachesEveryRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  EXPECT_THROW(gather(torch::ones({2}), rank() == 0 ? 0 : 1, {.name = "roots"}), MismatchError);
  EXPECT_THROW(gather(torch::ones({1, rank() == 0 ? 2 : 3}), 0, {.name = "roots"}), MismatchError);
  EXPECT_EQ(gather(torch::ones({2}), 1, {.name = "roots"}).defined(), rank() == 1);
}

TEST(AllGatherIntoTensor, AlongEveryDimension) {
  for_each_set([](const ProcessSet& set) {
    for (const std::int64_t dim : {-3, -2, -1, 0, 1, 2}) {
      SCOPED_TRACE(dim);
      std::vector<torch::Tensor> parts;
      for (const int r : set.ranks()) {
        std::vector<std::int64_t> shape{2, 3, 4};
        shape[static_cast<std::size_t>((dim + 3) % 3)] = r;  // rank 0 has no rows
        parts.push_back(rank_tensor(r, shape, torch::kFloat32));
      }
      const torch::Tensor result =
          all_gather_into_tensor(own_of(parts, set), dim, {.name = "dims", .process_set = set});
      EXPECT_TRUE(near(result, torch::cat(parts, dim)));
      EXPECT_TRUE(result.is_contiguous());
    }
  });
  for (const std::int64_t dim : {0, -1}) {
    const torch::Tensor ranks = all_gather_into_tensor(torch::tensor(rank()), dim);
    EXPECT_TRUE(torch::equal(ranks, torch::arange(size(), ranks.options())));
  }
}

TEST(AllGatherIntoTensor, DimensionsThatDoNotExistAreUsageErrors) {
  for (const std::int64_t dim : {2, -3}) {
    const std::string text = message_of<UsageError>(
        [&] { all_gather_into_tensor(torch::ones({2, 2}), dim, {.name = "dims"}); });
    EXPECT_NE(text.find("got " + std::to_string(dim)), std::string::npos) << text;
  }
  EXPECT_THROW(all_gather_into_tensor(torch::tensor(1.0), 1), UsageError);
  EXPECT_THROW(all_gather_into_tensor(torch::Tensor(), 0), UsageError);
}

TEST(Backward, OfAllGatherIntoTensorIsTheOwnSlice) {
  for_each_set([](const ProcessSet& set) {
    std::int64_t columns = 0, first = 0;
    for (const int r : set.ranks()) {
      if (r < rank()) first += r + 1;
      columns += r + 1;
    }
    const torch::Tensor x = rank_tensor(rank(), {2, rank() + 1}, torch::kFloat64).requires_grad_();
    const torch::Tensor y = all_gather_into_tensor(x, 1, {.name = "y", .process_set = set});
    (weight(rank(), {2, columns}) * y).sum().backward();
    torch::Tensor sum = torch::zeros({2, columns}, torch::kFloat64);
    for (const int r : set.ranks()) sum = sum + weight(r, {2, columns});
    EXPECT_TRUE(near(x.grad(), sum.narrow(1, first, rank() + 1)));
  });
}

TEST(Backward, OfTheOtherCollectivesInAProcessSet) {
  for_each_set([](const ProcessSet& set) {
    torch::Tensor sum = torch::zeros({2}, torch::kFloat64);
    for (const int r : set.ranks()) sum = sum + weight(r, {2});
    const torch::Tensor x = rank_tensor(rank(), {2}, torch::kFloat64).requires_grad_();
    (weight(rank(), {2}) * allreduce(x, {.name = "a", .process_set = set})).sum().backward();
    EXPECT_TRUE(near(x.grad(), sum / set.size()));
    x.mutable_grad().reset();
    const int root = set.ranks().back();
    (weight(rank(), {2}) * broadcast(x, root, {.name = "b", .process_set = set})).sum().backward();
    EXPECT_TRUE(near(x.grad(), rank() == root ? sum : torch::zeros_like(sum)));
    x.mutable_grad().reset();
    const torch::Tensor all = allgather(x, {.name = "g", .process_set = set});
    (weight(rank(), all.sizes()) * all).sum().backward();
    torch::Tensor whole = torch::zeros({2 * set.size()}, torch::kFloat64);
    for (const int r : set.ranks()) whole = whole + weight(r, {2 * set.size()});
    EXPECT_TRUE(near(x.grad(), whole.narrow(0, 2 * set.rank(), 2)));
  });
}

}  // namespace
}  // namespace hvd::testing
