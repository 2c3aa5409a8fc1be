#include <hvd/collectives.h>

#include <chrono>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

constexpr torch::ScalarType kTypes[] = {torch::kUInt8,   torch::kInt32,    torch::kInt64,
                                        torch::kFloat16, torch::kBFloat16, torch::kFloat32,
                                        torch::kFloat64};

/// The set's last member.
int root_of(const ProcessSet& set) { return set.ranks().back(); }

torch::Tensor at_root(const torch::Tensor& value, const ProcessSet& set) {
  return rank() == root_of(set) ? value : torch::zeros_like(value);
}

/// A member's rows of the root's tensor.
torch::Tensor share_of(const torch::Tensor& whole, const ProcessSet& set) {
  std::int64_t first = 0;
  for (int position = 0; position < set.rank(); ++position)
    first += rows_of_member(whole.size(0), set.size(), position);
  return whole.narrow(0, first, rows_of_member(whole.size(0), set.size(), set.rank()));
}

TEST(Reduce, GivesTheRootTheResultAndTheOthersZeros) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type : kTypes) {
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax}) {
        SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::string(to_string(op)));
        const auto inputs = every_member(set, {3, 5}, type);
        const torch::Tensor own = own_of(inputs, set).t();
        const torch::Tensor before = own.clone();
        const torch::Tensor expected = at_root(reference_reduce(inputs, op).t(), set);
        const AllreduceOptions options{.name = "reduce", .op = op, .process_set = set};
        const torch::Tensor result = reduce(own, root_of(set), options);
        EXPECT_TRUE(near(result, expected, 1e-3));
        EXPECT_TRUE(result.is_contiguous());
        EXPECT_TRUE(near(reduce_async(own, root_of(set), options).wait(), expected, 1e-3));
        EXPECT_TRUE(torch::equal(own, before));
      }
    }
  });
}

TEST(Reduce, InPlaceChangesTheRootsTensorOnly) {
  for_each_set([](const ProcessSet& set) {
    const auto inputs = every_member(set, {4, 2}, torch::kFloat32);
    const torch::Tensor sum = reference_reduce(inputs, ReduceOp::kSum);
    const AllreduceOptions options{.name = "in place", .op = ReduceOp::kSum, .process_set = set};
    for (const bool strided : {false, true}) {
      for (const bool blocking : {false, true}) {
        torch::Tensor own = own_of(inputs, set).clone();
        if (strided) own = own.t().clone().t();
        const torch::Tensor expected = rank() == root_of(set) ? sum : own.clone();
        const torch::Tensor result = blocking ? reduce_(own, root_of(set), options)
                                              : reduce_async_(own, root_of(set), options).wait();
        EXPECT_TRUE(result.is_same(own));
        EXPECT_TRUE(near(own, expected));
      }
    }
  });
}

TEST(Reduce, FactorsCompressionAndGroups) {
  for_each_set([](const ProcessSet& set) {
    std::vector<torch::Tensor> own, expected;
    for (const int i : {0, 1, 2}) {
      const auto inputs = every_member(set, {i, 2}, torch::kFloat32, i);
      own.push_back(own_of(inputs, set));
      expected.push_back(at_root(reference_reduce(inputs, ReduceOp::kSum) * 1.5, set));
    }
    AllreduceOptions options{.name = "group",
                             .op = ReduceOp::kSum,
                             .prescale_factor = 0.5,
                             .postscale_factor = 3,
                             .process_set = set};
    const auto results = grouped_reduce(own, root_of(set), options);
    const auto later = grouped_reduce_async(own, root_of(set), options).wait_all();
    ASSERT_EQ(results.size(), own.size());
    ASSERT_EQ(later.size(), own.size());
    for (std::size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(near(results[i], expected[i]));
      EXPECT_TRUE(near(later[i], expected[i]));
    }
    options.compression = Compression::kBFloat16;
    for (const torch::ScalarType type : {torch::kFloat32, torch::kFloat64}) {
      const torch::Tensor compressed = reduce(own[2].to(type), root_of(set), options);
      EXPECT_TRUE(near(compressed, expected[2].to(type), 0.05));
    }
  });
}

