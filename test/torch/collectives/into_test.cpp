#include <hvd/collectives.h>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

/// Checks that blocking and asynchronous calls write to the caller's tensor and return it.
void expect_into(const torch::Tensor& output, const torch::Tensor& expected,
                 const std::function<torch::Tensor()>& blocking,
                 const std::function<Handle()>& asynchronous) {
  const void* const memory = output.data_ptr();
  for (const bool async : {false, true}) {
    output.zero_();
    const auto version = output._version();
    const torch::Tensor result = async ? asynchronous().wait() : blocking();
    EXPECT_TRUE(result.is_same(output));
    EXPECT_EQ(output.data_ptr(), memory);
    EXPECT_GT(output._version(), version);
    EXPECT_TRUE(near(output, expected, 1e-3));
  }
}

std::int64_t first_row(std::int64_t rows, const ProcessSet& set, int position) {
  std::int64_t first = 0;
  for (int p = 0; p < position; ++p) first += rows_of_member(rows, set.size(), p);
  return first;
}

torch::Tensor own_rows(const torch::Tensor& whole, const ProcessSet& set) {
  return whole.narrow(0, first_row(whole.size(0), set, set.rank()),
                      rows_of_member(whole.size(0), set.size(), set.rank()));
}

TEST(Into, AllreduceAndBroadcast) {
  for_each_set([](const ProcessSet& set) {
    for (const torch::ScalarType type : {torch::kFloat32, torch::kFloat64, torch::kInt64}) {
      const auto inputs = every_member(set, {3, 4}, type);
      const torch::Tensor own = own_of(inputs, set).t();
      const torch::Tensor output = torch::empty({4, 3}, type);
      for (const Compression compression : {Compression::kNone, Compression::kBFloat16}) {
        const AllreduceOptions options{
            .name = "sum", .op = ReduceOp::kSum, .compression = compression, .process_set = set};
        expect_into(
            output, reference_reduce(inputs, ReduceOp::kSum).t(),
            [&] { return allreduce_into(output, own, options); },
            [&] { return allreduce_into_async(output, own, options); });
      }
      const int root = set.ranks().back();
      const CollectiveOptions options{.name = "copy", .process_set = set};
      expect_into(
          output, inputs.back().t(), [&] { return broadcast_into(output, own, root, options); },
          [&] { return broadcast_into_async(output, own, root, options); });
      EXPECT_TRUE(torch::equal(own, own_of(inputs, set).t()));
    }
    // The output is the input.
    torch::Tensor own = own_of(every_member(set, {5}, torch::kFloat32), set).clone();
    const torch::Tensor expected =
        reference_reduce(every_member(set, {5}, torch::kFloat32), ReduceOp::kSum);
    allreduce_into(own, own, {.name = "itself", .op = ReduceOp::kSum, .process_set = set});
    EXPECT_TRUE(near(own, expected));
  });
}

TEST(Into, AllgatherOfEqualAndOtherRows) {
  for_each_set([](const ProcessSet& set) {
    for (const bool equal : {true, false}) {
      std::vector<torch::Tensor> rows;
      std::int64_t before = 0;
      for (const int member : set.ranks()) {
        if (member < rank()) before += equal ? 2 : member + 1;
        rows.push_back(rank_tensor(member, {equal ? 2 : member + 1, 3}, torch::kFloat32));
      }
      const torch::Tensor own = own_of(rows, set);
      const torch::Tensor output = torch::empty_like(torch::cat(rows));
      const CollectiveOptions options{.name = "rows", .process_set = set};
      expect_into(
          output, torch::cat(rows), [&] { return allgather_into(output, own, options); },
          [&] { return allgather_into_async(output, own, options); });
      // In place: the input is this rank's rows of the output.
      torch::Tensor whole = torch::zeros_like(output);
      const torch::Tensor part = whole.narrow(0, before, own.size(0));
      part.copy_(own);
      allgather_into(whole, part, options);
      EXPECT_TRUE(near(whole, torch::cat(rows)));
    }
    torch::Tensor numbers = torch::empty({set.size()}, torch::kInt64);
    allgather_into(numbers, torch::tensor(rank()), {.name = "scalars", .process_set = set});
    for (int position = 0; position < set.size(); ++position)
      EXPECT_EQ(numbers[position].item<int>(), set.ranks()[static_cast<std::size_t>(position)]);
  });
}

