// Allreduces of fp32 on a GPU that are sent as 16 bits. The launches that pack and unpack them also
// cast.
#include <gtest/gtest.h>

#include <cmath>
#include "support/device_job.h"
#include "support/reference.h"

namespace hvd::testing {
namespace {

using Floats = std::vector<float>;
using FloatOperation = DeviceOperation<float>;

class DeviceCompressionTest : public DevicePathsTest {
 protected:
  FloatOperation operation(int rank, const std::string& name, const Floats& values,
                           Compression compression) {
    FloatOperation made =
        FloatOperation::in_place(job_, rank, name, OpKind::kAllreduce, DataType::kFloat32, values);
    allreduce_of(made.submission).compression = compression;
    return made;
  }
  static Floats numbers(std::int64_t count, int rank, std::uint64_t seed) {
    const Bytes bytes = make_input(count, DataType::kFloat32, ReduceOp::kSum, rank, seed);
    Floats values(static_cast<std::size_t>(count));
    std::ranges::copy(bytes, std::as_writable_bytes(std::span(values)).data());
    return values;
  }
  /// The host's result. The staged path gives the same bits; NCCL, which rounds each sum, gives
  /// almost the same values.
  static Floats expected(const std::vector<Floats>& inputs, const Allreduce& how) {
    if (inputs.size() == 1) {  // a set of one sends no data, so it does not cast
      Floats values = inputs.front();
      for (float& value : values) value *= static_cast<float>(how.prescale * how.postscale);
      return values;
    }
    std::vector<Bytes> bytes;
    for (const Floats& input : inputs) {
      const auto view = std::as_bytes(std::span(input));
      bytes.emplace_back(view.begin(), view.end());
    }
    const Bytes reduced =
        reference_compressed(bytes, how.compression, how.op, how.prescale, how.postscale);
    Floats values(inputs.front().size());
    std::ranges::copy(reduced, std::as_writable_bytes(std::span(values)).data());
    return values;
  }
  /// @param largest the largest intermediate sum
  static void expect_same(const Floats& actual, const Floats& wanted, Compression compression,
                          double largest) {
    ASSERT_EQ(actual.size(), wanted.size());
    const double rounding =
        path() == Path::kStaged
            ? 0
            : largest * (compression == Compression::kFloat16 ? 0x1p-9 : 0x1p-6);
    for (std::size_t i = 0; i < actual.size(); ++i)
      ASSERT_NEAR(actual[i], wanted[i], rounding) << "element " << i;
  }
};

TEST_P(DeviceCompressionTest, ABatchIsCastScaledAndReducedInOneCall) {
  const std::vector<std::int64_t> counts = {1, 7, 0, 64, 1000, 9001};
  for (const Compression compression : {Compression::kFloat16, Compression::kBFloat16}) {
    for (const double postscale : {0.5, 3.0}) {
      const std::uint64_t calls = job_.runtime(0).metrics().backend_calls;
      std::vector<std::vector<FloatOperation>> ranks;
      std::vector<std::vector<Floats>> inputs(counts.size());
      for (int rank = 0; rank < size_; ++rank) {
        auto& own = ranks.emplace_back();
        for (std::size_t tensor = 0; tensor < counts.size(); ++tensor) {
          inputs[tensor].push_back(numbers(counts[tensor], rank, tensor));
          own.push_back(
              operation(rank, "t" + std::to_string(tensor), inputs[tensor].back(), compression));
          allreduce_of(own.back().submission).op = ReduceOp::kAverage;
          allreduce_of(own.back().submission).prescale = 0.7;
          allreduce_of(own.back().submission).postscale = postscale;
        }
      }
      run(ranks);
      EXPECT_EQ(job_.runtime(0).metrics().backend_calls - calls, 1U) << "one batch";
      for (int rank = 0; rank < size_; ++rank) {
        for (std::size_t tensor = 0; tensor < counts.size(); ++tensor) {
          const FloatOperation& one = ranks[static_cast<std::size_t>(rank)][tensor];
          expect_same(result(rank, one),
                      expected(inputs[tensor], std::get<Allreduce>(one.submission.parameters)),
                      compression, 3.0 * 16 * size_);
        }
      }
    }
  }
  job_.expect_no_faults();
}

TEST_P(DeviceCompressionTest, OneTensorIntoAnotherLeavesTheInput) {
  std::vector<std::vector<FloatOperation>> ranks;
  std::vector<GpuTensor<float>> sent;
  std::vector<Floats> inputs;
  for (int rank = 0; rank < size_; ++rank) {
    inputs.push_back(numbers(1001, rank, 5));
    FloatOperation one = operation(rank, "t", Floats(1001), Compression::kFloat16);
    auto [input, event] = job_.make<float>(rank, inputs.back());
    one.submission.input = input.view(DataType::kFloat32);
    one.submission.input_ready = event;
    sent.push_back(input);
    ranks.push_back({one});
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank) {
    const FloatOperation& one = ranks[static_cast<std::size_t>(rank)][0];
    expect_same(result(rank, one), expected(inputs, std::get<Allreduce>(one.submission.parameters)),
                Compression::kFloat16, 16.0 * size_);
    EXPECT_EQ(job_.read<float>(rank, sent[static_cast<std::size_t>(rank)].view(DataType::kFloat32),
                               nullptr),
              inputs[static_cast<std::size_t>(rank)]);
  }
  job_.expect_no_faults();
}

TEST_P(DeviceCompressionTest, AdasumTakesNoPaddingIntoTheVector) {
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    ranks.push_back({operation(rank, "a", {1, 2, 3, 4, 5}, Compression::kBFloat16)});
    allreduce_of(ranks.back().front().submission).op = ReduceOp::kAdasum;
  }
  run(ranks);
  for (int rank = 0; rank < size_; ++rank)
    EXPECT_EQ(result(rank, ranks[static_cast<std::size_t>(rank)][0]), (Floats{1, 2, 3, 4, 5}));
  job_.expect_no_faults();
}

TEST_P(DeviceCompressionTest, AJoinedRankDoesNotChangeTheResult) {
  if (size_ == 1) GTEST_SKIP() << "needs a rank that waits";
  const int joined = size_ - 1;
  const Operation waiting = submit_one(job_.runtime(joined), join_operation());
  std::vector<std::vector<FloatOperation>> ranks;
  for (int rank = 0; rank < joined; ++rank) {
    auto& own = ranks.emplace_back();
    for (int tensor = 0; tensor < 3; ++tensor) {
      own.push_back(operation(rank, "t" + std::to_string(tensor),
                              Floats(static_cast<std::size_t>(9 + tensor),
                                     static_cast<float>((rank + 1) * (tensor + 1))),
                              Compression::kFloat16));
      allreduce_of(own.back().submission).op =
          tensor == 2 ? ReduceOp::kMin : ReduceOp::kAverage;  // two fused, and one by itself
      allreduce_of(own.back().submission).prescale = 2;
    }
  }
  run(ranks);
  for (int rank = 0; rank < joined; ++rank) {
    const auto& own = ranks[static_cast<std::size_t>(rank)];
    for (int tensor = 0; tensor < 2; ++tensor) {
      const float average =
          static_cast<float>(joined * (joined + 1) * (tensor + 1)) / static_cast<float>(joined);
      EXPECT_NEAR(result(rank, own[static_cast<std::size_t>(tensor)])[0], average,
                  average * 0x1p-10);
    }
    EXPECT_EQ(result(rank, own[2]), Floats(11, 2 * 3.0F));
  }
  std::vector<Operation> joins = {waiting};
  for (int rank = 0; rank < joined; ++rank)
    joins.push_back(submit_one(job_.runtime(rank), join_operation()));
  EXPECT_TRUE(job_.run(joins));
  job_.expect_no_faults();
}

INSTANTIATE_TEST_SUITE_P(Paths, DeviceCompressionTest, paths_and_ranks(), name_of_path);

}  // namespace
}  // namespace hvd::testing