TEST(Reduce, BackwardIsABroadcastFromTheRoot) {
  for_each_set([](const ProcessSet& set) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      const torch::Tensor x =
          own_of(every_member(set, {2, 3}, torch::kFloat64), set).clone().requires_grad_();
      const torch::Tensor y = reduce(x, root_of(set),
                                     {.name = "y",
                                      .op = op,
                                      .prescale_factor = 2,
                                      .postscale_factor = 0.25,
                                      .process_set = set});
      // The other ranks' gradients differ and are not used.
      (y * (rank() + 1.0)).sum().backward();
      const double divisor = op == ReduceOp::kAverage ? set.size() : 1;
      EXPECT_TRUE(
          near(x.grad(), torch::full_like(x, 0.5 * (root_of(set) + 1.0) / divisor).detach()));
    }
  });
}

TEST(Reduce, WrongCallsAreRefused) {
  const torch::Tensor x = torch::ones({2}, torch::requires_grad());
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { reduce(x, 0, {.name = "max", .op = ReduceOp::kMax}); }),
               "reduce 'max': max is not differentiable"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { reduce_async(x, 0); }), "asynchronous"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { reduce(x.detach(), size(), {.name = "r"}); }),
                       "root rank " + std::to_string(size()) + " is not in process set 0"));
  EXPECT_THROW(reduce(torch::Tensor(), 0), UsageError);
  EXPECT_THROW(reduce_(torch::ones({1}).expand({3}), 0), UsageError);
  if (size() == 1) return;
  EXPECT_TRUE(contains(
      message_of<MismatchError>([&] { reduce(x.detach(), rank() == 0 ? 0 : 1, {.name = "x"}); }),
      "root differs"));
}

TEST(Scatter, SharesOutTheRootsRows) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type : kTypes) {
      for (const std::int64_t rows : {0, 1, 2, 7, 12}) {
        SCOPED_TRACE(std::string(c10::toString(type)) + " " + std::to_string(rows));
        const bool root = rank() == root_of(set);
        const torch::Tensor whole = rank_tensor(root_of(set), {rows, 3}, type);
        // The rows of the other ranks' tensors are not used.
        const torch::Tensor own = root ? whole : rank_tensor(rank(), {rank(), 3}, type);
        const torch::Tensor expected = share_of(whole, set);
        const CollectiveOptions options{.name = "rows", .process_set = set};
        const torch::Tensor result = scatter(own, root_of(set), options);
        EXPECT_TRUE(near(result, expected));
        EXPECT_TRUE(near(scatter_async(own, root_of(set), options).wait(), expected));
        const torch::Tensor none = torch::empty({0, 3}, own.options());
        EXPECT_TRUE(near(scatter(root ? whole : none, root_of(set), options), expected));
      }
    }
    const torch::Tensor columns = rank_tensor(root_of(set), {3, 5}, torch::kFloat32).t();
    EXPECT_TRUE(near(scatter(columns, root_of(set), {.name = "strided", .process_set = set}),
                     share_of(columns.contiguous(), set)));
  });
}

TEST(Scatter, AGroupIsScatteredTogether) {
  for_each_set([](const ProcessSet& set) {
    const bool root = rank() == root_of(set);
    std::vector<torch::Tensor> own, expected;
    for (const std::int64_t rows : {1, 5, 12}) {
      const torch::Tensor whole =
          rank_tensor(root_of(set), {rows, 3}, torch::kFloat64, static_cast<int>(rows));
      own.push_back((root ? whole : torch::zeros({0, 3}, whole.options())).requires_grad_());
      expected.push_back(share_of(whole.detach(), set));
    }
    const CollectiveOptions options{.name = "group", .process_set = set};
    const auto results = grouped_scatter(own, root_of(set), options);
    std::vector<torch::Tensor> detached;
    for (const torch::Tensor& tensor : own) detached.push_back(tensor.detach());
    const auto later = grouped_scatter_async(detached, root_of(set), options).wait_all();
    ASSERT_EQ(results.size(), own.size());
    ASSERT_EQ(later.size(), own.size());
    torch::Tensor sum = torch::zeros({}, torch::kFloat64);
    for (std::size_t i = 0; i < own.size(); ++i) {
      EXPECT_TRUE(near(results[i].detach(), expected[i]));
      EXPECT_TRUE(near(later[i], expected[i]));
      sum = sum + results[i].sum() * static_cast<double>(i + 1);
    }
    sum.backward();
    for (std::size_t i = 0; i < own.size(); ++i)
      EXPECT_TRUE(near(own[i].grad(), torch::full_like(own[i], i + 1.0).detach()));
  });
  EXPECT_THROW(grouped_scatter_async({torch::ones({2}, torch::requires_grad())}, 0), UsageError);
}