TEST(Into, ReduceAndGatherWriteTheRootsOutputOnly) {
  for_each_set([](const ProcessSet& set) {
    const int root = set.ranks().back();
    for (const torch::ScalarType type : {torch::kFloat32, torch::kFloat64, torch::kInt64}) {
      std::vector<torch::Tensor> rows;
      for (const int member : set.ranks())
        rows.push_back(rank_tensor(member, {member + 1, 3}, type));
      const auto inputs = every_member(set, {3, 4}, type);
      const torch::Tensor own = own_of(inputs, set), own_rows_of_all = own_of(rows, set);
      const AllreduceOptions sum{.name = "sum", .op = ReduceOp::kSum, .process_set = set};
      const CollectiveOptions options{.name = "rows", .process_set = set};
      const auto check = [&](const torch::Tensor& expected, const auto& blocking,
                             const auto& asynchronous) {
        const torch::Tensor output = torch::full_like(expected, 7);
        if (rank() == root)
          return expect_into(
              output, expected, [&] { return blocking(output); },
              [&] { return asynchronous(output); });
        EXPECT_TRUE(blocking(output).is_same(output));
        EXPECT_FALSE(asynchronous(torch::Tensor()).wait().defined());
        EXPECT_TRUE((output == 7).all().template item<bool>());
      };
      check(
          reference_reduce(inputs, ReduceOp::kSum),
          [&](const torch::Tensor& output) { return reduce_into(output, own, root, sum); },
          [&](const torch::Tensor& output) { return reduce_into_async(output, own, root, sum); });
      check(
          torch::cat(rows),
          [&](const torch::Tensor& output) {
            return gather_into(output, own_rows_of_all, root, options);
          },
          [&](const torch::Tensor& output) {
            return gather_into_async(output, own_rows_of_all, root, options);
          });
    }
    // The output is the input, with 16-bit compression.
    const auto inputs = every_member(set, {5}, torch::kFloat32);
    const torch::Tensor own = own_of(inputs, set).clone();
    reduce_into(own, own, root,
                {.name = "itself",
                 .op = ReduceOp::kSum,
                 .compression = Compression::kBFloat16,
                 .process_set = set});
    const torch::Tensor expected =
        rank() == root ? reference_reduce(inputs, ReduceOp::kSum) : own_of(inputs, set);
    EXPECT_TRUE(near(own, expected, 0.05));
  });
}

TEST(Into, ReducescatterAlltoallAndScatter) {
  for_each_set([](const ProcessSet& set) {
    const std::int64_t rows = 2 * set.size() + 1;
    const auto inputs = every_member(set, {rows, 2}, torch::kFloat32);
    const torch::Tensor own = own_of(inputs, set);
    const torch::Tensor share =
        torch::empty({rows_of_member(rows, set.size(), set.rank()), 2}, torch::kFloat32);
    const AllreduceOptions sum{.name = "share", .op = ReduceOp::kSum, .process_set = set};
    const torch::Tensor expected = own_rows(reference_reduce(inputs, ReduceOp::kSum), set);
    expect_into(
        share, expected, [&] { return reducescatter_into(share, own, sum); },
        [&] { return reducescatter_into_async(share, own, sum); });
    torch::Tensor whole = own.clone();
    reducescatter_into(own_rows(whole, set), whole, sum);
    EXPECT_TRUE(near(own_rows(whole, set), expected));

    const int root = set.ranks().back();
    const CollectiveOptions options{.name = "rows", .process_set = set};
    expect_into(
        share, own_rows(inputs.back(), set),
        [&] { return scatter_into(share, own, root, options); },
        [&] { return scatter_into_async(share, own, root, options); });

    // One row for each member, and the rest for the first.
    torch::Tensor splits = torch::ones({set.size()}, torch::kInt64);
    splits[0] = rows - set.size() + 1;
    std::vector<torch::Tensor> received;
    for (const torch::Tensor& input : inputs) {
      received.push_back(set.rank() == 0 ? input.narrow(0, 0, rows - set.size() + 1)
                                         : input.narrow(0, rows - set.size() + set.rank(), 1));
    }
    const torch::Tensor exchanged = torch::empty_like(torch::cat(received));
    expect_into(
        exchanged, torch::cat(received),
        [&] { return alltoall_into(exchanged, own, splits, options); },
        [&] { return alltoall_into_async(exchanged, own, splits, options); });
  });
}

