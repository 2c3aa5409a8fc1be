// Every operation on tensors of a GPU, through NCCL and staged through the host: the results, and
// the order of the work on the device, which must be enforced.
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "kernels/half.h"
#include "support/device_job.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;
using FloatOperation = DeviceOperation<float>;

class DeviceOperationsTest : public DevicePathsTest {
 protected:
  static Floats numbers(std::int64_t count, int rank, int tensor) {
    Floats values;
    for (std::int64_t i = 0; i < count; ++i)
      values.push_back(static_cast<float>((rank + 1) * (tensor + 1)) + static_cast<float>(i));
    return values;
  }
  int sum_of_ranks() const { return size_ * (size_ + 1) / 2; }
};

TEST_P(DeviceOperationsTest, FusedAllreduceWithFactors) {
  const std::int64_t counts[] = {1, 7, 0, 64, 1000, 9001};
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 6; ++tensor) {
      own.push_back(FloatOperation::in_place(job_, rank, "t" + std::to_string(tensor),
                                             OpKind::kAllreduce, DataType::kFloat32,
                                             numbers(counts[tensor], rank, tensor)));
      allreduce_of(own.back().submission).op = ReduceOp::kAverage;
      allreduce_of(own.back().submission).prescale = 4;
      allreduce_of(own.back().submission).postscale = 0.5;
    }
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    for (int tensor = 0; tensor < 6; ++tensor) {
      const Floats values =
          result(rank, ranks[static_cast<std::size_t>(rank)][static_cast<std::size_t>(tensor)]);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float average =
            static_cast<float>(sum_of_ranks() * (tensor + 1)) / static_cast<float>(size_) +
            static_cast<float>(i);
        ASSERT_FLOAT_EQ(values[i], 2 * average)
            << "rank " << rank << ", tensor " << tensor << ", element " << i;
      }
    }
  }
  EXPECT_EQ(job_.runtime(0).metrics().backend_calls, 1U) << "one batch";
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, OneTensorIntoAnotherLeavesTheInput) {
  std::vector<std::vector<FloatOperation>> ranks;
  std::vector<GpuTensor<float>> inputs;
  for (int rank = 0; rank < size_; ++rank) {
    auto operation = FloatOperation::in_place(job_, rank, "t", OpKind::kAllreduce,
                                              DataType::kFloat32, Floats(10));
    auto [input, event] = job_.make<float>(rank, numbers(10, rank, 0));
    operation.submission.input = input.view(DataType::kFloat32);
    operation.submission.input_ready = event;
    inputs.push_back(input);
    ranks.push_back({operation});
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    EXPECT_EQ(result(rank, ranks[static_cast<std::size_t>(rank)][0])[2],
              static_cast<float>(sum_of_ranks() + 2 * size_));
    EXPECT_EQ(job_.read<float>(
                  rank, inputs[static_cast<std::size_t>(rank)].view(DataType::kFloat32), nullptr),
              numbers(10, rank, 0));
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, FusedRaggedAllgatherIsOneLaunch) {
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 5; ++tensor) {
      own.push_back(FloatOperation::gathering(job_, rank, "g" + std::to_string(tensor),
                                              OpKind::kAllgather, DataType::kFloat32,
                                              numbers((rank + tensor) % 3, rank, tensor)));
    }
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    for (int tensor = 0; tensor < 5; ++tensor) {
      Floats expected;
      for (int from = 0; from < size_; ++from) {
        const Floats part = numbers((from + tensor) % 3, from, tensor);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      EXPECT_EQ(
          result(rank, ranks[static_cast<std::size_t>(rank)][static_cast<std::size_t>(tensor)]),
          expected)
          << rank << " " << tensor;
    }
  }
  EXPECT_EQ(job_.runtime(0).metrics().backend_calls, 1U);
  const bool uses_nccl = std::get<0>(GetParam()) == Path::kNccl && size_ > 1;
  EXPECT_EQ(job_.nccl().counts(0).launches, uses_nccl ? 1 : 0);
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, FusedBroadcast) {
  const int root = size_ - 1;
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 3; ++tensor) {
      own.push_back(FloatOperation::in_place(job_, rank, "b" + std::to_string(tensor),
                                             OpKind::kBroadcast, DataType::kFloat32,
                                             numbers(5 + tensor, rank, tensor)));
      own.back().submission.parameters = Broadcast{root};
    }
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    for (int tensor = 0; tensor < 3; ++tensor) {
      EXPECT_EQ(
          result(rank, ranks[static_cast<std::size_t>(rank)][static_cast<std::size_t>(tensor)]),
          numbers(5 + tensor, root, tensor));
    }
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, FusedReducescatter) {
  const std::int64_t rows[] = {7, 2, 12};
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 3; ++tensor) {
      auto operation =
          FloatOperation::in_place(job_, rank, "s" + std::to_string(tensor), OpKind::kReducescatter,
                                   DataType::kFloat32, numbers(rows[tensor], rank, tensor));
      auto [output, event] = job_.make<float>(
          rank, Floats(static_cast<std::size_t>(rows_of_member(rows[tensor], size_, rank))));
      operation.submission.output = *operation.output = output.view(DataType::kFloat32);
      operation.submission.input_ready = event;  // of the same queue as the input's, and later
      operation.submission.parameters = Reducescatter{.postscale = 3};
      own.push_back(operation);
    }
  }
  run(ranks);
  for (int tensor = 0; tensor < 3; ++tensor) {
    std::int64_t first = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const Floats values =
          result(rank, ranks[static_cast<std::size_t>(rank)][static_cast<std::size_t>(tensor)]);
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_FLOAT_EQ(
            values[i],
            3 * static_cast<float>(sum_of_ranks() * (tensor + 1) +
                                   size_ * static_cast<int>(first + static_cast<std::int64_t>(i))));
      }
      first += static_cast<std::int64_t>(values.size());
    }
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, AlltoallWithSplitsThatOnlyTheSenderKnows) {
  std::vector<std::vector<FloatOperation>> ranks;
  const auto split = [](int from, int to) {
    return static_cast<std::int64_t>((from + 2 * to) % 4);
  };
  const auto value = [](int from, int to, std::int64_t i) {
    return static_cast<float>(100 * from + 10 * to) + static_cast<float>(i);
  };
  for (int rank = 0; rank < size_; ++rank) {
    Floats sent;
    std::vector<std::int64_t> splits;
    for (int to = 0; to < size_; ++to) {
      splits.push_back(split(rank, to));
      for (std::int64_t i = 0; i < splits.back(); ++i) sent.push_back(value(rank, to, i));
    }
    auto operation =
        FloatOperation::gathering(job_, rank, "a", OpKind::kAlltoall, DataType::kFloat32, sent);
    operation.submission.parameters = Alltoall{splits};
    ranks.push_back({operation});
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    Floats expected;
    for (int from = 0; from < size_; ++from) {
      for (std::int64_t i = 0; i < split(from, rank); ++i) expected.push_back(value(from, rank, i));
    }
    EXPECT_EQ(result(rank, ranks[static_cast<std::size_t>(rank)][0]), expected);
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, Gather) {
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    ranks.push_back({FloatOperation::gathering(job_, rank, "g", OpKind::kGather, DataType::kFloat32,
                                               numbers(rank + 1, rank, 0))});
  }
  run(ranks);
  Floats expected;
  for (int from = 0; from < size_; ++from) {
    const Floats part = numbers(from + 1, from, 0);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(result(0, ranks[0][0]), expected);
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, ReduceToOneRank) {
  const int root = size_ - 1;
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 2; ++tensor) {
      own.push_back(FloatOperation::in_place(job_, rank, "r" + std::to_string(tensor),
                                             OpKind::kReduce, DataType::kFloat32,
                                             numbers(9, rank, tensor)));
      own.back().submission.parameters = Reduce{.prescale = 2, .root = root};
    }
  }
  run(ranks);
  for (int tensor = 0; tensor < 2; ++tensor) {
    const Floats values =
        result(root, ranks[static_cast<std::size_t>(root)][static_cast<std::size_t>(tensor)]);
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_FLOAT_EQ(values[i], 2 * (static_cast<float>(sum_of_ranks() * (tensor + 1)) +
                                      static_cast<float>(size_) * static_cast<float>(i)));
    }
  }
  EXPECT_EQ(job_.runtime(0).metrics().backend_calls, 1U) << "one batch";
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, ScatterFromOneRank) {
  const int root = size_ / 2;
  const std::int64_t rows = 2 * size_ + 1;
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    ranks.push_back(
        {FloatOperation::gathering(job_, rank, "s", OpKind::kScatter, DataType::kFloat32,
                                   numbers(rank == root ? rows : rank, rank, 0))});
    ranks.back()[0].submission.parameters = Scatter{root};
  }
  run(ranks);
  const Floats all = numbers(rows, root, 0);
  auto next = all.begin();
  for (int rank = 0; rank < size_; ++rank) {
    const auto end = next + (rank == 0 ? 3 : 2);
    EXPECT_EQ(result(rank, ranks[static_cast<std::size_t>(rank)][0]), Floats(next, end)) << rank;
    next = end;
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, BitwiseOperationsOfIntegersAndBools) {
  using IntOperation = DeviceOperation<std::int32_t>;
  std::vector<std::vector<IntOperation>> ranks;
  std::vector<std::vector<DeviceOperation<std::uint8_t>>> flags;
  for (int rank = 0; rank < size_; ++rank) {
    ranks.push_back({IntOperation::in_place(job_, rank, "i", OpKind::kAllreduce, DataType::kInt32,
                                            {1 << rank, 3 << rank, -1})});
    allreduce_of(ranks.back()[0].submission).op = ReduceOp::kBitXor;
    flags.push_back({DeviceOperation<std::uint8_t>::in_place(
        job_, rank, "b", OpKind::kAllreduce, DataType::kBool,
        {static_cast<std::uint8_t>(rank == 0 ? 1 : 0), 1})});
    allreduce_of(flags.back()[0].submission).op = ReduceOp::kBitAnd;
  }
  run(ranks);
  run(flags);
  const int last = size_ - 1;
  EXPECT_EQ(
      result(last, ranks[static_cast<std::size_t>(last)][0]),
      (std::vector<std::int32_t>{(1 << size_) - 1, (1 << size_) | 1, size_ % 2 == 1 ? -1 : 0}));
  EXPECT_EQ(result(last, flags[static_cast<std::size_t>(last)][0]),
            (std::vector<std::uint8_t>{static_cast<std::uint8_t>(size_ == 1 ? 1 : 0), 1}));
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, AnAverageOfIntegersIsExact) {
  // Sums that overflow 32 bits, and numbers that no double holds.
  std::vector<std::vector<DeviceOperation<std::int32_t>>> small;
  for (int rank = 0; rank < size_; ++rank) {
    small.push_back({DeviceOperation<std::int32_t>::in_place(
        job_, rank, "i", OpKind::kAllreduce, DataType::kInt32, {2000000000, -7, 5})});
    allreduce_of(small.back().front().submission).op = ReduceOp::kAverage;
  }
  run(small);
  std::vector<std::vector<DeviceOperation<std::int64_t>>> large;
  const std::int64_t odd = (std::int64_t{1} << 53) + 1;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = large.emplace_back();
    for (int tensor = 0; tensor < 2; ++tensor) {
      own.push_back(DeviceOperation<std::int64_t>::in_place(
          job_, rank, "l" + std::to_string(tensor), OpKind::kAllreduce, DataType::kInt64,
          {odd + tensor}));
    }
  }
  run(large);
  for (int rank = 0; rank < size_; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    EXPECT_EQ(result(rank, small[index][0]), (std::vector<std::int32_t>{2000000000, -7, 5}));
    EXPECT_EQ(result(rank, large[index][0]), (std::vector<std::int64_t>{odd * size_}));
    EXPECT_EQ(result(rank, large[index][1]), (std::vector<std::int64_t>{(odd + 1) * size_}));
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, AdasumOfEqualVectorsIsTheVector) {
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    ranks.push_back({FloatOperation::in_place(job_, rank, "a", OpKind::kAllreduce,
                                              DataType::kFloat32, {1, 2, 3, 4, 5})});
    allreduce_of(ranks.back().front().submission).op = ReduceOp::kAdasum;
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    const Floats values = result(rank, ranks[static_cast<std::size_t>(rank)][0]);
    for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(values[i], static_cast<float>(i + 1), 1e-5);
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, ALargeTensorInManyPieces) {
  constexpr std::int64_t kElements = (9 << 20) / 4 + 3;
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    ranks.push_back(
        {FloatOperation::in_place(job_, rank, "large", OpKind::kAllreduce, DataType::kFloat32,
                                  Floats(kElements, static_cast<float>(rank + 1)))});
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    EXPECT_EQ(result(rank, ranks[static_cast<std::size_t>(rank)][0]),
              Floats(kElements, static_cast<float>(sum_of_ranks())));
  }
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, AJoinedRankDoesNotChangeTheResult) {
  if (size_ == 1) GTEST_SKIP() << "needs a rank that waits";
  const int joined = size_ - 1;
  const Operation waiting = submit_one(job_.runtime(joined), join_operation());
  std::vector<std::vector<FloatOperation>> ranks;
  std::vector<Operation> handles;
  for (int rank = 0; rank < joined; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 3; ++tensor) {
      own.push_back(FloatOperation::in_place(job_, rank, "t" + std::to_string(tensor),
                                             OpKind::kAllreduce, DataType::kFloat32,
                                             numbers(9 + tensor, rank, tensor)));
      allreduce_of(own.back().submission).op = tensor == 2 ? ReduceOp::kMin : ReduceOp::kAverage;
      if (tensor == 2) allreduce_of(own.back().submission).prescale = 2;
      handles.push_back(submit_one(job_.runtime(rank), own.back().submission));
    }
  }
  ASSERT_TRUE(job_.run(handles));
  for (int rank = 0; rank < joined; ++rank) {
    const auto& own = ranks[static_cast<std::size_t>(rank)];
    for (int tensor = 0; tensor < 2; ++tensor) {
      const float average =
          static_cast<float>(joined * (joined + 1) / 2 * (tensor + 1)) / static_cast<float>(joined);
      EXPECT_FLOAT_EQ(result(rank, own[static_cast<std::size_t>(tensor)])[0], average);
    }
    EXPECT_FLOAT_EQ(result(rank, own[2])[0], 2 * 3.0F);
  }
  std::vector<Operation> joins = {waiting};
  for (int rank = 0; rank < joined; ++rank)
    joins.push_back(submit_one(job_.runtime(rank), join_operation()));
  EXPECT_TRUE(job_.run(joins));
  job_.expect_no_faults();
}