TEST(Scatter, BackwardIsAGatherToTheRoot) {
  for_each_set([](const ProcessSet& set) {
    const std::int64_t rows = 2 * set.size() + 1;
    const bool root = rank() == root_of(set);
    const torch::Tensor x = torch::ones({root ? rows : 1, 2}, torch::kFloat64).requires_grad_();
    const torch::Tensor y = scatter(x, root_of(set), {.name = "y", .process_set = set});
    (y * (rank() + 1.0)).sum().backward();
    std::vector<torch::Tensor> parts;
    for (int position = 0; position < set.size(); ++position) {
      parts.push_back(torch::full({rows_of_member(rows, set.size(), position), 2},
                                  set.ranks()[static_cast<std::size_t>(position)] + 1.0,
                                  torch::kFloat64));
    }
    EXPECT_TRUE(near(x.grad(), root ? torch::cat(parts) : torch::zeros_like(x).detach()));
  });
}

TEST(Scatter, WrongCallsAreRefused) {
  EXPECT_TRUE(contains(message_of<UsageError>([] { scatter(torch::tensor(1.0), 0); }),
                       "a scalar has no rows to scatter"));
  EXPECT_TRUE(contains(message_of<UsageError>([] { scatter(torch::ones({2}), size()); }),
                       "is not in process set 0"));
  EXPECT_THROW(scatter_async(torch::ones({2}, torch::requires_grad()), 0), UsageError);
  if (size() == 1) return;
  const auto type = rank() == 0 ? torch::kFloat32 : torch::kFloat64;
  EXPECT_TRUE(contains(
      message_of<MismatchError>([&] { scatter(torch::ones({2, 2}, type), 0, {.name = "types"}); }),
      "dtype differs"));
  const std::int64_t width = rank() == 0 ? 2 : 3;
  EXPECT_TRUE(contains(
      message_of<MismatchError>([&] { scatter(torch::ones({2, width}), 0, {.name = "widths"}); }),
      "shape after the first dimension differs"));
}

TEST(Bitwise, AllreduceOfIntegersAndBools) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type :
         {torch::kUInt8, torch::kInt8, torch::kInt16, torch::kInt32, torch::kInt64, torch::kBool}) {
      const auto inputs = every_member(set, {37}, type);
      torch::Tensor all_bits = inputs[0], any = inputs[0], odd = inputs[0];
      for (std::size_t i = 1; i < inputs.size(); ++i) {
        all_bits = torch::bitwise_and(all_bits, inputs[i]);
        any = torch::bitwise_or(any, inputs[i]);
        odd = torch::bitwise_xor(odd, inputs[i]);
      }
      const auto combined = [&](ReduceOp op) {
        return allreduce(own_of(inputs, set), {.name = "bits", .op = op, .process_set = set});
      };
      EXPECT_TRUE(torch::equal(combined(ReduceOp::kBitAnd), all_bits)) << type;
      EXPECT_TRUE(torch::equal(combined(ReduceOp::kBitOr), any)) << type;
      EXPECT_TRUE(torch::equal(combined(ReduceOp::kBitXor), odd)) << type;
    }
  });
  EXPECT_TRUE(contains(message_of<UsageError>([] {
                         allreduce(torch::ones({2}), {.name = "f", .op = ReduceOp::kBitOr});
                       }),
                       "bit_or is for integers and bool, got float32"));
}

TEST(HandleWaitFor, ReturnsWhetherAllIsDone) {
  using std::chrono::milliseconds;
  EXPECT_THROW((void)Handle().wait_for(milliseconds(1)), UsageError);
  const AllreduceOptions options{.name = "late", .op = ReduceOp::kSum};
  const torch::Tensor ones = torch::ones({3});
  const std::vector<torch::Tensor> group = {ones, ones * 2};
  Handle handle;
  if (rank() == 0) {
    handle = grouped_allreduce_async(group, options);
    EXPECT_EQ(handle.wait_for(milliseconds(20)),
              size() == 1);  // the other ranks wait at the barrier
    EXPECT_EQ(handle.wait_for(milliseconds(0)), size() == 1);
  }
  barrier();
  if (rank() != 0) handle = grouped_allreduce_async(group, options);
  EXPECT_TRUE(handle.wait_for(std::chrono::nanoseconds::max()));
  EXPECT_TRUE(handle.wait_for(std::chrono::seconds(-1)));
  EXPECT_TRUE(near(handle.wait_all()[1], ones * (2 * size())));
}

}  // namespace
}  // namespace hvd::testing