TEST(Into, AnOutputThatDoesNotFitIsRefusedByTheCall) {
  const torch::Tensor input = torch::ones({2, 3});
  const auto refused = [&](const torch::Tensor& output) {
    return message_of<UsageError>([&] { allreduce_into(output, input, {.name = "a"}); });
  };
  EXPECT_TRUE(contains(refused(torch::Tensor()), "allreduce 'a': output: the tensor is undefined"));
  EXPECT_TRUE(contains(refused(torch::ones({2, 3}, torch::kFloat64)),
                       "expected the input's dtype and device, Float on cpu, got Double on cpu"));
  EXPECT_TRUE(contains(refused(torch::ones({3, 2})), "expected shape [2,3], got [3,2]"));
  EXPECT_TRUE(contains(refused(torch::ones({3, 2}).t()), "expected a contiguous tensor"));
  EXPECT_THROW(allreduce_into(torch::ones({1}).expand({2, 3}), input), UsageError);
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { allgather_into(torch::ones({2, 4}), input, {.name = "g"}); }),
      "allgather 'g': output: expected shape [*,3], got [2,4]"));
  EXPECT_THROW(broadcast_into(torch::ones({6}), input, 0), UsageError);
  EXPECT_THROW(reduce_into(torch::ones({6}), input, rank()), UsageError);
  EXPECT_THROW(gather_into(torch::ones({6}), input, rank()), UsageError);
  EXPECT_THROW(gather_into(torch::Tensor(), input, rank()), UsageError);
  EXPECT_THROW(reducescatter_into(torch::ones({9, 3}), input, {.op = ReduceOp::kSum}), UsageError);
  const torch::Tensor memory = torch::ones({8});
  EXPECT_TRUE(contains(message_of<UsageError>(
                           [&] { allreduce_into(memory.narrow(0, 1, 4), memory.narrow(0, 0, 4)); }),
                       "overlaps the input"));
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { alltoall_into(memory, memory.narrow(0, 0, size())); }),
               "it shares memory with the input"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         allreduce_into(torch::ones({2}), torch::ones({2}, torch::requires_grad()));
                       }),
                       "not differentiable"));
}

TEST(Into, AWrongNumberOfRowsFailsOnItsRankAlone) {
  const torch::Tensor input = torch::full({2, 3}, rank() + 1.0);
  const bool wrong = rank() == size() - 1;
  const torch::Tensor output = torch::zeros({2 * size() + (wrong ? 1 : 0), 3});
  const auto act = [&] { allgather_into(output, input, {.name = "rows"}); };
  if (wrong) {
    EXPECT_TRUE(contains(message_of<UsageError>(act),
                         "allgather 'rows': output: expected shape [" + std::to_string(2 * size()) +
                             ",3], got [" + std::to_string(2 * size() + 1) + ",3]"));
    EXPECT_EQ(output.sum().item<float>(), 0);
  } else {
    act();
    EXPECT_EQ(output[2 * size() - 1][0].item<float>(), static_cast<float>(size()));
  }
  // Inputs that are not this rank's rows of the output.
  torch::Tensor whole = torch::zeros({2 * size() + 1, 3}).narrow(0, 0, 2 * size());
  const torch::Tensor shifted =
      torch::from_blob(static_cast<float*>(whole.data_ptr()) + 6 * rank() + 3, {2, 3});
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { allgather_into(whole, shifted, {.name = "shifted"}); }),
               "it shares memory with the input; expected the input to be its rows from " +
                   std::to_string(2 * rank()) + " on"));
  EXPECT_EQ(allreduce(torch::ones({1}), {.op = ReduceOp::kSum}).item<float>(), size());
}

}  // namespace
}  // namespace hvd::testing