TEST_P(DeviceOperationsTest, HalfPrecisionAndBoolsAndBytes) {
  std::vector<std::vector<DeviceOperation<std::uint16_t>>> halves;
  std::vector<std::vector<DeviceOperation<std::uint8_t>>> bools;
  for (int rank = 0; rank < size_; ++rank) {
    auto& own = halves.emplace_back();
    own.push_back(DeviceOperation<std::uint16_t>::in_place(
        job_, rank, "h", OpKind::kAllreduce, DataType::kFloat16,
        std::vector<std::uint16_t>(9, float_to_half(static_cast<float>(rank + 1)))));
    own.push_back(DeviceOperation<std::uint16_t>::in_place(
        job_, rank, "i", OpKind::kBroadcast, DataType::kInt16,
        std::vector<std::uint16_t>(3, static_cast<std::uint16_t>(300 + rank))));
    bools.push_back({DeviceOperation<std::uint8_t>::in_place(job_, rank, "o", OpKind::kAllreduce,
                                                             DataType::kBool, {rank == 0, 0, 1})});
  }
  run(halves);
  run(bools);
  for (int rank = 0; rank < size_; ++rank) {
    const auto index = static_cast<std::size_t>(rank);
    EXPECT_EQ(half_to_float(result(rank, halves[index][0])[8]), static_cast<float>(sum_of_ranks()));
    EXPECT_EQ(result(rank, halves[index][1])[2], 300);
    EXPECT_EQ(result(rank, bools[index][0]), (std::vector<std::uint8_t>{1, 0, 1}));
  }
  job_.expect_no_faults();
}

INSTANTIATE_TEST_SUITE_P(Paths, DeviceOperationsTest, paths_and_ranks(), name_of_path);

}  // namespace
}  // namespace hvd::testing
